"""Processes die, hang or talk junk: callers learn of it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from deepinfer import AsyncEngine, Client, EngineArgs, LLMEngine, SamplingParams
from deepinfer.frontend.errors import EngineBusyError, EngineDownError
from deepinfer.gpu_worker.kernels.settings import cache_folder
from deepinfer.wire import messages, steps
from deepinfer.wire.columns import pack_int32
from support.curve import free_endpoint
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, engine_processes, process_of
from support.streams import check_stream, outputs

pytestmark = pytest.mark.process

LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", step_ms=1)


async def ids(engine: AsyncEngine | Client, prompt, params, **kwargs) -> list[int]:
    return [out.token_id async for out in engine.generate(prompt, params, **kwargs)]


async def wait_gone(processes: list[psutil.Process]) -> None:
    gone, alive = await asyncio.to_thread(psutil.wait_procs, processes, PATIENCE_S)
    assert not alive, alive
    assert len(gone) == len(processes)


def directories() -> set[Path]:
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    return set(parent.glob(f"deepinfer-{os.getpid()}-*"))


async def test_a_killed_worker_is_replaced_and_its_streams_go_on(folder) -> None:
    """PROC-01: the worker, SIGKILL."""
    async with AsyncEngine(folder.args(stop_preempted_request=False)) as engine:
        victim = process_of("support.scripted_worker")
        with folder.held(after=5):
            stream = engine.generate([3, 4, 5], SHORT)
            got = [(await anext(stream)).token_id for _ in range(5)]
            victim.kill()
        got += [out.token_id async for out in stream]
        assert got == folder.reference([3, 4, 5], 20)
        assert (await engine.stats())["worker_restarts"] == 1
        assert process_of("support.scripted_worker").pid != victim.pid


async def test_a_worker_that_hangs_counts_as_dead(folder) -> None:
    """PROC-01: the worker, SIGSTOP."""
    async with AsyncEngine(folder.args(heartbeat_timeout_s=2)) as engine:
        with folder.held(after=1):
            stream = engine.generate([3, 4, 5], SHORT)
            got = [(await anext(stream)).token_id]
            process_of("support.scripted_worker").suspend()
        got += [out.token_id async for out in stream]
        assert got == folder.reference([3, 4, 5], 20)


async def test_a_request_that_kills_its_workers_ends_alone(tmp_path) -> None:
    folder = ScriptedFolder(tmp_path / "model", poison=200, step_ms=5)
    async with AsyncEngine(folder.args(stop_preempted_request=False)) as engine:
        others = [asyncio.create_task(ids(engine, [i, 7], SHORT)) for i in range(3, 6)]
        [out] = [out async for out in engine.generate([200, 1], SHORT)]
        assert (out.finish_reason, out.finish_detail) == ("abort", "worker_failed")
        assert "SIGKILL" in out.error
        for i, other in enumerate(others, start=3):
            assert await other == folder.reference([i, 7], 20)
        assert (await engine.health())["ok"]
        assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)


async def test_workers_that_die_without_end_bring_an_error_not_a_hang(folder) -> None:
    """PROC-01: every call gets an error with its cause."""
    async with AsyncEngine(folder.args()) as engine:
        with folder.held(after=1):
            stream = engine.generate([3, 4, 5], LONG)
            await anext(stream)
            # From now on no worker gets ready.
            folder.path.joinpath("scripted.json").write_text("not json")
            process_of("support.scripted_worker").kill()
        async with asyncio.timeout(PATIENCE_S):
            outs = [out async for out in stream]
        assert (outs[-1].finished, outs[-1].finish_detail) == (True, "worker_failed")
        assert not (await engine.health())["ok"]
        with pytest.raises(EngineDownError, match="device worker"):
            await ids(engine, [1, 2], SHORT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_scheduler_is_replaced_and_its_streams_go_on(folder, number) -> None:
    """PROC-01: the scheduler, SIGKILL and SIGSTOP."""
    params = SamplingParams(max_tokens=40, seed=8, logprobs=1, ignore_eos=True)
    async with AsyncEngine(folder.args(heartbeat_timeout_s=2)) as engine:
        alone = await outputs(engine, [3, 4, 5], params)
        worker = process_of("support.scripted_worker")
        with folder.held(after=5):
            stream = engine.generate([3, 4, 5], params)
            got = [await anext(stream) for _ in range(5)]
            process_of("deepinfer.scheduler").send_signal(number)
        got += [out async for out in stream]
        check_stream(got)
        assert [(o.token_id, o.token_logprobs, o.text) for o in got] == [
            (o.token_id, o.token_logprobs, o.text) for o in alone
        ]
        await wait_gone([worker])
        assert (await engine.health())["ok"]


async def test_an_abort_while_nobody_is_there_still_ends_the_request(folder) -> None:
    async with AsyncEngine(folder.args()) as engine:
        with folder.held(after=1):
            stream = engine.generate([3, 4], LONG, request_id="r")
            await anext(stream)
            process_of("deepinfer.scheduler").kill()
            async with asyncio.timeout(PATIENCE_S):
                await engine.abort("r")
                outs = [out async for out in stream]
        assert (outs[-1].finish_reason, outs[-1].finish_detail) == ("abort", "client_abort")


def test_llm_engine_replaces_a_lost_scheduler(folder) -> None:
    with LLMEngine(folder.args()) as engine:
        engine.add_request("r", [3, 4, 5], SHORT)
        got = [out.token_id for out in engine.step()]
        process_of("deepinfer.scheduler").kill()
        while engine.has_unfinished_requests():
            got += [out.token_id for out in engine.step()]
        assert got == folder.reference([3, 4, 5], 20)


async def test_an_app_that_blocks_its_loop_does_not_take_the_engine_for_dead(folder) -> None:
    async with AsyncEngine(folder.args(heartbeat_timeout_s=2)) as engine:
        scheduler = process_of("deepinfer.scheduler")
        stream = engine.generate([3, 4, 5], SHORT)
        got = [(await anext(stream)).token_id]
        time.sleep(5)  # the app computes something itself
        got += [out.token_id async for out in stream]
        assert got == folder.reference([3, 4, 5], 20)
        assert process_of("deepinfer.scheduler").pid == scheduler.pid


STOPPED_APP = """
import asyncio, psutil, sys
from deepinfer import AsyncEngine, EngineArgs, LLMEngine, SamplingParams
kind, model = sys.argv[1:]
args = EngineArgs(
    model=model,
    worker_module="support.scripted_worker",
    image_worker_module="support.scripted_image_worker",
    heartbeat_timeout_s=2,
)
params = SamplingParams(temperature=0, max_tokens=20)
def end():
    print(*(process.pid for process in psutil.Process().children(recursive=True)))
