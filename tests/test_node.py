"""The Node.js example talks to a real engine: docs/protocol.md is enough for another language."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deepinfer import AsyncEngine
from support.curve import KeyFolder, free_endpoint
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, process_of

EXAMPLE = Path(__file__).parent.parent / "examples" / "node"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (EXAMPLE / "node_modules").is_dir(),
        reason="its packages are not installed: `make test` does it where npm is there",
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", step_ms=1)


@contextlib.asynccontextmanager
async def node(*argv: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        "node",
        *map(str, argv),
        cwd=EXAMPLE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def output(folder: ScriptedFolder, *argv: object) -> dict[str, list[str]]:
    """What the example prints of each request.

    As many steps pass as one whole request, and then what the other needs before it is aborted.
    """
    lines: dict[str, list[str]] = {}
    async with asyncio.timeout(PATIENCE_S), node("stream.mjs", *argv) as process:
        with folder.held(after=40):
            text, errors = await process.communicate()
        assert process.returncode == 0, errors
    for line in text.decode().splitlines():
        name, _, rest = line.partition(": ")
        lines.setdefault(name, []).append(rest)
    return lines


def check(folder: ScriptedFolder, lines: dict[str, list[str]]) -> None:
    assert lines["model"][0].startswith(str(folder.path))
    tokens, end = lines["whole"]
    assert [int(token) for token in tokens.split()] == folder.reference([3, 4, 5], 24)
    assert end == "length (max_tokens) after 24 tokens"
    tokens, end = lines["aborted"]
    got = [int(token) for token in tokens.split()]
    assert 5 <= len(got) <= 40
    assert got == folder.reference([6, 7, 8], 900)[: len(got)]
    assert end == f"abort (client_abort) after {len(got)} tokens"


async def test_a_node_client_streams_one_request_and_aborts_another(folder) -> None:
    async with AsyncEngine(folder.args(endpoint=free_endpoint())) as engine:
        check(folder, await output(folder, engine.args.endpoint))
        stats = await engine.stats()
        assert (stats["ended_client_abort"], stats["ended_max_tokens"]) == (1, 1)
        assert stats["junk_frames"] == stats["live"] == 0


async def test_a_node_client_has_keys(folder, tmp_path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    server, secret = keys.client("node").values()
    public = secret.with_suffix(".pub")
    args = folder.args(endpoint=free_endpoint(), curve_keys=str(keys.path))
    async with AsyncEngine(args):
        check(folder, await output(folder, args.endpoint, server, public, secret))


async def test_a_node_client_is_told_that_its_key_is_unknown(folder, tmp_path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    server, secret = keys.client("node").values()
    public = secret.with_suffix(".pub").rename(tmp_path / "node.pub")
    args = folder.args(endpoint=free_endpoint(), curve_keys=str(keys.path))
    async with (
        AsyncEngine(args),
        asyncio.timeout(PATIENCE_S),
        node("stream.mjs", args.endpoint, server, public, secret) as process,
    ):
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert b"does not know this client's key" in errors


STREAM = """
import { Engine } from "./deepinfer.mjs";
const engine = await Engine.connect(process.argv[1]);
const params = { temperature: 0, ignore_eos: true, max_tokens: 40 };
for await (const token of engine.generate("r", [3, 4, 5], params)) console.log(token);
await engine.close();
"""


async def test_a_node_client_without_a_key_ends_with_the_reason(folder, tmp_path) -> None:
    args = folder.args(endpoint=free_endpoint(), curve_keys=str(KeyFolder(tmp_path / "keys").path))
    async with (
        asyncio.timeout(PATIENCE_S),
        AsyncEngine(args),
        node("stream.mjs", args.endpoint) as process,
    ):
        _, stderr = await process.communicate()
    assert process.returncode == 1 and b"one that has keys wants this client's" in stderr


async def test_a_node_client_goes_on_with_the_next_scheduler(folder) -> None:
    """PROC-01: the scheduler, SIGKILL, seen by a client in another language."""
    async with AsyncEngine(folder.args(endpoint=free_endpoint())) as engine:
        module = ["--input-type=module", "-e", STREAM, engine.args.endpoint]
        async with asyncio.timeout(PATIENCE_S), node(*module) as process:
            assert process.stdout is not None
            with folder.held(after=5):
                got = [int(await process.stdout.readline()) for _ in range(5)]
                process_of("deepinfer.scheduler").kill()
            got += [int(line) for line in (await process.stdout.read()).split()]
            assert await process.wait() == 0
        assert got == folder.reference([3, 4, 5], 40)
