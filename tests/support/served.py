"""``deepinfer serve`` as users start it: a process of its own, over the scripted model.

    with served(ScriptedFolder(tmp_path), "--max-num-seqs", "4") as server:
        httpx.post(server.url + "/v1/completions", json={…})

``in_process(engine)`` serves an ``AsyncEngine`` of the test itself, whose ``stats()`` it can ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import uvicorn

from deepinfer import AsyncEngine
from deepinfer.frontend.gateway.app import Gateway
from deepinfer.frontend.gateway.http_protocol import BoundedProtocol
from deepinfer.frontend.gateway.tenants import Tenants
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, process_of

MODEL = "scripted"


@dataclass
class Served:
    """A running server; ``errors()`` is what it wrote to stderr so far."""

    url: str
    folder: ScriptedFolder
    process: subprocess.Popen[str]
    _errors: Any = field(repr=False)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def child(self, module: str) -> psutil.Process:
        """The one process of its engine that runs ``python -m MODULE``."""
        return process_of(module, psutil.Process(self.process.pid))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE_S)


@contextmanager
def served(folder: ScriptedFolder, *flags: str) -> Iterator[Served]:
    """Start a server, and end it with SIGTERM; a traceback on its stderr fails the test."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer", "serve", "--model", str(folder.path),
             "--worker-module", "support.scripted_worker", "--served-model-name", MODEL,
             "--port", "0", *flags],
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            errors.seek(0)
            assert line.startswith("ready at http://"), errors.read().decode()
            server = Served(line.split()[-1], folder, process, errors)
            yield server
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
            assert "Traceback" not in server.errors(), server.errors()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()


@asynccontextmanager
async def in_process(
    engine: AsyncEngine, tenants: Tenants | None = None, **options: Any
) -> AsyncIterator[str]:
    """Serve an engine in this loop; yields the URL."""
    gateway = Gateway(engine, [MODEL], tenants or Tenants.anonymous(), **options)
    config = uvicorn.Config(
        gateway, http=BoundedProtocol, log_level="warning", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            server.should_exit = server.force_exit = True
            await serving


def events(text: str) -> list[Any]:
    """The events of a whole stream: each a JSON object, at the end ``[DONE]``; no comments."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def eventually(true: Any) -> None:
    """Ask again and again, until it is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await true():
            await asyncio.sleep(0.01)


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
