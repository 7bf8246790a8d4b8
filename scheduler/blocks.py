"""``BlockPool``: who owns which KV block, and which unowned ones can still be found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np

from deepinfer.wire.columns import Int32


class BlockPool:
    """Fixed blocks with reference counts, a free list and a least-recently-used list.

    A block is in exactly one of three states:

    - *owned*: one or more sequences have it in their block table;
    - *idle*: nobody owns it, but its content can be found by a digest; it is taken back for other
      content only when the free list is empty, the one unused for longest first;
    - *free*.

    Blocks that come back may be handed out again at once, also while steps that read or write them
    are in flight: the worker executes steps in order, so whatever a later plan makes another
    sequence write is written after every earlier step is done with the block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = np.zeros(num_blocks, dtype=np.int32)
        # Popped from the end: low numbers first, which keeps the touched memory small.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks without an owner whose content can be found."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, each with one owner; there must be as many available."""
        assert 0 <= count <= self.available, f"{count} blocks asked, {self.available} available"
        while len(self._free) < count:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            self._free.append(block)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        self.references[taken] = 1
        return taken

    def share(self, block: int) -> None:
        """Add an owner to a block that was found by its digest."""
        assert block in self._digest_of, f"block {block} cannot be shared: it has no digest"
        if self.references[block] == 0:
            del self._idle[block]
        self.references[block] += 1

    def release(self, blocks: Seq[int] | Int32) -> None:
        """Take one owner from each of the blocks of a sequence, given in the order of its table."""
        # From the tail on, so that of an idle sequence the tail is forgotten before its beginning.
        for block in reversed(blocks):
            block = int(block)
            assert self.references[block] > 0, f"block {block} was released once too often"
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._digest_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def is_idle(self, block: int) -> bool:
        """Whether the block is findable and has no owner."""
        return block in self._idle

    def find(self, digest: bytes) -> int | None:
        """Return the block that holds the content of this digest."""
        return self._block_of.get(digest)

    def name(self, block: int, digest: bytes) -> None:
        """Make an owned block findable, unless another block holds the same content already."""
        assert self.references[block] > 0 and block not in self._digest_of
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def check(self, owned: Seq[Int32]) -> None:
        """Assert conservation, given the block tables of all owners."""
        counts = np.zeros(self.num_blocks, dtype=np.int32)
        for blocks in owned:
            assert len(set(blocks.tolist())) == len(blocks), (
                f"a table holds a block twice: {blocks}"
            )
            counts[blocks] += 1
        assert np.array_equal(counts, self.references), "a reference count is not its owners' count"
        num_owned = int((counts > 0).sum())
        assert self.num_free + self.num_idle + num_owned == self.num_blocks, (
            f"{self.num_free} free + {self.num_idle} idle + {num_owned} owned "
            f"are not {self.num_blocks}"
        )
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & self._idle.keys(), "a block is free and idle"
        assert not any(counts[block] for block in free), "an owned block is in the free list"
        assert not any(counts[block] for block in self._idle), "an owned block is idle"
        assert not free & self._digest_of.keys(), "a free block is findable"
        assert {b: d for d, b in self._block_of.items()} == self._digest_of, "the index disagrees"
