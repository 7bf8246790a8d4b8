# Two commands need no other step: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= What is the capital of France?
# Through the environment, as pasted into the recipe its quotes and dollars would be the shell's.
export PROMPT

NODE_PACKAGES := examples/node/node_modules/.package-lock.json

.PHONY: help run test check venv node clean

help: ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

run: $(VENV)/installed ## one real completion, streamed to the terminal
	$(BIN)/deepinfer run -- "$$PROMPT"

test: venv node ## all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: venv ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --target build/installed .
	MYPYPATH=build/installed $(BIN)/mypy -p deepinfer
	cd build/installed && ../../$(BIN)/lint-imports --config ../../pyproject.toml

node: $(if $(shell command -v npm),$(NODE_PACKAGES)) ## packages of the Node.js example, where npm is installed

venv: $(VENV)/ready ## .venv with the project and what its tests need

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing deepinfer and its packages (numba, tokenizers, …) into $(VENV): a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/ready: $(VENV)/installed
	@echo "Installing what the tests need (PyTorch, transformers, …) into $(VENV): a few minutes."
	$(BIN)/pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

$(NODE_PACKAGES): examples/node/package-lock.json
	npm ci --prefix examples/node --no-audit --no-fund

clean: ## remove the virtual environment, the example's packages and what the checks built
	rm -rf $(VENV) build examples/node/node_modules
