"""Clients over tcp with keys: who is served, who is not, and what a network does to a stream."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from pathlib import Path

import msgspec
import pytest

from deepinfer import AsyncEngine, Client, SamplingParams
from deepinfer.frontend import connection
from deepinfer.frontend.errors import EngineDownError, EngineError
from deepinfer.wire import messages
from deepinfer.wire.columns import pack_int32, unpack_int32, unpack_uint32
from deepinfer.wire.messages import (
    Abort,
    AddRequest,
    Answer,
    Call,
    EngineDown,
    Hello,
    OutputBatch,
    Welcome,
)
from deepinfer.wire.sockets import connect_dealer
from support.curve import KeyFolder, RawClient, Wire, free_endpoint
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, process_of
from support.streams import token_ids

pytestmark = pytest.mark.process

SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
OTHER = ("another client's request", None)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", step_ms=1)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


def keyed(folder: ScriptedFolder, keys: KeyFolder, **fields) -> AsyncEngine:
    fields = {"endpoint": free_endpoint(), "curve_keys": str(keys.path)} | fields
    return AsyncEngine(folder.args(**fields))


# ---- who is served ------------------------------------------------------------------------------


async def test_a_client_with_a_key_has_all_of_the_engine(folder, keys) -> None:
    """ZMQ-01 over tcp."""
    async with (
        keyed(folder, keys) as engine,
        Client(engine.args.endpoint, **keys.client("one")) as client,
    ):
        assert await token_ids(client, [3, 4, 5], SHORT) == folder.reference([3, 4, 5], 20)
        with folder.held(after=1):
            stream = client.generate([1, 2], LONG, request_id="r")
            await anext(stream)
            abort = asyncio.create_task(client.abort("r"))
            last = [out async for out in stream][-1]
        assert await abort
        assert (last.finish_reason, last.finish_detail) == ("abort", "client_abort")
        assert (await client.trace("r"))[0].event == "arrived"
        assert (await client.health())["ok"]
        # The owner's socket is its own still.
        assert await token_ids(engine, [7, 8], SHORT) == folder.reference([7, 8], 20)


async def test_a_client_sees_its_own_requests_and_an_operator_all(folder, keys) -> None:
    """SEC-01: stories by the key, whatever the connection; what shows everybody is refused."""
    async with (
        keyed(folder, keys, max_num_seqs=1, policy="priority") as engine,
        Client(engine.args.endpoint, **keys.client("anna")) as anna,
        Client(engine.args.endpoint, **keys.client("anna")) as hers_too,
        Client(engine.args.endpoint, **keys.client("ben")) as ben,
        Client(engine.args.endpoint, **keys.client("ops", operator=True)) as ops,
    ):
        with folder.held(after=1):
            stream = anna.generate([1, 2], SHORT, request_id="hers", priority=5)
            await anext(stream)
            his = asyncio.ensure_future(token_ids(ben, [3], SHORT, request_id="his", user_id="b"))
            while (await engine.stats())["waiting"] < 1:
                await asyncio.sleep(0)
            with pytest.raises(KeyError, match="no story of request 'hers'"):
                await ben.trace("hers")
        assert [out async for out in stream][-1].finished
        await his

        async def preempted(reader: AsyncEngine | Client) -> tuple[object, object]:
            told = {event.event: event.detail for event in await reader.trace("hers")}["preempted"]
            return told["by"], told.get("by_user")

        assert await preempted(anna) == await preempted(hers_too) == OTHER
        assert await preempted(ops) == await preempted(engine) == ("his", "b")
        for reader, request_id in ((ben, "hers"), (anna, "his")):
            with pytest.raises(KeyError, match="no story of request"):
                await reader.trace(request_id)
        for reader in (anna, ben):
            for call in (reader.view, reader.tenants):
                with pytest.raises(EngineError, match="this key is not an operator's"):
                    await call()
            assert (await reader.stats())["accepted"] == 2 and (await reader.health())["ok"]
        for reader in (ops, engine):
            ended = {end.request_id for end in (await reader.view()).ended}
            assert ended == {"hers", "his"} and "b" in await reader.tenants()


async def test_a_client_becomes_an_operator_by_the_folder_of_its_key(folder, keys) -> None:
    own = keys.client("anna")
    async with keyed(folder, keys) as engine, Client(engine.args.endpoint, **own) as anna:
        (keys.path / "operators").mkdir()
        for kind, sees in (("operators", True), ("clients", False)):
            other = keys.path / ("clients" if sees else "operators")
            (other / "anna.pub").rename(keys.path / kind / "anna.pub")
            async with asyncio.timeout(20):
                while True:
                    try:
                        await anna.view()
                    except EngineError:
                        if not sees:
                            break
                    else:
                        if sees:
                            break
        assert await token_ids(anna, [1], SHORT) == folder.reference([1], 20)


async def test_keys_are_given_as_text_or_as_files(folder, keys) -> None:
    raw = keys.raw("one")
    text = {"server_key": raw.server.decode(), "secret_key": raw.secret.decode()}
    async with keyed(folder, keys) as engine, Client(engine.args.endpoint, **text) as client:
        assert await token_ids(client, [1], SHORT) == folder.reference([1], 20)


async def test_a_client_is_told_at_once_that_its_key_is_unknown(folder, keys) -> None:
    unknown = keys.client("unknown")
    keys.remove("unknown")
    async with keyed(folder, keys) as engine:
        # Its silence limit is longer than a test may take.
        client = Client(engine.args.endpoint, silence_limit_s=1000, **unknown)
        with pytest.raises(EngineDownError, match=r"does not know the key.*clients/\*"):
            await client.start()
        with pytest.raises(EngineDownError, match="does not know the key"):
            await token_ids(client, [1], SHORT)
        assert (await engine.health())["ok"]


async def test_what_happens_while_a_client_connects_is_not_missed(
    folder, keys, monkeypatch
) -> None:
    unknown = keys.client("unknown")
    keys.remove("unknown")
    async with keyed(folder, keys) as engine:

        def connect(*args, **options):
            socket = connect_dealer(*args, **options)
            time.sleep(1)  # stands for a process that lost its core just then
            return socket

        monkeypatch.setattr(connection, "connect_dealer", connect)
        client = Client(engine.args.endpoint, silence_limit_s=1000, **unknown)
        with pytest.raises(EngineDownError, match="does not know the key"):
            await client.start()


async def test_a_client_without_a_key_is_told_that_it_needs_one(folder, keys) -> None:
    async with keyed(folder, keys) as engine:
        # ZeroMQ's server hangs up before it says why, or after: either way the cause is named.
        client = Client(engine.args.endpoint, silence_limit_s=5)
        with pytest.raises(EngineDownError, match="server_key and secret_key"):
            await client.start()


async def test_a_client_with_a_key_is_told_that_the_engine_has_none(folder, keys) -> None:
    async with AsyncEngine(folder.args(endpoint=free_endpoint())) as engine:
        client = Client(engine.args.endpoint, silence_limit_s=5, **keys.client("one"))
        with pytest.raises(EngineDownError, match="it has no keys; leave|does it have keys"):
            await client.start()


async def test_another_engines_key_is_named_as_the_likely_cause(folder, keys, tmp_path) -> None:
    other = KeyFolder(tmp_path / "other")
    mixed = keys.client("one") | {"server_key": other.path / "server.pub"}
    async with keyed(folder, keys) as engine:
        client = Client(engine.args.endpoint, silence_limit_s=5, **mixed)
        with pytest.raises(EngineDownError, match="is server_key the key of that engine"):
            await client.start()


async def test_a_key_that_comes_or_goes_counts_without_a_restart(folder, keys) -> None:
    async with (
        keyed(folder, keys) as engine,
        Client(engine.args.endpoint, **keys.client("stays")) as other,
    ):
        new = keys.client("new")
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until the engine has looked at its folder
                client = Client(engine.args.endpoint, silence_limit_s=5, **new)
                try:
                    await client.start()
                    break
                except EngineDownError:
                    await client.stop()
        with folder.held(after=1):
            stream = client.generate([1, 2], LONG)
            await anext(stream)
            going_on = asyncio.create_task(token_ids(other, [5, 6], SHORT))
            keys.remove("new")
            async with asyncio.timeout(PATIENCE_S):
                while not (await engine.stats())["ended_disconnect"]:
                    await asyncio.sleep(0)
        assert await going_on == folder.reference([5, 6], 20)
        with pytest.raises(EngineDownError, match="does not know the key"):
            async for _ in stream:
                pass
        await client.stop()
        assert (await engine.stats())["live"] == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "*"])
async def test_an_endpoint_beyond_this_machine_is_served_with_keys(folder, keys, host) -> None:
    port = free_endpoint().rpartition(":")[2]
    async with (
        keyed(folder, keys, endpoint=f"tcp://{host}:{port}"),
        Client(f"tcp://localhost:{port}", **keys.client("one")) as client,
    ):
        assert await token_ids(client, [1], SHORT) == folder.reference([1], 20)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"endpoint": None}, "endpoint must be given"),
        ({"endpoint": "ipc:///tmp/x"}, "keys are for tcp"),
        ({"endpoint": "tcp://a b:1"}, "no host name"),
        ({"curve_keys": "/nowhere"}, "curve_keys: no server.key in /nowhere"),
    ],
)
async def test_keys_that_do_not_fit_are_refused_before_a_process_starts(
    folder, keys, fields, error
) -> None:
    with pytest.raises(ValueError, match=error):
        await keyed(folder, keys, **fields).start()


# ---- strangers ----------------------------------------------------------------------------------


class Sentinel:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


async def test_strangers_get_no_answer_and_do_no_harm(folder, keys, tmp_path) -> None:
    """SEC-01: junk, pickles, plaintext peers and unknown keys at an endpoint with keys."""
    sentinel = tmp_path / "sentinel"
    evil = pickle.dumps(Sentinel(str(sentinel)))
    names = [name for name in vars(messages) if name[0].isupper()]
    frames = [msgspec.msgpack.encode([name, evil]) for name in names] + [evil, b"", b"\xc1"]
    frames += [msgspec.msgpack.encode(m) for m in (Hello(), Call(1, "stats"), Call(2, "health"))]
    unknown = keys.raw("unknown")
    keys.remove("unknown")
    async with (
        keyed(folder, keys) as engine,
        Client(engine.args.endpoint, **keys.client("one")) as client,
    ):
        before = await engine.stats()
        strangers = [RawClient(engine.args.endpoint, k) for k in (None, unknown) for _ in range(5)]
        for stranger in strangers:
            for frame in frames:
                await stranger.send(frame)
        host, port = engine.args.endpoint.removeprefix("tcp://").split(":")
        for frame in (
            evil,
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(100),
            b"\xff" + bytes(8) + b"\x7f" * 99,
        ):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(frame)
            # At most the greeting that libzmq sends whoever connects (ZMTP 3.1: 64 bytes), then
            # the end.
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(PATIENCE_S):
                    while piece := await reader.read(65_536):
                        answer += piece
            assert len(answer) <= 64
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while (await engine.stats())["unknown_keys"] < 5:
                await asyncio.sleep(0)
        for n in range(20):
            assert await token_ids(client, [n, 4], SHORT) == folder.reference([n, 4], 20)
        for stranger in strangers:
            assert not await stranger.socket.poll(0), "a stranger got an answer"
            stranger.close()
        after = await engine.stats()
        for counter in ("clients", "junk_frames"):
            assert after[counter] == before[counter]
        assert (before["unknown_keys"], after["unknown_keys"]) == (0, 5)
        assert (await engine.health())["ok"]
    assert not sentinel.exists()


async def test_an_unfit_identity_is_told_so(folder, keys) -> None:
    async with keyed(folder, keys) as engine:
        for identity in (b"short", b"\0" * 32):
            client = RawClient(engine.args.endpoint, keys.raw("one"), identity)
            await client.send(Hello())
            down = await client.receive(EngineDown, Welcome)
            assert isinstance(down, EngineDown)
            assert "16 to 255 bytes" in down.message
            client.close()


# ---- one client and another's stream -----------------------------------------------------------

IDENTITY = b"an identity that is no secret"
SILENT_S = 1000
"""The limit where a client that sends no heartbeats must be kept."""


async def read_to_end(client: RawClient, tokens: list[int]) -> messages.End:
    while True:
        batch = await client.receive(OutputBatch)
        assert isinstance(batch, OutputBatch)
        tokens += unpack_int32(batch.tokens).tolist()
        assert set(unpack_uint32(batch.keys).tolist()) <= {7}
        if batch.ends:
            return batch.ends[0]


async def test_nobody_takes_or_ends_another_clients_stream_though_he_knows_its_identity(
    folder, keys
) -> None:
    add = AddRequest(7, "r", pack_int32([3, 4]), LONG)
    async with keyed(folder, keys, heartbeat_timeout_s=SILENT_S) as engine:
        victim = RawClient(engine.args.endpoint, keys.raw("victim"), IDENTITY)
        await victim.send(Hello())
        await victim.receive(Welcome)
        # With another key, and with the same one.
        thieves = [RawClient(engine.args.endpoint, keys.raw(n), IDENTITY) for n in ("a", "victim")]
        tokens: list[int] = []
        with folder.held(after=3):
            await victim.send(add)
            batch = await victim.receive(OutputBatch)
            tokens += unpack_int32(batch.tokens).tolist()
            for thief in thieves:
                for message in (Hello(), Abort(7), add, Call(1, "stats")):
                    await thief.send(message)
            # A whole connection and an answer: so long the thieves' messages were on their way.
            async with Client(engine.args.endpoint, **keys.client("b")) as other:
                await other.stats()
        end = await read_to_end(victim, tokens)
        assert (end.detail, tokens) == ("max_tokens", folder.reference([3, 4], 900))
        for thief in thieves:
            assert not await thief.socket.poll(0)
            thief.close()
        victim.close()


async def test_who_takes_the_identity_of_one_that_left_gets_nothing_of_it(folder, keys) -> None:
    add = AddRequest(7, "r", pack_int32([3, 4]), LONG)
    async with keyed(folder, keys, heartbeat_timeout_s=SILENT_S) as engine:
        victim = RawClient(engine.args.endpoint, keys.raw("victim"), IDENTITY)
        await victim.send(Hello())
        await victim.receive(Welcome)
        with folder.held(after=1):
            await victim.send(add)
            await victim.receive(OutputBatch)
            victim.close()  # without a word
            while True:  # nobody is heard under this identity until ZeroMQ sees that it left
                heir = RawClient(engine.args.endpoint, keys.raw("heir"), IDENTITY)
                await heir.send(Call(1, "stats"))
                if await heir.socket.poll(2000):
                    break
                heir.close()
            assert isinstance(await heir.receive(Answer, OutputBatch), Answer)
            async with asyncio.timeout(PATIENCE_S):
                while not (await engine.stats())["ended_disconnect"]:
                    await asyncio.sleep(0)
            await heir.send(msgspec.structs.replace(add, prompt=pack_int32([5, 6])))
        tokens: list[int] = []
        assert (await read_to_end(heir, tokens)).detail == "max_tokens"
        assert tokens == folder.reference([5, 6], 900)
        heir.close()


# ---- what a network does ------------------------------------------------------------------------


async def test_a_scheduler_lost_at_an_endpoint_with_keys_is_found_again(folder, keys) -> None:
    """PROC-01: the scheduler, SIGKILL, seen by a client over tcp."""
    async with (
        keyed(folder, keys) as engine,
        Client(engine.args.endpoint, **keys.client("one")) as client,
    ):
        with folder.held(after=5):
            stream = client.generate([3, 4, 5], SHORT)
            got = [(await anext(stream)).token_id for _ in range(5)]
            process_of("deepinfer.scheduler").kill()
        got += [out.token_id async for out in stream]
        assert got == folder.reference([3, 4, 5], 20)
        assert (await client.health())["ok"]


@pytest.mark.parametrize("secured", [False, True])
async def test_a_connection_that_breaks_loses_no_token(folder, keys, secured) -> None:
    """What was on its way is lost, and ZeroMQ connects again by itself: nobody may miss a token."""
    endpoint = free_endpoint()
    args = folder.args(
        endpoint=endpoint,
        curve_keys=str(keys.path) if secured else None,
        stop_preempted_request=False,
    )
    own = keys.client("one") if secured else {}
    async with (
        AsyncEngine(args),
        Wire(endpoint).up() as wire,
        Client(wire.endpoint, silence_limit_s=1000, **own) as client,
    ):
        prompts = [[3, n] for n in range(8)]
        streams = [client.generate(prompt, LONG) for prompt in prompts]
        got = [[(await anext(stream)).token_id] for stream in streams]

        async def read(number: int) -> None:
            async for out in streams[number]:
                got[number].append(out.token_id)
                if number == 0 and len(got[0]) in (100, 300, 500):
                    wire.cut()

        await asyncio.gather(*map(read, range(len(prompts))))
        assert got == [folder.reference(prompt, 900) for prompt in prompts]
