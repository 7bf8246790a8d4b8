"""The prefix cache: digests of full blocks, chained, and the blocks that hold them."""

from __future__ import annotations

from hashlib import blake2b

from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.images import ImageSet

_ROOT = b"deepinfer.root"
_BLOCK = b"deepinfer.block"


class PrefixCache:
    """Finds the blocks that already hold the beginning of a sequence.

    The digest of a full block is BLAKE2b-256 of the digest before it, the block's tokens, and for
    each image that has some of them the digest of its file and where it begins; the first one
    follows the digest of the salt. The encoding is injective: all parts have fixed sizes, and root
    and block digests are kept apart by the hash's personalisation.

    A block becomes findable with the plan that computes its last position, for the plans *after*
    it. That is early (the step has not run yet) and safe: the worker executes plans in order, so a
    later step that reads the block runs after the one that fills it. If the worker dies in between,
    the whole cache is dropped with its memory. Nothing ever writes to a findable block: a sequence
    writes only at positions after its full blocks.
    """

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self.enabled = enabled

    def extend(
        self,
        digests: list[bytes],
        salt: str,
        tokens: bytes,
        num_tokens: int,
        images: ImageSet | None = None,
    ) -> None:
        """Append the digests of the full blocks in the first ``num_tokens`` of ``tokens``.

        ``tokens`` is an int32 column; ``digests`` already holds those of its first blocks.
        """
        size = self._block_size * 4
        if digests:
            parent = digests[-1]
        else:
            parent = blake2b(salt.encode(), digest_size=32, person=_ROOT).digest()
        for start in range(len(digests) * size, num_tokens // self._block_size * size, size):
            block = tokens[start : start + size]
            if images is not None:
                block += images.marks(start // 4, (start + size) // 4)
            parent = blake2b(parent + block, digest_size=32, person=_BLOCK).digest()
            digests.append(parent)

    def match(self, digests: list[bytes], most: int) -> list[int]:
        """Return the blocks that hold the longest known beginning, at most ``most`` of them."""
        blocks: list[int] = []
        for digest in digests[:most]:
            block = self._pool.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks
