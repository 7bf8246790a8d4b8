"""The scheduler's client socket: slow readers, crowds, floods and wrongly typed requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from deepinfer.scheduler import client_link, keyed_endpoint
from deepinfer.scheduler.client_link import ClientLink
from deepinfer.wire.actor import Actor
from deepinfer.wire.codec import MAX_REQUEST_BYTES
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.curve import ClientKeys
from deepinfer.wire.messages import (
    AddRequest,
    Answer,
    Call,
    ClientHeartbeat,
    EngineDown,
    Forgotten,
    FromClient,
    Goodbye,
    Hello,
    Refused,
    ToClient,
)
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.sockets import check_endpoint
from support.curve import KeyFolder, free_endpoint
from support.patience import PATIENCE_S


class Link:
    """A ``ClientLink`` that runs in a thread; ``Call("fill")`` sends more than a client may owe."""

    def __init__(self, endpoint: str, *, keyed: tuple[str, Path] | None = None) -> None:
        self.endpoint = endpoint
        self.messages: list[FromClient] = []
        self.gone: list[str] = []
        self.somebody_left = threading.Event()
        self._actor = Actor(after_turn=self._after_turn)
        self._stop = threading.Event()
        self.link = ClientLink(
            self._actor,
            endpoint,
            owner=b"owner",
            silence_limit_s=1000,
            on_message=self._on_message,
            on_gone=self._on_gone,
        )
        if keyed is not None:
            self.link.listen_also(keyed[0], str(keyed[1]))
        self._actor.every(0.005, lambda: self.link.watch(time.monotonic()))
        self._thread = threading.Thread(target=self._actor.run)
        self._thread.start()

    def _on_message(self, client: bytes, message: FromClient) -> None:
        self.messages.append(message)
        if isinstance(message, Call) and message.what == "fill":
            big = Answer(1, error="x" * (1 << 20))
            # What the operating system and ZeroMQ hold for the reader is not this side's.
            while not self.gone:
                self.link.send(client, big)
        elif isinstance(message, Call):
            self.link.send(client, Answer(message.call_id))

    def _on_gone(self, client: bytes, rule: str) -> None:
        self.gone.append(rule)
        self.somebody_left.set()

    def _after_turn(self) -> None:
        if self.link.stalled:
            self.link.push()
        if self._stop.is_set():
            self._actor.stop()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._actor.close()


class Peer:
    """A raw client."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self.socket.setsockopt(zmq.IDENTITY, os.urandom(16).hex().encode())
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(endpoint)

    def send(self, message: object) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> ToClient:
        assert self.socket.poll(int(PATIENCE_S * 1000)), "no answer"
        message: ToClient = msgspec.msgpack.decode(self.socket.recv(), type=ToClient)
        return message

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def link(tmp_path) -> Iterator[Link]:
    link = Link(f"ipc://{tmp_path}/engine")
    yield link
    link.close()


@pytest.fixture
def peer(link) -> Iterator[Peer]:
    peer = Peer(link.endpoint)
    yield peer
    peer.close()


def test_who_does_not_read_is_told_that_its_requests_ended_when_it_reads_again(link, peer) -> None:
    peer.send(Hello())
    peer.send(Call(1, "fill"))
    assert link.somebody_left.wait(PATIENCE_S)
    assert link.gone == ["slow_reader"]
    assert not link.link.stalled  # nobody waits for it, also not a scheduler that is to end
    while isinstance(message := peer.receive(), Answer):
        pass
    assert isinstance(message, Forgotten)
    # What it sends now does not vanish without a word, and Hello begins anew.
    peer.send(ClientHeartbeat())
    assert isinstance(peer.receive(), Forgotten)
    peer.send(Hello())
    peer.send(Call(2, "more"))
    assert isinstance(peer.receive(), Answer)
    assert isinstance(link.messages[-2], Hello)


def test_hello_does_not_hide_that_the_earlier_requests_ended(link, peer) -> None:
    peer.send(Hello())
    peer.send(Call(1, "fill"))
    assert link.somebody_left.wait(PATIENCE_S)
    peer.send(Hello())  # while the news still waits for it to read
    told = False
    while not told:
        told = isinstance(peer.receive(), Forgotten)
        if told:
            peer.send(Hello())
    peer.send(Call(2, "more"))
    assert peer.receive() == Answer(2)


def test_who_said_goodbye_is_not_told_anything(link, peer) -> None:
    peer.send(Hello())
    peer.send(Goodbye())
    peer.send(Call(3, "anything"))
    assert isinstance(peer.receive(), Answer)
    assert link.gone == ["disconnect"]


