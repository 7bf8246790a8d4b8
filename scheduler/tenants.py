"""Who is served how much: a virtual token counter for each tenant.

The counters are those of VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024): a tenant's counter grows by the tokens that were computed for it, divided by its weight, and
the tenant with the smallest counter goes first. They are kept under every policy, because they cost
nothing while rows only decode; only the fair policy decides by them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from deepinfer.scheduler.table import BatchTable

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MAX_IDLE_TENANTS = 4096
"""Tenants without a live request whose counters are remembered."""

MAX_TENANTS_TOLD = 256
"""Tenants that one answer tells of: those with live requests first, then those served most."""

ROUNDING = 1e-9
"""Shares are parts of one: this is no part of a slot or a block, whatever was added up."""

NOBODY_WAITS = np.iinfo(np.int64).max


class Tenants:
    """Counters by tenant; a tenant is a ``user_id``, of whichever client.

    Columns, by tenant index:

    - ``weight``: its share beside others; that of its latest request.
    - ``served``: tokens computed for it, prompt and output, since it is remembered. Tokens that the
      prefix cache had are not computed; what the engine had to compute again is not charged; what
      ran for a request that was aborted later stays charged.
    - ``counter``: the same divided by the weight, and lifted: see :meth:`lift`.
    - ``pending``: what its prompts in slots still have to compute, divided by the weight.
    - ``running``: its sequences in slots.
    - ``live``: its accepted requests without an end.
    - ``first``: arrival number of the first of its requests that wait, ``NOBODY_WAITS`` if none.

    ``counter`` and ``pending`` are as of the last :meth:`settle`. That takes a few numpy operations
    over the batch table's columns, whoever runs, and is done when there is something to decide
    between tenants. Between two of them a slot that is left is charged alone.

    Who has a live request is remembered, and so are the last ``MAX_IDLE_TENANTS`` others. Past that
    the one with the smallest counter is forgotten. It loses nothing when its counter is at or below
    ``floor``: the floor never falls, and whoever comes with nothing waiting is lifted to it, so the
    tenant comes back at the floor whether it is known or a stranger. With a counter above the floor
    it is forgiven the difference, and of all idle ones its difference is the smallest.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.floor = 0.0
        self.num_live = 0
        self._index: dict[str, int] = {}
        self._free: list[int] = []
        self._idle: list[tuple[float, int]] = []
        self._table: BatchTable | None = None
        self._may_push: bool | None = None
        size = 16
        self.weight: Float64 = np.ones(size)
        self.counter: Float64 = np.zeros(size)
        self.pending: Float64 = np.zeros(size)
        self.served: Int64 = np.zeros(size, np.int64)
        self.running: Int64 = np.zeros(size, np.int64)
        self.live: Int64 = np.zeros(size, np.int64)
        self.first: Int64 = np.full(size, NOBODY_WAITS)

    def __len__(self) -> int:
        return len(self._index)

    def attach(self, table: BatchTable) -> None:
        """Charge by the rows of another batch table; those of the one before have left it."""
        self._table = table

    # ---- who there is ---------------------------------------------------------------------------

    def index_of(self, user_id: str, weight: float) -> int:
        """Return the tenant's index for a request that comes with ``weight``."""
        index = self._index.get(user_id)
        if index is None:
            index = self._index[user_id] = self._new(user_id)
            self.weight[index] = weight
        elif self.weight[index] != weight:
            self.settle()  # what ran so far was at the weight before
            self.weight[index] = weight
            self._may_push = None
        return index

    def add(self, index: int) -> None:
        """A request of the tenant is live from now on."""
        self._may_push = None
        if not self.live[index]:
            self.num_live += 1
            entry = (float(self.counter[index]), index)
            at = bisect_left(self._idle, entry)
            if at < len(self._idle) and self._idle[at] == entry:
                del self._idle[at]
        self.live[index] += 1

    def remove(self, index: int) -> None:
        """A request of the tenant has ended and left its slot."""
        self._may_push = None
        self.live[index] -= 1
        if self.live[index]:
            return
        self.num_live -= 1
        insort(self._idle, (float(self.counter[index]), index))
        if len(self._idle) > MAX_IDLE_TENANTS:
            _, forgotten = self._idle.pop(0)
            del self._index[self.names[forgotten]]
            self.counter[forgotten] = self.pending[forgotten] = self.served[forgotten] = 0
            self._free.append(forgotten)

    @property
    def contended(self) -> bool:
        """Whether more than one tenant has live requests: else there is nothing to decide."""
        return self.num_live > 1

    # ---- who was served -------------------------------------------------------------------------

    def settle(self) -> None:
        """Charge all rows for what was computed since the last time.

        A chunk counts when it is planned: the worker executes what it was sent. An output token
        counts when its result was read.
        """
        table = self._table
        if table is None:
            return
        computed = np.where(table.sure == 0, table.computed, table.length)
        computed -= table.charged
        np.maximum(computed, 0, out=computed)
        table.charged += computed
        size = len(self.weight)
        fresh = np.bincount(table.tenant, weights=computed, minlength=size)
        self.served += fresh.astype(np.int64)
        self.counter += fresh / self.weight
        left = table.length - table.charged
        self.pending = np.bincount(table.tenant, weights=left, minlength=size) / self.weight

    def leave_slot(self, slot: int) -> None:
        """Charge a row that is about to leave its slot."""
        table = self._table
        assert table is not None
        self.running[table.tenant[slot]] -= 1
        self._may_push = None
        computed = table.length[slot] if table.sure[slot] else table.computed[slot]
        fresh = int(computed) - int(table.charged[slot])
        if fresh > 0:
            index = int(table.tenant[slot])
            table.charged[slot] += fresh
            self.served[index] += fresh
            self.counter[index] += fresh / self.weight[index]

    def lift(self, index: int) -> None:
        """Level a tenant that had nothing waiting with the others: idling earns no credit.

        It is lifted to the smallest counter among those who wait. While nobody waits nobody is
        short of anything, and whoever comes is level with whom was served most.
        """
        self.settle()
        waiting = self.first != NOBODY_WAITS
        least = self.counter[waiting].min() if waiting.any() else self.counter.max()
        self.floor = max(self.floor, float(least))
        self.counter[index] = max(self.counter[index], self.floor)

    def take_slot(self, slot: int) -> None:
        """A prompt was admitted: count it as pending, so that the next choice knows of it."""
        table = self._table
        assert table is not None
        index = table.tenant[slot]
        self.running[index] += 1
        self._may_push = None
        self.pending[index] += (table.length[slot] - table.charged[slot]) / self.weight[index]

    # ---- who is next, who has how much ----------------------------------------------------------

    @property
    def order(self) -> Float64:
        """What tenants are ordered by: the counter, with what was admitted and is to be computed.

        This is the counter of the paper, which charges a prompt when it is admitted. While a prompt
        is computed it stays the same.
        """
        return self.counter + self.pending

    def next(self) -> int:
        """Return the tenant that goes first among those who wait; somebody must.

        Of equals it is the one that runs least, then the one that asked first. Equals are no
        accident: whoever comes back is level with the one that goes first.
        """
        waiting = np.flatnonzero(self.first != NOBODY_WAITS)
        if len(waiting) > 1:
            order = self.order[waiting]
            waiting = waiting[order == order.min()]
        if len(waiting) > 1:
            running = self.running[waiting]
            waiting = waiting[running == running.min()]
        return int(waiting[np.argmin(self.first[waiting])])

    def shares(self) -> Float64:
        """Return the part of the engine that is each tenant's, of those with live requests."""
        weight: Float64 = np.where(self.live > 0, self.weight, 0.0)
        return weight / max(float(weight.sum()), 1e-300)

    def is_light(self, index: int, num_slots: int) -> bool:
        """Whether all live requests of a tenant together take one slot, or its share of them."""
        return bool(self.live[index] <= max(1.0, self.shares()[index] * num_slots + ROUNDING))

    def may_push(self, num_slots: int) -> bool:
        """Whether a tenant that waits has so few slots that others may have to make way for it.

        It has none, or no more than its share with another one. The answer stays the same
        until requests come, go, enter slots or leave them.
        """
        if self._may_push is None:
            few = (self.running == 0) | ((self.running + 1) / num_slots <= self.shares() + ROUNDING)
            self._may_push = bool((few & (self.first != NOBODY_WAITS)).any())
        return self._may_push

    def set_first(self, index: int, arrival_number: int) -> None:
        """Take note of who waits first of a tenant's, ``NOBODY_WAITS`` if none."""
        self.first[index] = arrival_number
        self._may_push = None

    def holdings(self, num_blocks: int) -> tuple[Float64, Float64]:
        """Return which part of all slots and which part of all blocks each tenant has.

        A block with several owners counts for each.
        """
        table, size = self._table, len(self.weight)
        assert table is not None
        slots = self.running / table.num_slots
        blocks = np.bincount(table.tenant, weights=table.held, minlength=size) / num_blocks
        return slots, blocks

    def numbers(self, waiting: dict[int, int]) -> dict[str, dict[str, float]]:
        """Return what there is to say of each tenant, given how many requests of each wait.

        At most ``MAX_TENANTS_TOLD`` of them.
        """
        self.settle()
        told = heapq.nlargest(
            MAX_TENANTS_TOLD,
            self._index.items(),
            key=lambda item: (self.live[item[1]] > 0, self.served[item[1]]),
        )
        return {
            name: {
                "weight": float(self.weight[index]),
                "served_tokens": int(self.served[index]),
                "counter": float(self.counter[index]),
                "running": int(self.running[index]),
                "waiting": waiting.get(index, 0),
            }
            for name, index in told
        }

    def check(self) -> None:
        """Assert that the book agrees with itself."""
        assert len(self._index) + len(self._free) == len(self.names)
        assert all(self.names[index] == name for name, index in self._index.items())
        idle = {index for index in self._index.values() if not self.live[index]}
        known = [(float(self.counter[index]), index) for _, index in self._idle]
        assert known == self._idle == sorted(known), "an idle tenant's counter moved"
        assert {index for _, index in self._idle} == idle and len(idle) <= MAX_IDLE_TENANTS
        assert (self.counter >= 0).all() and (self.served >= 0).all()
        assert np.isfinite(self.counter).all()

    # ---- inside ---------------------------------------------------------------------------------

    def _new(self, user_id: str) -> int:
        if self._free:
            index = self._free.pop()
            self.names[index] = user_id
            return index
        self.names.append(user_id)
        if len(self.names) > len(self.weight):
            self._widen()
        return len(self.names) - 1

    def _widen(self) -> None:
        """Make room for as many tenants again."""
        more = len(self.weight)
        self.weight = np.concatenate([self.weight, np.ones(more)])
        self.counter = np.concatenate([self.counter, np.zeros(more)])
        self.pending = np.concatenate([self.pending, np.zeros(more)])
        self.served = np.concatenate([self.served, np.zeros(more, np.int64)])
        self.running = np.concatenate([self.running, np.zeros(more, np.int64)])
        self.live = np.concatenate([self.live, np.zeros(more, np.int64)])
        self.first = np.concatenate([self.first, np.full(more, NOBODY_WAITS)])
