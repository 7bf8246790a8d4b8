"""Who asks: the live requests of each client, by key and by id, and aborts that came too early."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from deepinfer.scheduler.client_names import key_of
from deepinfer.scheduler.sequence import Sequence

MAX_EARLY_ABORTS = 1024
"""Aborts of unknown keys that are remembered, the latest ones, over all clients."""


class _Client:
    __slots__ = ("by_id", "by_key", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.by_key: dict[int, Sequence] = {}
        self.by_id: dict[str, Sequence] = {}


class ClientBook:
    """Live sequences by client. A client is known while it has any.

    ``names[index]`` is the identity of a known client; indexes are small and reused, so that they
    fit a column of the batch table.
    """

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._free: list[int] = []
        self._clients: dict[bytes, _Client] = {}
        self._early_aborts: OrderedDict[tuple[bytes, int], str] = OrderedDict()

    def __iter__(self) -> Iterator[Sequence]:
        for client in self._clients.values():
            yield from client.by_key.values()

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __len__(self) -> int:
        return sum(len(client.by_key) for client in self._clients.values())

    def index_of(self, name: bytes) -> int:
        """Return the client's index, a new one when it had no live request."""
        client = self._clients.get(name)
        if client is None:
            if self._free:
                index = self._free.pop()
                self.names[index] = name
            else:
                index = len(self.names)
                self.names.append(name)
            client = self._clients[name] = _Client(index)
        return client.index

    def add(self, sequence: Sequence) -> None:
        """Enter a sequence whose key and id are not live for its client."""
        client = self._clients[sequence.client]
        assert sequence.key not in client.by_key and sequence.request_id not in client.by_id
        client.by_key[sequence.key] = sequence
        client.by_id[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, and its client when that was the last one."""
        client = self._clients[sequence.client]
        del client.by_key[sequence.key]
        del client.by_id[sequence.request_id]
        if not client.by_key:
            del self._clients[sequence.client]
            # Its name stays until the index is given to another client: outputs of the step in
            # which its last request ended are addressed by it.
            self._free.append(client.index)

    def find(self, name: bytes, key: int) -> Sequence | None:
        """Return the client's live sequence with this key."""
        client = self._clients.get(name)
        return client.by_key.get(key) if client else None

    def has_id(self, name: bytes, request_id: str) -> bool:
        """Whether the client has a live sequence of this id."""
        client = self._clients.get(name)
        return client is not None and request_id in client.by_id

    def with_id(self, request_id: str, key: bytes | None = None) -> Sequence | None:
        """Return the latest live sequence of this id; with a key only one of its clients'."""
        found = [
            client.by_id[request_id]
            for name, client in self._clients.items()
            if request_id in client.by_id and (key is None or key_of(name) == key)
        ]
        return max(found, key=lambda sequence: sequence.arrival_number, default=None)

    def of(self, name: bytes) -> list[Sequence]:
        """Return the client's live sequences in the order of their arrival."""
        client = self._clients.get(name)
        return list(client.by_key.values()) if client else []

    def abort_early(self, name: bytes, key: int, rule: str) -> None:
        """Remember the abort of a key that is not live: its request may still be on the way."""
        self._early_aborts[(name, key)] = rule
        if len(self._early_aborts) > MAX_EARLY_ABORTS:
            self._early_aborts.popitem(last=False)

    def take_early_abort(self, name: bytes, key: int) -> str | None:
        """Return the rule of a remembered abort and forget it."""
        return self._early_aborts.pop((name, key), None)

    def check(self) -> None:
        """Assert that the indexes agree."""
        for name, client in self._clients.items():
            assert client.by_key, f"client {name!r} is kept without a request"
            assert self.names[client.index] == name
            assert len(client.by_key) == len(client.by_id)
            for key, sequence in client.by_key.items():
                assert sequence.key == key and sequence.client == name
                assert sequence.client_index == client.index
                assert client.by_id[sequence.request_id] is sequence
                assert not sequence.status.finished, f"{sequence.request_id!r} is still indexed"
        assert len(self._free) + len(self._clients) == len(self.names)
