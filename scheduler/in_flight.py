"""``InFlight``: what is remembered of a step until its result was read."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.scheduler.table import BatchTable
from deepinfer.wire.columns import Int32, pack_int32


@dataclass(slots=True)
class InFlight:
    """What a plan without a result takes part of: needed to know what its result must hold."""

    chunks: dict[int, int]
    """Slots that compute a chunk, with their epochs."""
    slots: Int32
    """Slots that sample a token: decode rows and last chunks."""
    column: bytes
    """The same as it should come back: comparing bytes is nearly free."""
    epochs: Int32
    """Their epochs."""
    epochs_column: bytes
    version: int
    """The batch table's when it was planned."""

    @staticmethod
    def of(table: BatchTable, slots: Int32, chunks: list[tuple[int, int]]) -> InFlight:
        """Describe a step in which ``slots`` sample and the (slot, q) pairs ``chunks`` compute."""
        epochs = table.epoch[slots]
        return InFlight(
            chunks={slot: int(table.epoch[slot]) for slot, _ in chunks},
            slots=slots,
            column=pack_int32(slots),
            epochs=epochs,
            epochs_column=pack_int32(epochs),
            version=table.version,
        )
