"""What the requests do at one moment and who holds the KV blocks, for people who look on.

Made when somebody asks, and only then: a step costs nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from deepinfer.scheduler.lifecycle import Lifecycle
from deepinfer.scheduler.sequence import Sequence, Status
from deepinfer.wire.columns import Int32
from deepinfer.wire.messages import EndedRequest, EngineView, LiveRequest, UserShare

MAX_IN_SLOTS = 256
MAX_REQUESTS = 320
"""Live requests that a view lists: ``MAX_IN_SLOTS`` that compute, and more that wait."""
MAX_USERS = 64
MAX_DETAIL_CHARS = 200

_NOBODY = -1
_SEVERAL = -2


def look_in(life: Lifecycle, now: float, into: EngineView) -> None:
    """Fill in requests, ends, users and KV blocks at ``now``, seconds of the clock of arrivals."""
    shares = _Shares()
    for past in life.recent.ends:
        into.ended.append(
            EndedRequest(
                past.request_id,
                past.user_id,
                past.end.reason,
                past.end.detail[:MAX_DETAIL_CHARS],
                past.num_prompt,
                past.end.num_output_tokens,
                (past.at - past.arrival) * 1e3,
                (now - past.at) * 1e3,
            )
        )
    for user, tokens in life.recent.tokens.items():
        shares.of(user).output_tokens = tokens
    in_slots: list[Sequence] = []
    if hasattr(life, "table"):  # else no worker was ever ready
        bound = life.table.bound()
        _blocks(life, bound, shares, into)
        in_slots = [seq for seq in bound if seq.status is not Status.RUNNING]
        in_slots.sort(key=lambda seq: seq.queue_key)
        running = [seq for seq in bound if seq.status is Status.RUNNING]
        running.sort(key=lambda seq: seq.arrival_number)
        in_slots += running
        _requests(life, in_slots, shares, now, into)
    waiting: dict[str, int] = {}
    for sequence in life.queue:  # there may be many
        user = sequence.user_id
        waiting[user] = waiting.get(user, 0) + 1
        produced = len(sequence.tokens) // 4 - sequence.num_prompt
        if produced:
            shares.of(user).output_tokens += produced
    for user, count in waiting.items():
        shares.of(user).waiting = count
    for sequence in islice(life.queue, MAX_REQUESTS - len(into.requests)):
        produced = len(sequence.tokens) // 4 - sequence.num_prompt
        into.requests.append(_request(sequence, "waiting", 0, produced, 0, now))
    into.left_out = len(life.clients) - len(into.requests)
    into.users = list(islice(shares.largest_first(), MAX_USERS))


class _Shares:
    """The users by name, in a stable order."""

    def __init__(self) -> None:
        self._by_name: dict[str, UserShare] = {}

    def of(self, user_id: str) -> UserShare:
        share = self._by_name.get(user_id)
        if share is None:
            share = self._by_name[user_id] = UserShare(user_id, 0, 0, 0, 0, 0)
        return share

    def largest_first(self) -> Iterator[UserShare]:
        def size(share: UserShare) -> tuple[int, int, int, int]:
            live = share.prefilling + share.running
            return (share.blocks, live, share.waiting, share.output_tokens)

        return iter(sorted(self._by_name.values(), key=size, reverse=True))


def _requests(
    life: Lifecycle, in_slots: list[Sequence], shares: _Shares, now: float, into: EngineView
) -> None:
    table = life.table
    slots = [sequence.slot for sequence in in_slots]
    lengths, computed, held = (
        column[slots].tolist() for column in (table.length, table.computed, table.held)
    )
    for row, sequence in enumerate(in_slots):
        share = shares.of(sequence.user_id)
        produced = lengths[row] - sequence.num_prompt
        share.output_tokens += produced
        if sequence.status is Status.RUNNING:
            share.running += 1
            status = "running"
        else:
            share.prefilling += 1
            status = "prefilling"
        if row < MAX_IN_SLOTS:
            into.requests.append(
                _request(sequence, status, computed[row], produced, held[row], now)
            )


def _request(
    sequence: Sequence, status: str, computed: int, produced: int, blocks: int, now: float
) -> LiveRequest:
    return LiveRequest(
        sequence.request_id,
        sequence.user_id,
        status,
        sequence.num_prompt,
        sequence.cached_tokens,
        computed,
        produced,
        sequence.params.max_tokens,
        blocks,
        sequence.priority,
        sequence.num_preemptions,
        (now - sequence.arrival) * 1e3,
    )


def _blocks(life: Lifecycle, bound: list[Sequence], shares: _Shares, into: EngineView) -> None:
    """Count each owned block once: for its user, or as shared where there are several."""
    pool, table = life.pool, life.table
    into.blocks_total = pool.num_blocks
    into.blocks_free = pool.num_free
    into.blocks_cached = pool.num_idle
    if not bound:
        return
    numbers: dict[str, int] = {}
    users = [numbers.setdefault(sequence.user_id, len(numbers)) for sequence in bound]
    blocks = np.concatenate([table.blocks(sequence.slot) for sequence in bound])
    user = np.repeat(users, table.held[[sequence.slot for sequence in bound]])
    owner: Int32 = np.full(pool.num_blocks, _NOBODY, dtype=np.int32)
    owner[blocks] = user
    # Where a block has several users one of them was written last, and the others do not find it.
    owner[blocks[owner[blocks] != user]] = _SEVERAL
    into.blocks_shared = int(np.count_nonzero(owner == _SEVERAL))
    counts = np.bincount(owner[owner >= 0], minlength=len(numbers)).tolist()
    for name, number in numbers.items():
        shares.of(name).blocks = counts[number]