def test_one_client_too_many_is_told_so(link, peer, monkeypatch) -> None:
    monkeypatch.setattr(client_link, "MAX_CLIENTS", 1)
    peer.send(Call(1, "here"))
    assert isinstance(peer.receive(), Answer)
    other = Peer(link.endpoint)
    other.send(Hello())
    message = other.receive()
    other.close()
    assert isinstance(message, EngineDown)
    assert "1 clients" in message.message


def test_one_key_does_not_take_all_the_room(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(keyed_endpoint, "MAX_CLIENTS_PER_KEY", 2)
    keys, endpoint = KeyFolder(tmp_path / "keys"), free_endpoint()
    one, two = keys.raw("one"), keys.raw("two")
    link = Link(f"ipc://{tmp_path}/engine", keyed=(endpoint, keys.path))
    peers = [Peer(endpoint, one), Peer(endpoint, one)]
    try:
        for peer in peers:
            peer.send(Call(1, "here"))
            assert isinstance(peer.receive(), Answer)
        for _ in range(2):  # the one that is turned away takes no room
            peers.append(Peer(endpoint, one))
            peers[-1].send(Hello())
            down = peers[-1].receive()
            assert isinstance(down, EngineDown)
            assert "clients have this key" in down.message
        peers.append(Peer(endpoint, two))
        peers[-1].send(Call(1, "here"))
        assert isinstance(peers[-1].receive(), Answer)
        peers[0].send(Goodbye())
        assert link.somebody_left.wait(PATIENCE_S)
        peers[2].send(Call(2, "now"))
        assert peers[2].receive() == Answer(2)
    finally:
        for peer in peers:
            peer.close()
        link.close()


def request(**changes: object) -> list[object]:
    """An ``AddRequest`` as it stands on the wire, with some fields of another type."""
    add = AddRequest(7, "r", pack_int32([1]), SamplingParams(seed=1))
    parts = msgspec.msgpack.decode(msgspec.msgpack.encode(add))
    values = dict(zip(AddRequest.__struct_fields__, parts[1:], strict=False))
    return [AddRequest.__name__, *(values | changes).values()]


@pytest.mark.parametrize(
    ("field", "frame"),
    [
        ("request_id", request(request_id=5)),
        ("prompt", request(prompt=[1, 2])),
        ("priority", request(priority="first")),
        ("params", request(params=[])),
        ("params", request(params={"temprature": 1.0})),
        ("temperature", request(params={"temperature": "hot"})),
        ("temperature", request(params={"temperature": -1.0})),
        ("stop_token_ids", request(params={"stop_token_ids": ["a"]})),
        ("repetition_penalty", request(params={"repetition_penalty": 1e308})),
    ],
)
def test_a_wrongly_typed_request_is_refused_by_the_name_of_its_field(
    link, peer, field, frame
) -> None:
    peer.send(Hello())
    peer.send(frame)
    refused = peer.receive()
    assert isinstance(refused, Refused)
    assert (refused.key, refused.code, refused.field) == (7, "invalid", field)
    assert refused.message


def test_a_request_whose_key_is_none_is_counted_and_not_answered(link, peer) -> None:
    peer.send(Hello())
    for key in (True, -1, 1 << 32, 1.5, "7", None):
        peer.send(request(key=key, prompt="no bytes"))
    peer.send(Call(2, "after"))
    assert peer.receive() == Answer(2)
    assert link.link.junk_frames == 6


def test_a_frame_above_the_limit_is_counted_and_the_client_goes_on(link, peer) -> None:
    peer.send(Hello())
    peer.socket.send(msgspec.msgpack.encode(Call(1, "x" * MAX_REQUEST_BYTES)))
    peer.send(Call(2, "after"))
    assert peer.receive() == Answer(2)
    assert link.link.junk_frames == 1


def test_a_flood_leaves_the_work_after_each_turn_its_time(tmp_path) -> None:
    handled = 0
    by_turn: list[int] = []

    def work(frames: list[bytes]) -> None:
        nonlocal handled
        handled += 1
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass

    def after_turn() -> None:
        by_turn.append(handled)
        if handled == 20:
            actor.stop()

    actor = Actor(after_turn)
    router = actor.context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/flood")
    peer = Peer(f"ipc://{tmp_path}/flood")
    for _ in range(20):
        peer.send(Hello())
    actor.add_socket(router, work)
    actor.run()
    peer.close()
    actor.close()
    # Each message takes longer than a turn may, so none is followed by another in its turn.
    assert max(b - a for a, b in zip([0, *by_turn], by_turn, strict=False)) == 1


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "", "80 ", "99999999999999999999"])
def test_a_port_that_is_none_is_refused(port) -> None:
    with pytest.raises(ValueError, match="port"):
        check_endpoint(f"tcp://127.0.0.1:{port}")
