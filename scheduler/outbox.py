"""What goes to the clients: one ``OutputBatch`` per client and step, refusals at once."""

from __future__ import annotations

import numpy as np

from deepinfer.wire.columns import Int32, UInt32, pack_int32, pack_uint32
from deepinfer.wire.messages import End, OutputBatch, Refused, RowExtra, RowNote


class _Beside:
    """What travels beside the tokens in a client's next batch."""

    __slots__ = ("ends", "extras", "notes")

    def __init__(self) -> None:
        self.notes: list[RowNote] = []
        self.extras: dict[int, RowExtra] = {}
        self.ends: list[End] = []


class Addresses:
    """Which rows of a step's columns go to which client, with the clients' keys.

    ``groups`` are (client, row indexes, keys as a uint32 column). They stay the same from step to
    step while no row comes or goes.
    """

    __slots__ = ("groups",)

    def __init__(self, names: list[bytes], owners: Int32, keys: UInt32) -> None:
        """``owners`` holds an index into ``names`` for each row."""
        order = np.argsort(owners, kind="stable")
        borders = np.flatnonzero(np.diff(owners[order])) + 1
        self.groups = [
            (names[owners[rows[0]]], rows, pack_uint32(keys[rows]))
            for rows in np.split(order, borders)
            if len(rows)
        ]


class Outbox:
    """Collects outputs; a batch is closed when a step was read, or when the outbox is drained.

    A request's last tokens and its end are put in between two closings, so they travel in one
    batch.
    """

    def __init__(self) -> None:
        self._messages: list[tuple[bytes, OutputBatch | Refused]] = []
        self._beside: dict[bytes, _Beside] = {}
        self._step = 0

    def refuse(self, client: bytes, refused: Refused) -> None:
        """Send a refusal."""
        self._messages.append((client, refused))

    def note(self, client: bytes, note: RowNote) -> None:
        """Add changed counters to the client's next batch."""
        self._for(client).notes.append(note)

    def extra(self, client: bytes, key: int) -> RowExtra:
        """Return the record of what a request carries beside its tokens in the next batch."""
        extras = self._for(client).extras
        if key not in extras:
            extras[key] = RowExtra(key)
        return extras[key]

    def end(self, client: bytes, end: End) -> None:
        """Add the end of a request to the client's next batch."""
        self._for(client).ends.append(end)

    def close_step(
        self, step: int, addresses: Addresses, tokens: Int32, counts: Int32 | None
    ) -> None:
        """Send what a step brought to the rows of ``addresses``.

        ``counts`` is the number of tokens per row, ``None`` when each has one.
        """
        self._step = step
        starts = None if counts is None else np.cumsum(counts) - counts
        for client, rows, keys in addresses.groups:
            if counts is None or starts is None:
                own = tokens if len(rows) == len(tokens) else tokens[rows]
                self._close(client, keys, pack_int32(own), b"")
            else:
                parts = [tokens[starts[row] : starts[row] + counts[row]] for row in rows]
                self._close(
                    client, keys, pack_int32(np.concatenate(parts)), pack_int32(counts[rows])
                )
        self._close_rest()

    def drain(self) -> list[tuple[bytes, OutputBatch | Refused]]:
        """Return all messages in order and forget them."""
        self._close_rest()
        messages = self._messages
        self._messages = []
        return messages

    def _for(self, client: bytes) -> _Beside:
        beside = self._beside.get(client)
        if beside is None:
            beside = self._beside[client] = _Beside()
        return beside

    def _close_rest(self) -> None:
        for client in list(self._beside):
            self._close(client, b"", b"", b"")

    def _close(self, client: bytes, keys: bytes, tokens: bytes, counts: bytes) -> None:
        batch = OutputBatch(step=self._step, keys=keys, counts=counts, tokens=tokens)
        beside = self._beside.pop(client, None)
        if beside is not None:
            batch.notes = beside.notes
            batch.extras = list(beside.extras.values())
            batch.ends = beside.ends
        self._messages.append((client, batch))
