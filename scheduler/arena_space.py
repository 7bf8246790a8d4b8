"""``ArenaSpace``: who owns which piece of the arena."""

from __future__ import annotations

from bisect import bisect_left

from deepinfer.wire.arena import ALIGNMENT, Region


class ArenaSpace:
    """Hands out regions, first fit, each with a generation that was never used before.

    Offsets and lengths are multiples of ``ALIGNMENT``. Only numbers: the memory is not touched.
    """

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._generation = 0
        # Free pieces in the order of their offsets; no two touch each other.
        self._offsets: list[int] = [0] if self.size else []
        self._lengths: list[int] = [self.size] if self.size else []
        self._owned: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> Region | None:
        """Return a region of at least so many bytes, ``None`` when no free piece is that long."""
        length = aligned(num_bytes)
        for index, free in enumerate(self._lengths):
            if free >= length:
                offset = self._offsets[index]
                if free == length:
                    del self._offsets[index], self._lengths[index]
                else:
                    self._offsets[index] += length
                    self._lengths[index] -= length
                self._generation += 1
                self._owned[offset] = length
                self.used += length
                return Region(offset, length, self._generation)
        return None

    def shrink(self, region: Region, num_bytes: int) -> Region:
        """Take back what is behind the first ``num_bytes``; the generation stays."""
        length = aligned(num_bytes)
        assert 0 < length <= region.length == self._owned[region.offset]
        self._owned[region.offset] = length
        self.used -= region.length - length
        self._give(region.offset + length, region.length - length)
        return Region(region.offset, length, region.generation)

    def free(self, region: Region) -> None:
        """Take a region back."""
        length = self._owned.pop(region.offset)
        assert length == region.length, f"{region} is not what is owned there: {length} bytes"
        self.used -= length
        self._give(region.offset, length)

    def _give(self, offset: int, length: int) -> None:
        if not length:
            return
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and offset + length == self._offsets[at]:
            length += self._lengths[at]
            del self._offsets[at], self._lengths[at]
        if at and self._offsets[at - 1] + self._lengths[at - 1] == offset:
            self._lengths[at - 1] += length
        else:
            self._offsets.insert(at, offset)
            self._lengths.insert(at, length)

    def check(self, regions: list[Region]) -> None:
        """Assert that these are all the regions there are, apart from each other and the rest."""
        owned = {region.offset: region.length for region in regions}
        assert len(owned) == len(regions), "a region has two owners"
        assert owned == self._owned, "a region is lost, or used after it was given back"
        assert self.used == sum(owned.values())
        free = zip(self._offsets, self._lengths, strict=True)
        end = 0
        for offset, length in sorted([*owned.items(), *free]):
            assert offset == end and length > 0 and not length % ALIGNMENT, "pieces overlap"
            end = offset + length
        assert end == self.size, "a piece of the arena is lost"


def aligned(num_bytes: int) -> int:
    """Return the length of a region that holds so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
