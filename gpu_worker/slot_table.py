"""The worker's mirror of the scheduler's batch table: all it knows of a sequence, by slot.

Only what a plan names is touched as a Python object; the rows that merely go on are columns. The
table trusts the scheduler for policy and checks it for memory safety: a plan that would read or
write outside a sequence's tokens or blocks raises ``PlanError``. That is a defect of the scheduler,
never of a request, and after it the two tables can no longer be assumed equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.gpu_worker.backend import Float32, RaggedBatch
from deepinfer.gpu_worker.row_images import ImageReader, PlanError, RowImages
from deepinfer.wire.columns import Int32, pack_int32, unpack_int32
from deepinfer.wire.steps import RowAdmit

__all__ = ["DecodeRows", "PlanError", "SlotTable"]

Index = npt.NDArray[np.integer]
_NONE = np.zeros(0, np.int32)


@dataclass(slots=True)
class DecodeRows:
    """The rows of a step that has no chunks, and their slots and epochs as they travel.

    Whoever has this very ``slots`` array means exactly these rows.
    """

    slots: Index
    batch: RaggedBatch
    columns: tuple[bytes, bytes]


class SlotTable:
    """Token pool, block tables, counters and images of every slot.

    ``num_blocks`` blocks of ``block_size`` tokens exist; a sequence holds at most ``max_model_len``
    tokens, and one more when its prompt alone is that long. Memory of the pool is touched only as
    far as sequences reach. Without ``images`` there can be no images.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        images: ImageReader | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_len = min(max_model_len, num_blocks * block_size)
        max_blocks = -(-self.max_len // block_size) + 1
        self.pool = np.zeros((max_num_seqs, self.max_len + 1), np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_held = np.zeros(max_num_seqs, np.int32)
        """Blocks in the slot's block table."""
        self.room = np.zeros(max_num_seqs, np.int32)
        """Tokens the slot may have now: its blocks hold no more, or no sequence may."""
        self.length = np.zeros(max_num_seqs, np.int32)
        """Tokens known: prompt and outputs."""
        self.computed = np.zeros(max_num_seqs, np.int32)
        """Tokens whose keys and values lie in the cache."""
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.epoch = np.zeros(max_num_seqs, np.int32)
        self.occupied = np.zeros(max_num_seqs, np.bool_)
        self.decoding = np.zeros(max_num_seqs, np.bool_)
        """All known tokens but the newest are computed: the row takes part in every step."""
        self.dead = np.zeros(max_num_seqs, np.bool_)
        """The row failed: it waits for its release and takes part in nothing."""
        self._decode_rows: DecodeRows | None = None
        self._image_reader = images
        self._images: dict[int, RowImages] = {}

    def release(self, column: bytes) -> list[int]:
        """Empty slots; return them."""
        if not column:
            return []
        slots = self._slots("released", _column("released", column))
        released: list[int] = slots.tolist()
        for slot in released:
            if not self.occupied[slot]:
                raise PlanError(f"released slot {slot} is empty")
            self.occupied[slot] = self.decoding[slot] = self.dead[slot] = False
            self._images.pop(slot, None)
        self._decode_rows = None
        return released

    def admit(self, row: RowAdmit) -> None:
        """Let a sequence enter an empty slot; nothing of it is computed yet but its cached part."""
        slot = int(self._slots("admitted", np.array([row.slot]))[0])
        tokens = _column("tokens", row.tokens)
        blocks = _column("blocks", row.blocks)
        named = f"sequence admitted to slot {slot}"
        if self.occupied[slot]:
            raise PlanError(f"{named}: the slot is taken")
        if not 1 <= len(tokens) <= self.max_len:
            raise PlanError(f"{named}: {len(tokens)} tokens, the limit is {self.max_len}")
        if not 1 <= row.num_prompt <= len(tokens):
            raise PlanError(f"{named}: num_prompt {row.num_prompt} of {len(tokens)} tokens")
        if not 0 <= row.num_cached < len(tokens):
            raise PlanError(f"{named}: num_cached {row.num_cached} of {len(tokens)} tokens")
        if len(blocks) * self.block_size < len(tokens) or len(blocks) > self.block_tables.shape[1]:
            raise PlanError(f"{named}: {len(blocks)} blocks for {len(tokens)} tokens")
        self._check_blocks(blocks)
        if row.images:
            if self._image_reader is None:
                raise PlanError(f"{named}: it has images, but this worker has no arena")
            try:
                self._images[slot] = self._image_reader.admit(row.images, len(tokens))
            except PlanError as error:
                raise PlanError(f"{named}: {error}") from error
        self.pool[slot, : len(tokens)] = tokens
        self.block_tables[slot, : len(blocks)] = blocks
        self._hold(slot, len(blocks))
        self.length[slot] = len(tokens)
        self.computed[slot] = row.num_cached
        self.num_prompt[slot] = row.num_prompt
        self.epoch[slot] = row.epoch
        self.occupied[slot] = True

    def grow(self, column: bytes) -> None:
        """Append blocks, given as pairs (slot, block), to block tables."""
        slots, blocks = self._pairs("grown", column)
        self._check_blocks(blocks)
        while len(slots):
            # One block for each slot in a round: an assignment by index array keeps only the last.
            chosen, first = np.unique(slots, return_index=True)
            held = self.num_held[chosen]
            if (held >= self.block_tables.shape[1]).any():
                raise PlanError(f"grown: a slot of {chosen.tolist()} has a full block table")
            self.block_tables[chosen, held] = blocks[first]
            self._hold(chosen, held + 1)
            slots, blocks = np.delete(slots, first), np.delete(blocks, first)

    def chunks(self, column: bytes) -> tuple[Index, Index]:
        """Return slots and lengths of the chunks to compute; those of dead rows are left out."""
        if not column:
            return _NONE, _NONE
        slots, counts = self._pairs("chunks", column)
        if len(np.unique(slots)) != len(slots):
            raise PlanError(f"chunks: a slot is named twice in {slots.tolist()}")
        left = self.length[slots] - self.computed[slots]
        alive = ~self.dead[slots]
        wrong = alive & (self.decoding[slots] | (counts < 1) | (counts > left))
        for at in np.flatnonzero(wrong).tolist():
            raise PlanError(
                f"chunk of {counts[at]} tokens for slot {slots[at]}, which has {left[at]} left"
                + (" and decodes" if self.decoding[slots[at]] else "")
            )
        return slots[alive], counts[alive]

    def decode_rows(self) -> Index:
        """Return the slots that take part with their newest token, ascending."""
        slots = np.flatnonzero(self.decoding)
        self._check_room(slots, self.length[slots])
        return slots

    def decode_batch(self) -> DecodeRows:
        """Return all decode rows as a batch. It is overwritten when they get their tokens.

        While no row comes or goes it is the one before, one position on: making it anew costs a
        tenth of a millisecond between two steps, when no core computes.
        """
        rows = self._decode_rows
        if rows is None:
            slots = self.decode_rows()
            batch = self.batch(slots, np.ones(len(slots), np.int32))
            rows = self._decode_rows = DecodeRows(slots, batch, self.columns(slots))
        else:
            self._check_room(rows.slots, rows.batch.lengths)
        return rows

    def batch(self, slots: Index, counts: Index, wanted: Index | None = None) -> RaggedBatch:
        """Return the batch in which slot ``slots[r]`` computes its next ``counts[r]`` tokens.

        ``wanted``: token indices whose logits are needed, ascending; by default each row's last.
        """
        q_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=q_start[1:])
        rows = np.repeat(slots, counts)
        starts = self.computed[slots]
        positions = np.arange(q_start[-1], dtype=np.int32)
        positions += np.repeat(starts - q_start[:-1], counts)
        batch = RaggedBatch(
            token_ids=self.pool[rows, positions],
            positions=positions,
            q_start=q_start,
            slots=slots.astype(np.int32),
            lengths=starts + counts.astype(np.int32),
            block_tables=self.block_tables,
            logit_index=q_start[1:] - 1 if wanted is None else wanted.astype(np.int32),
        )
        if self._images:
            self._add_images(batch)
        return batch

    def append(self, slots: Index, tokens: Int32) -> None:
        """Add one sampled token to each slot, which decodes from the next step on."""
        lengths = self.length[slots]
        self.pool[slots, lengths] = tokens
        lengths += 1
        self.length[slots] = lengths
        rows = self._decode_rows
        if rows is not None and slots is rows.slots:
            batch = rows.batch
            batch.token_ids[:] = tokens
            batch.positions += 1
            if batch.rope is not None:
                batch.rope += 1
            batch.lengths[:] = lengths
        else:
            self.decoding[slots] = True
            self._decode_rows = None

    def columns(self, slots: Index) -> tuple[bytes, bytes]:
        """Return slots and their epochs as they travel."""
        rows = self._decode_rows
        if rows is not None and slots is rows.slots:
            return rows.columns
        return pack_int32(slots), pack_int32(self.epoch[slots])

    def bury(self, slot: int) -> None:
        """Take a failed row out of all steps until it is released."""
        self.decoding[slot] = False
        self.dead[slot] = True
        self._decode_rows = None

    def tokens(self, slot: int) -> Int32:
        """Return all known tokens of a slot, a view."""
        return self.pool[slot, : self.length[slot]]

    def _add_images(self, batch: RaggedBatch) -> None:
        """Give a batch the pieces of images its rows compute, and the positions they turn by."""
        assert self._image_reader is not None
        rows: list[tuple[RowImages, int, int]] = []
        pieces: list[tuple[int, Float32]] = []
        for row, slot in enumerate(batch.slots.tolist()):
            images = self._images.get(slot)
            if images is not None:
                first, end = batch.q_start[row : row + 2].tolist()
                rows.append((images, first, end))
                pieces += images.pieces(int(batch.positions[first]), end - first, first)
        batch.images = pieces
        if rows and self._image_reader.rope_axes > 1:
            # Text has one position in all axes.
            axes = self._image_reader.rope_axes if pieces else 1
            batch.rope = np.repeat(batch.positions[None], axes, axis=0)
            for images, first, end in rows:
                images.turn(batch.rope[:, first:end])

    def _hold(self, slots: Index | int, num_blocks: Index | int) -> None:
        self.num_held[slots] = num_blocks
        self.room[slots] = np.minimum(num_blocks * self.block_size, self.max_len)

    def _check_room(self, slots: Index, lengths: Int32) -> None:
        short = lengths > self.room[slots]
        if short.any():
            full = (lengths > self.max_len).any()
            what = f"past {self.max_len} tokens" if full else "without a block for a token"
            raise PlanError(f"decode rows {what}: {slots[short].tolist()}")

    def _slots(self, name: str, slots: Index) -> Index:
        outside = (slots < 0) | (slots >= len(self.occupied))
        if outside.any():
            raise PlanError(f"{name}: no slot {slots[outside][0]}, there are {len(self.occupied)}")
        return slots

    def _pairs(self, name: str, column: bytes) -> tuple[Int32, Int32]:
        values = _column(name, column)
        if len(values) % 2:
            raise PlanError(f"{name}: {len(values)} numbers are no pairs")
        slots, seconds = values[0::2], values[1::2]
        self._slots(name, slots)
        empty = ~self.occupied[slots]
        if empty.any():
            raise PlanError(f"{name}: slot {slots[empty][0]} is empty")
        return slots, seconds

    def _check_blocks(self, blocks: Int32) -> None:
        outside = (blocks < 0) | (blocks >= self.num_blocks)
        if outside.any():
            raise PlanError(f"no block {blocks[outside][0]}, there are {self.num_blocks}")


def _column(name: str, column: bytes) -> Int32:
    try:
        return unpack_int32(column)
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from error