async def main():
    async with AsyncEngine(args) as engine:
        async for out in engine.generate([3, 4, 5], params):
            print(out.token_id, flush=True)
        end()
if kind == "AsyncEngine":
    asyncio.run(main())
else:
    with LLMEngine(args) as engine:
        engine.add_request("r", [3, 4, 5], params)
        while engine.has_unfinished_requests():
            for out in engine.step():
                print(out.token_id, flush=True)
        end()
"""


@pytest.mark.parametrize("kind", ["AsyncEngine", "LLMEngine"])
async def test_an_app_and_its_engine_may_be_stopped_together_and_go_on(tmp_path, kind) -> None:
    """Ctrl-Z and then fg: all of them were silent, and none is taken for dead."""
    folder = ScriptedFolder(tmp_path / "model", images=True, step_ms=1)
    app = subprocess.Popen(
        [sys.executable, "-c", STOPPED_APP, kind, str(folder.path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert app.stdout is not None
    try:
        with folder.held(after=5):
            lines = [await asyncio.to_thread(app.stdout.readline) for _ in range(5)]
            processes = psutil.Process(app.pid).children(recursive=True)
            os.killpg(app.pid, signal.SIGSTOP)
            await asyncio.sleep(5)  # longer than their limit of silence
            for process in (psutil.Process(app.pid), *processes):
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.3)  # each of them looks at the next, which is stopped still
        *rest, pids = (await asyncio.to_thread(app.stdout.read)).splitlines()
        assert app.wait() == 0
    finally:
        app.kill()
        app.wait()
        app.stdout.close()
    assert [int(line) for line in lines + rest] == folder.reference([3, 4, 5], 20)
    assert [int(pid) for pid in pids.split()] == [process.pid for process in processes]
    await wait_gone(processes)


async def test_a_model_that_cannot_be_loaded_says_why_at_the_start(tmp_path) -> None:
    folder = ScriptedFolder(tmp_path / "model", fail_load="the tensor foo.weight is missing")
    with pytest.raises(EngineDownError, match=r"foo\.weight is missing"):
        async with AsyncEngine(folder.args()):
            pass
    assert not engine_processes()


async def test_a_damaged_kernel_cache_is_removed_and_the_engine_starts(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path))
    damaged = cache_folder() / "linear.nbc"
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    folder = ScriptedFolder(tmp_path / "model", damaged=str(damaged))
    async with AsyncEngine(folder.args()) as engine:
        assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)
    assert not damaged.exists()


async def test_files_of_the_apps_folder_do_not_pass_for_modules(
    folder, tmp_path, monkeypatch
) -> None:
    for name in ("queue", "zmq", "numpy", "deepinfer"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    async with AsyncEngine(folder.args()) as engine:
        assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)


async def test_nothing_is_left_after_a_clean_stop(folder) -> None:
    async with AsyncEngine(folder.args()) as engine:
        await ids(engine, [1, 2], SHORT)
        processes = engine_processes()
        assert len(processes) == 2
        assert directories()
    await wait_gone(processes)
    assert not directories()


APP = """
import asyncio, sys
from deepinfer import AsyncEngine, EngineArgs, SamplingParams
async def main():
    args = EngineArgs(model=sys.argv[1], worker_module="support.scripted_worker")
    async with AsyncEngine(args) as engine:
        async for out in engine.generate([1, 2], SamplingParams(max_tokens=900, ignore_eos=True)):
            print(out.token_id, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_engine_ends_when_its_app_is_killed(folder, stopped) -> None:
    """PROC-01: the app, also when its engine was stopped before; no process or directory stays."""
    app = subprocess.Popen(
        [sys.executable, "-c", APP, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    assert app.stdout is not None
    with folder.held(after=1):
        await asyncio.to_thread(app.stdout.readline)
        processes = psutil.Process(app.pid).children(recursive=True)
        assert len(processes) == 2
        for process in processes if stopped else ():
            process.send_signal(signal.SIGSTOP)
        app.kill()
        app.wait()
    app.stdout.close()
    await wait_gone(processes)
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    assert not list(parent.glob(f"deepinfer-{app.pid}-*"))


async def test_a_client_that_vanishes_frees_what_it_held(tmp_path) -> None:
    folder = ScriptedFolder(tmp_path / "model", step_ms=1, max_model_len=40_000)
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint, heartbeat_timeout_s=2)) as engine:
        dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        dealer.connect(endpoint)
        add = messages.AddRequest(
            key=1,
            request_id="orphan",
            prompt=pack_int32([1, 2, 3]),
            params=SamplingParams(max_tokens=30_000, ignore_eos=True, seed=1),
        )
        await dealer.send(msgspec.msgpack.encode(add))
        await dealer.recv()
        dealer.close(linger=0)
        async with asyncio.timeout(PATIENCE_S):
            while (await engine.stats())["live"]:
                await ids(engine, [1], SamplingParams(max_tokens=1))
        assert (await engine.stats())["ended_disconnect"] == 1


# ---- junk and permissions -----------------------------------------------------------------------


class Sentinel:
    """Unpickling this would create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def junk_frames(sentinel: Path) -> list[bytes]:
    evil = pickle.dumps(Sentinel(str(sentinel)))
    names = [name for module in (messages, steps) for name in vars(module) if name[0].isupper()]
    valid = msgspec.msgpack.encode(messages.Call(1, "stats"))
    frames = [msgspec.msgpack.encode([name, evil, evil, evil]) for name in names]
    frames += [
        evil,
        b"",
        b"\xc1",
        b"\x00" * 1000,
        random.Random(1).randbytes(500),
        valid[:-1],
        valid + b"x",
    ]
    frames += [msgspec.msgpack.encode(["Abort", "not a number"]), b"\x91" * 100_000]
    frames += [msgspec.msgpack.encode(messages.Hello()).replace(b"Hello", b"Jello")]
    return frames


async def test_junk_on_any_socket_is_counted_and_dropped(folder, tmp_path) -> None:
    """SEC-01."""
    sentinel = tmp_path / "sentinel"
    frames = junk_frames(sentinel)
    async with AsyncEngine(folder.args()) as engine:
        [directory] = directories()
        running = asyncio.create_task(ids(engine, [3, 4, 5], SHORT))
        context = zmq.asyncio.Context.instance()
        for name in ("engine", "worker"):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(f"ipc://{directory}/{name}")
            for frame in frames:
                await dealer.send(frame)
                await dealer.send_multipart([frame, frame, frame])
            dealer.close(linger=int(PATIENCE_S * 1000))
        assert await running == folder.reference([3, 4, 5], 20)
        async with asyncio.timeout(PATIENCE_S):
            while (await engine.stats())["junk_frames"] < 4 * len(frames):
                await ids(engine, [1], SamplingParams(max_tokens=1))
        assert await ids(engine, [7], SHORT) == folder.reference([7], 20)
        assert (await engine.health())["ok"]
    assert not sentinel.exists()


async def test_sockets_lie_in_a_private_directory(folder) -> None:
    """SEC-01: nothing listens on a network, and nobody else reaches the sockets."""
    async with AsyncEngine(folder.args()):
        [directory] = directories()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        sockets = list(directory.iterdir())
        assert {path.name for path in sockets} == {"engine", "worker"}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in sockets)
        for process in engine_processes():
            listening = [c for c in process.net_connections("inet") if c.status == "LISTEN"]
            assert not listening


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5757", "tcp://*:5757", "tcp://example.org:1"])
async def test_an_endpoint_beyond_this_machine_is_refused(folder, endpoint) -> None:
    """SEC-01."""
    with pytest.raises(ValueError, match="loopback"):
        await AsyncEngine(folder.args(endpoint=endpoint)).start()
    with pytest.raises(ValueError, match="loopback"):
        Client(endpoint)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_an_endpoint_in_use_is_refused_and_its_engine_goes_on(
    folder, tmp_path, scheme
) -> None:
    endpoint = f"ipc://{tmp_path}/e" if scheme == "ipc" else free_endpoint()
    async with AsyncEngine(folder.args(endpoint=endpoint)):
        with pytest.raises(EngineDownError, match=endpoint):
            await AsyncEngine(folder.args(endpoint=endpoint, max_model_len=64)).start()
        async with Client(endpoint) as client:
            assert await ids(client, [1, 2], SHORT) == folder.reference([1, 2], 20)


# ---- clients ------------------------------------------------------------------------------------


async def test_no_file_of_the_endpoint_is_left_after_a_clean_stop(folder, tmp_path) -> None:
    path = tmp_path / "engine.sock"
    async with AsyncEngine(folder.args(endpoint=f"ipc://{path}")):
        assert path.is_socket()
    assert not path.exists()


async def test_two_clients_may_use_one_id_at_the_same_time(folder, tmp_path) -> None:
    """ID-01."""
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)) as engine, Client(endpoint) as client:
        first, second = await asyncio.gather(
            ids(engine, [5, 6], SHORT, request_id="same"),
            ids(client, [7, 8], SHORT, request_id="same"),
        )
        assert first == folder.reference([5, 6], 20)
        assert second == folder.reference([7, 8], 20)
        story = await client.trace("same")
        assert story[0].event == "arrived"


async def test_a_client_goes_on_with_the_next_scheduler_and_learns_when_there_is_none(
    folder, tmp_path
) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)) as engine:
        async with Client(endpoint) as client:
            with folder.held(after=3):
                stream = client.generate([3, 4, 5], SHORT)
                got = [(await anext(stream)).token_id for _ in range(3)]
                process_of("deepinfer.scheduler").kill()
            got += [out.token_id async for out in stream]
            assert got == folder.reference([3, 4, 5], 20)
        async with Client(endpoint, silence_limit_s=2) as client:
            with folder.held(after=1):
                stream = client.generate([1, 2], LONG)
                await anext(stream)
                await engine.stop()
                outs = [out async for out in stream]
            assert (outs[-1].finish_reason, outs[-1].finish_detail) == ("abort", "shutdown")
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(EngineDownError, match="no word"):
                    await ids(client, [1], SHORT)


async def test_an_abort_returns_though_its_consumer_walks_away(folder) -> None:
    async with AsyncEngine(folder.args()) as engine:
        with folder.held(after=1):
            stream = engine.generate([1, 2, 3], LONG, request_id="r")
            await anext(stream)
            abort = asyncio.create_task(engine.abort("r"))
            await asyncio.sleep(0)
            await stream.aclose()
            async with asyncio.timeout(PATIENCE_S):
                assert await abort


SILENT_S = 1000
"""The limit where a client that sends no heartbeats must be kept."""


def raw_client(endpoint: str) -> zmq.asyncio.Socket:
    dealer = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    dealer.connect(endpoint)
    return dealer


async def receive(dealer: zmq.asyncio.Socket, wanted: type) -> msgspec.Struct:
    """The next message of a type; others are passed over."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = msgspec.msgpack.decode(await dealer.recv(), type=messages.ToClient)
            if isinstance(message, wanted):
                return message


async def test_a_client_that_waits_for_the_engine_is_welcomed(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    dealer = raw_client(endpoint)
    await dealer.send(msgspec.msgpack.encode(messages.Hello()))
    async with AsyncEngine(folder.args(endpoint=endpoint, heartbeat_timeout_s=SILENT_S)):
        await receive(dealer, messages.Welcome)
    dealer.close(linger=0)


async def test_a_client_that_was_silent_for_too_long_is_told(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint, heartbeat_timeout_s=2)) as engine:
        dealer = raw_client(endpoint)
        await dealer.send(msgspec.msgpack.encode(messages.Hello()))
        await receive(dealer, messages.Welcome)
        async with asyncio.timeout(PATIENCE_S):
            while (await engine.stats())["clients"] > 1:
                await ids(engine, [1], SamplingParams(max_tokens=1))
        await dealer.send(msgspec.msgpack.encode(messages.ClientHeartbeat()))
        await receive(dealer, messages.Forgotten)
        await dealer.send(msgspec.msgpack.encode(messages.Hello()))
        await receive(dealer, messages.Welcome)
        dealer.close(linger=0)


async def test_a_client_of_another_protocol_is_told(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)):
        dealer = raw_client(endpoint)
        await dealer.send(msgspec.msgpack.encode(messages.Hello(99)))
        told = await receive(dealer, messages.EngineDown)
        assert "protocol" in told.message
        dealer.close(linger=0)


