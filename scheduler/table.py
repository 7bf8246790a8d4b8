"""The batch as a table: numpy columns by slot, so that unchanged rows cost no Python."""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import numpy.typing as npt

from deepinfer.scheduler.sequence import Sequence
from deepinfer.wire.columns import Int32, UInt32

Bool = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]


class TokenClass(IntFlag):
    """What makes a token interesting to the stop rules."""

    EOS = 1
    STOP_ID = 2
    """Some sequence in a slot has it among its ``stop_token_ids``."""


class BatchTable:
    """One row per slot. A sequence that prefills or runs is bound to a slot.

    Columns (length ``num_slots``), meaningful for bound slots:

    - ``length``: tokens known, prompt and outputs that were read from results.
    - ``num_prompt``, ``max_length``: the prompt's length, and the length at which the sequence ends
      at the latest.
    - ``look_at``: the length from which a new token takes a closer look: 0 until the first token
      since the row was admitted was read, ``max_length`` from then on.
    - ``stop_mask``: which ``TokenClass`` bits of a new token take a closer look.
    - ``computed``: for an unfinished prompt, its positions computed by all plans so far; for a
      decode row the same as an upper bound: results may bring fewer tokens than a step can.
    - ``sure``: for a decode row, the length it has at least when everything in flight was read.
    - ``held``: blocks in ``block_table``; ``room``: positions in them.
    - ``epoch``: changes whenever the slot is left. A result that carries another epoch is void.
    - ``known``: the worker has this row (it was admitted there and not yet released).
    - ``decode``: the worker computes this row in every step without being told.
    - ``client``, ``key``: whose the tokens are.
    - ``tenant``: who is charged for them; ``charged``: the positions that it is not to be charged
      for any more (``Tenants.settle``).

    ``version`` changes whenever a slot is left, or begins or ceases to decode: until then the
    decode rows, their owners and their epochs stay the same.

    ``tokens`` (num_slots × width) and ``block_table`` are allocated in full but only touched, and
    so only backed by memory, where sequences write.
    """

    def __init__(self, num_slots: int, width: int, num_blocks_wide: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.version = 0
        self.length: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.num_prompt: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.max_length: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.look_at: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.stop_mask: UInt8 = np.zeros(num_slots, dtype=np.uint8)
        self.computed: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.sure: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.held: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.room: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.epoch: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.client: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.tenant: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.charged: Int32 = np.zeros(num_slots, dtype=np.int32)
        self.key: UInt32 = np.zeros(num_slots, dtype=np.uint32)
        self.known: Bool = np.zeros(num_slots, dtype=np.bool_)
        self.decode: Bool = np.zeros(num_slots, dtype=np.bool_)
        self.tokens: Int32 = np.zeros((num_slots, width), dtype=np.int32)
        self.block_table: Int32 = np.zeros((num_slots, num_blocks_wide), dtype=np.int32)
        self.sequences: list[Sequence | None] = [None] * num_slots
        # Popped from the end: low slots first.
        self.free_slots = list(range(num_slots - 1, -1, -1))

    def bind(self, sequence: Sequence, max_length: int) -> int:
        """Give the sequence a slot, with its tokens and stop rules; return the slot."""
        slot = self.free_slots.pop()
        assert self.sequences[slot] is None
        self.sequences[slot] = sequence
        sequence.slot = slot
        length = len(sequence.tokens) // 4
        self.tokens[slot, :length] = np.frombuffer(sequence.tokens, dtype="<i4")
        self.length[slot] = length
        self.num_prompt[slot] = sequence.num_prompt
        self.max_length[slot] = max_length
        self.client[slot] = sequence.client_index
        self.key[slot] = sequence.key
        self.tenant[slot] = sequence.tenant
        self.look_at[slot] = 0
        mask = TokenClass(0)
        if not sequence.params.ignore_eos:
            mask |= TokenClass.EOS
        if sequence.stop_ids:
            mask |= TokenClass.STOP_ID
        self.stop_mask[slot] = mask
        return slot

    def unbind(self, sequence: Sequence) -> None:
        """Take the slot back and make everything in flight for it void.

        The sequence leaves with all its tokens.
        """
        slot = sequence.slot
        assert self.sequences[slot] is sequence
        sequence.tokens = self.token_bytes(slot)
        sequence.slot = -1
        self.sequences[slot] = None
        self.epoch[slot] += 1
        self.drop_blocks(slot)
        self.computed[slot] = 0
        self.sure[slot] = 0
        self.length[slot] = 0
        self.charged[slot] = 0
        self.known[slot] = False
        self.decode[slot] = False
        self.free_slots.append(slot)
        self.version += 1

    def token_bytes(self, slot: int) -> bytes:
        """Return the slot's tokens as an int32 column."""
        return self.tokens[slot, : self.length[slot]].astype("<i4", copy=False).tobytes()

    def blocks(self, slot: int) -> Int32:
        """Return a view of the slot's block table."""
        return self.block_table[slot, : self.held[slot]]

    def add_blocks(self, slot: int, blocks: list[int]) -> None:
        """Append blocks to the slot's block table."""
        held = int(self.held[slot])
        self.block_table[slot, held : held + len(blocks)] = blocks
        self.held[slot] = held + len(blocks)
        self.room[slot] = self.held[slot] * self.block_size

    def add_block_each(self, slots: Int32, blocks: Int32) -> None:
        """Append one block to the block table of each of ``slots``."""
        held = self.held[slots]
        self.block_table[slots, held] = blocks
        held += 1
        self.held[slots] = held
        self.room[slots] = held * self.block_size

    def drop_blocks(self, slot: int) -> None:
        """Empty the slot's block table."""
        self.held[slot] = 0
        self.room[slot] = 0

    def bound(self) -> list[Sequence]:
        """Return the sequences in slots, in slot order."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def at(self, slot: int) -> Sequence:
        """Return the sequence bound to a slot that must have one."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence
