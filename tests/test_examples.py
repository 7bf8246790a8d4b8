"""The examples and the README's programs run as they stand, on the real model."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer import AsyncEngine, EngineArgs
from support.patience import PATIENCE_S
from support.vision_checkpoints import make_vision_checkpoint, picture

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.process, pytest.mark.model, pytest.mark.slow]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_embed(smollm2_folder) -> None:
    assert "Paris" in run(str(ROOT / "examples" / "embed.py"))


def test_batch(smollm2_folder) -> None:
    lines = run(str(ROOT / "examples" / "batch.py")).splitlines()
    assert [line.startswith(("The sea is", "Once upon a time")) for line in lines] == [True, True]
    assert all("nats" in line for line in lines)


def test_pictures(tmp_path) -> None:
    """With a tiny random model, for no real one is at hand: what it says has no meaning."""
    folder = make_vision_checkpoint("idefics3", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
    )
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    picture(70, 40).save(good)
    bad.write_bytes(good.read_bytes()[:200])
    told = run(str(ROOT / "examples" / "pictures.py"), str(folder), str(good), str(bad))
    lines = dict(line.split(" ", 1) for line in told.splitlines())
    assert re.fullmatch(r"\(\d+ tokens\): '.*'", lines[str(good)])
    assert ": image:0: " in lines[str(bad)]


def test_openai_client(smollm2_folder) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", "serve", "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[-1]
        told = run(str(ROOT / "examples" / "openai_client.py"), f"{url}/v1")
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()
    assert "Paris" in told and "nats" in told and "refused: temperature" in told


async def test_client_and_the_readme_programs(smollm2_folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    programs = [block for block in blocks if block.startswith(("import ", "from "))]
    assert len(programs) == 3
    async with AsyncEngine(EngineArgs(model=str(smollm2_folder), endpoint=endpoint)):
        told = await asyncio.to_thread(run, str(ROOT / "examples" / "client.py"), endpoint)
        assert "[stop: eos]" in told or "[length: max_tokens]" in told
        assert "first_token" in told
        program = tmp_path / "readme_client.py"
        program.write_text(programs[2].replace("tcp://127.0.0.1:5757", endpoint))
        assert await asyncio.to_thread(run, str(program))
    for number, expected in ((0, "Paris"), (1, " ")):
        program = tmp_path / f"readme_{number}.py"
        program.write_text(programs[number])
        assert expected in await asyncio.to_thread(run, str(program))
