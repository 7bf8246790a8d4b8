"""Tools that nobody here wrote, against ``deepinfer serve`` with SmolLM2.

They are not among what the tests need. Where one is not on the PATH (for npm's ``openai``: in
NODE_PATH), its test is skipped; docs/gateway.md tells how to install them.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.patience import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.model, pytest.mark.slow]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def url(smollm2_folder) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", "serve", "--port", "0", "--max-num-seqs", "16"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready at "), line
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lm_eval(url: str, smollm2_folder: Path) -> None:
    """Log probabilities of 120 continuations, by echo: SmolLM2 knows most of 30 plain facts."""
    told = run(
        "lm_eval", "run", "--model", "local-completions", "--model_args",
        f"model=smollm2-135m,base_url={url}/v1/completions,tokenizer={smollm2_folder},"
        "num_concurrent=8,max_retries=1",
        "--tasks", "facts", "--include_path", ".",
        cwd=HERE / "data" / "lm_eval",
    )  # fmt: skip
    found = re.search(r"\|acc *\|[^|]*\|([0-9.]+)", told)
    assert found and float(found[1]) > 0.7, told


@pytest.mark.parametrize("flags", [(), ("--no-stream",)])
def test_llm(url: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: deepinfer\n  model_name: smollm2-135m\n  api_base: {url}/v1\n"
    )
    told = run(
        "llm", "-m", "deepinfer", "-o", "temperature", "0", "-o", "max_tokens", "20", *flags,
        "What is the capital of France?",
        LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="unused",
    )  # fmt: skip
    assert "Paris" in told


def test_llama_benchy(url: str, smollm2_folder: Path, tmp_path: Path) -> None:
    """It measures prompts cut from a book, of which it needs one; ours are the documents."""
    book = "\n".join(path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md")))
    (tmp_path / "book.txt").write_text(book)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as books:
        threading.Thread(target=books.serve_forever, daemon=True).start()
        told = run(
            "llama-benchy", "--base-url", f"{url}/v1", "--model", "smollm2-135m",
            "--tokenizer", str(smollm2_folder), "--skip-coherence", "--exact-tg",
            "--book-url", f"http://127.0.0.1:{books.server_port}/book.txt",
            "--pp", "128", "--tg", "16", "--runs", "1", "--concurrency", "1", "4",
        )  # fmt: skip
        books.shutdown()
    assert "tg16" in told and "pp128" in told, told


def test_the_npm_client(url: str) -> None:
    node = shutil.which("node")
    if node is None or subprocess.run([node, "-e", "require('openai')"], check=False,
                                      capture_output=True).returncode:  # fmt: skip
        pytest.skip("node with openai of npm in NODE_PATH is not installed")
    assert "content" in run("node", str(HERE / "tools" / "openai_node.cjs"), url)
