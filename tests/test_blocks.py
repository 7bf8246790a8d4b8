"""KV blocks are conserved, and a cached block is found only by exactly what it holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.prefix_cache import PrefixCache
from deepinfer.wire.columns import pack_int32

operations = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "share", "release", "name"]),
        st.integers(0, 1 << 20),
        st.integers(1, 5),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(num_blocks=st.integers(1, 12), steps=operations)
def test_blocks_are_conserved_whatever_is_asked(
    num_blocks: int, steps: list[tuple[str, int, int]]
) -> None:
    """CACHE-02 for the pool alone."""
    pool = BlockPool(num_blocks)
    tables: list[list[int]] = []
    names: dict[bytes, int] = {}
    for at, (what, pick, count) in enumerate(steps):
        if what == "allocate" and count <= pool.available:
            owned = {block for table in tables for block in table}
            blocks = pool.allocate(count)
            assert not owned & set(blocks), "a block was handed out while in use"
            tables.append(blocks)
        elif what == "share" and names:
            digest = sorted(names)[pick % len(names)]
            block = pool.find(digest)
            if block is not None:
                assert block == names[digest]
                pool.share(block)
                tables.append([block])
        elif what == "release" and tables:
            pool.release(tables.pop(pick % len(tables)))
        elif what == "name" and tables:
            block = tables[pick % len(tables)][0]
            if block not in {pool.find(digest) for digest in names}:
                digest = b"%d" % at
                pool.name(block, digest)
                names[digest] = block
        pool.check([np.array(table, dtype=np.int32) for table in tables])
    for table in tables:
        pool.release(table)
    pool.check([])
    assert pool.available == num_blocks


def test_idle_blocks_are_forgotten_last_of_all_the_oldest_first_and_its_tail_before_it() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    for name, blocks in ((b"a", first), (b"b", second)):
        for index, block in enumerate(blocks):
            pool.name(block, name + b"%d" % index)
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_idle) == (1, 4)
    pool.allocate(1)
    assert [pool.find(name) is None for name in (b"a0", b"a1", b"b0", b"b1")] == [False] * 4
    pool.allocate(1)
    assert [pool.find(name) is None for name in (b"a0", b"a1", b"b0", b"b1")] == [
        False,
        True,
        False,
        False,
    ]
    shared = pool.find(b"a0")
    assert shared is not None
    pool.share(shared)  # in use again, so it is not the next to go
    pool.allocate(2)
    assert pool.find(b"a0") == shared
    assert pool.find(b"b0") is None and pool.find(b"b1") is None


def test_a_block_released_once_too_often_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(blocks)


keys = st.tuples(
    st.sampled_from(["", "a", "b", "ab"]), st.lists(st.integers(0, 3), min_size=4, max_size=12)
)


@settings(max_examples=300, deadline=None)
@given(one=keys, other=keys)
def test_digests_are_equal_exactly_for_equal_salt_and_tokens(
    one: tuple[str, list[int]], other: tuple[str, list[int]]
) -> None:
    cache = PrefixCache(BlockPool(1), block_size=4, enabled=True)
    found = []
    for salt, tokens in (one, other):
        digests: list[bytes] = []
        cache.extend(digests, salt, pack_int32(tokens), len(tokens))
        found.append(digests)
    for index, (left, right) in enumerate(zip(*found, strict=False)):
        upto = (index + 1) * 4
        same = one[0] == other[0] and one[1][:upto] == other[1][:upto]
        assert (left == right) == same


@given(tokens=st.lists(st.integers(0, 9), max_size=40), cut=st.integers(0, 40))
def test_digests_do_not_depend_on_how_the_tokens_arrived(tokens: list[int], cut: int) -> None:
    cache = PrefixCache(BlockPool(1), block_size=4, enabled=True)
    column = pack_int32(tokens)
    at_once: list[bytes] = []
    cache.extend(at_once, "salt", column, len(tokens))
    in_parts: list[bytes] = []
    cache.extend(in_parts, "salt", column, min(cut, len(tokens)))
    cache.extend(in_parts, "salt", column, len(tokens))
    assert at_once == in_parts
    assert len(at_once) == len(tokens) // 4
