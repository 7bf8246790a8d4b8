# Two commands need no other step: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= What is the capital of France?
# Through the environment, as pasted into the recipe its quotes and dollars would be the shell's.
export PROMPT

.PHONY: help run test check venv clean

help: ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

run: $(VENV)/installed ## one real completion, streamed to the terminal
	$(BIN)/deepinfer run -- "$$PROMPT"

test: venv ## all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: venv ## style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --target build/installed .
	MYPYPATH=build/installed $(BIN)/mypy -p deepinfer
	cd build/installed && ../../$(BIN)/lint-imports --config ../../pyproject.toml

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

clean: ## remove the virtual environment
	rm -rf $(VENV)