async def test_only_the_owner_can_drain_an_engine(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)) as engine:
        dealer = raw_client(endpoint)
        await dealer.send(msgspec.msgpack.encode(messages.Drain(0.0)))
        await dealer.send(msgspec.msgpack.encode(messages.Call(1, "health")))
        await receive(dealer, messages.Answer)
        dealer.close(linger=0)
        assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)


async def test_huge_strings_of_a_client_do_not_come_back(folder, tmp_path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)) as engine:
        dealer = raw_client(endpoint)
        huge = "\1" * (7 << 20)  # its repr is four times as long
        for what in ("story", huge):
            await dealer.send(msgspec.msgpack.encode(messages.Call(1, what, huge)))
            answer = await receive(dealer, messages.Answer)
            assert len(answer.error) < 300
        dealer.close(linger=0)
        assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)


FORKING_APP = """
import multiprocessing, sys, time
from deepinfer import EngineArgs, LLMEngine
engine = LLMEngine(EngineArgs(model=sys.argv[1], worker_module="support.scripted_worker"))
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


async def test_an_engine_ends_with_its_app_also_when_the_app_had_forked(folder) -> None:
    app = subprocess.Popen(
        [sys.executable, "-c", FORKING_APP, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    assert app.stdout is not None
    forked = int(await asyncio.to_thread(app.stdout.readline))
    children = psutil.Process(app.pid).children(recursive=True)
    engine = [process for process in children if process.pid != forked]
    assert len(engine) == 2
    app.kill()
    app.wait()
    app.stdout.close()
    await wait_gone(engine)
    os.kill(forked, signal.SIGKILL)


async def test_an_endpoint_without_a_port_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="a port is a number"):
        async with asyncio.timeout(PATIENCE_S):
            await Client("tcp://127.0.0.1:x").start()


async def test_odd_names_beside_the_socket_directory_do_no_harm(
    folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for owner in ("99999999999999999999", "\u00b2", "", "-1"):
        (tmp_path / f"deepinfer-{owner}-x").mkdir()
    async with AsyncEngine(folder.args()) as engine:
        assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)


async def test_a_worker_killed_while_it_loads_is_replaced(folder) -> None:
    engine = AsyncEngine(folder.args())
    starting = asyncio.create_task(engine.start())
    async with asyncio.timeout(PATIENCE_S):
        while not (found := [p for p in engine_processes() if "worker" in str(p.cmdline())]):
            await asyncio.sleep(0)
    found[0].kill()
    await starting
    assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)
    await engine.stop()


async def test_thousands_of_open_requests_outlive_their_scheduler_whatever_the_queue_allows(
    folder,
) -> None:
    prompts = [[1 + i % 200, 1 + i // 200] for i in range(1500)]
    three = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    async with AsyncEngine(folder.args(max_num_seqs=64, max_queue_len=1500)) as engine:
        with folder.held():
            streams = [asyncio.create_task(ids(engine, prompt, three)) for prompt in prompts]
            while (await engine.stats())["live"] < len(prompts):
                await asyncio.sleep(0)
            # Now all of them wait, in an engine whose queue has room for none that are new.
            process_of("deepinfer.scheduler").kill()
        for prompt, tokens in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert tokens == folder.reference(prompt, 3)


async def test_a_drained_scheduler_finishes_what_it_accepted_and_refuses_what_comes(
    folder, tmp_path
) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    async with AsyncEngine(folder.args(endpoint=endpoint)), Client(endpoint) as client:
        with folder.held():
            open_streams = [asyncio.create_task(ids(client, [3, n], SHORT)) for n in range(5)]
            while (await client.stats())["live"] < 5:
                await asyncio.sleep(0)
            process_of("deepinfer.scheduler").send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(EngineBusyError, match="shuts down"):
                    while True:  # until the signal has arrived
                        await ids(client, [1], SHORT, timeout_s=0.05)
        for n, tokens in enumerate(await asyncio.gather(*open_streams)):
            assert tokens == folder.reference([3, n], 20)


@pytest.mark.parametrize("how", ["grace", "end now"])
async def test_what_does_not_finish_in_time_is_ended_as_shutdown(folder, tmp_path, how) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    grace = 0.5 if how == "grace" else 600
    args = folder.args(endpoint=endpoint, drain_timeout_s=grace)
    async with AsyncEngine(args), Client(endpoint) as client:
        with folder.held(after=1):
            stream = client.generate([1, 2], LONG)
            await anext(stream)
            scheduler = process_of("deepinfer.scheduler")
            scheduler.send_signal(signal.SIGTERM)
            if how == "end now":
                with pytest.raises(EngineBusyError, match="shuts down"):
                    while True:
                        await ids(client, [1], SHORT, timeout_s=0.05)
                scheduler.send_signal(signal.SIGTERM)  # once more, as a service manager may
                assert (await client.stats())["live"] == 1
                scheduler.send_signal(signal.SIGUSR1)
            outs = [out async for out in stream]
    assert (outs[-1].finish_reason, outs[-1].finish_detail) == ("abort", "shutdown")
    tokens = [out.token_id for out in outs if out.text or not out.finished]
    assert tokens == folder.reference([1, 2], 900)[1 : 1 + len(tokens)]


async def test_a_stopped_worker_does_not_outlive_its_scheduler(folder) -> None:
    async with AsyncEngine(folder.args()) as engine:
        with folder.held(after=1):
            stream = engine.generate([3, 4, 5], SHORT)
            got = [(await anext(stream)).token_id]
            processes = engine_processes()
            process_of("support.scripted_worker").send_signal(signal.SIGSTOP)
            process_of("deepinfer.scheduler").kill()
        got += [out.token_id async for out in stream]
        assert got == folder.reference([3, 4, 5], 20)
        await wait_gone(processes)


@pytest.mark.slow
async def test_a_worker_stopped_before_its_first_word_is_replaced(folder) -> None:
    engine = AsyncEngine(folder.args())
    starting = asyncio.create_task(engine.start())
    async with asyncio.timeout(PATIENCE_S):
        while not (found := [p for p in engine_processes() if "worker" in str(p.cmdline())]):
            await asyncio.sleep(0)
    found[0].send_signal(signal.SIGSTOP)
    await starting
    assert await ids(engine, [1, 2], SHORT) == folder.reference([1, 2], 20)
    await engine.stop()
    await wait_gone(found)


@pytest.mark.model
async def test_the_worker_stays_on_the_cores_it_is_given(smollm2_folder: Path) -> None:
    core = min(os.sched_getaffinity(0))
    options = {"model": str(smollm2_folder), "num_kv_blocks": 64}
    async with AsyncEngine(EngineArgs(**options, worker_cpus=str(core))) as engine:
        worker = process_of("deepinfer.gpu_worker")
        threads = [os.sched_getaffinity(thread.id) for thread in worker.threads()]
        assert threads and all(cores == {core} for cores in threads)
        assert len(await outputs(engine, [3, 4], SHORT)) == 20
    with pytest.raises(EngineDownError, match="worker_cpus"):
        await AsyncEngine(EngineArgs(**options, worker_cpus="9000")).start()
