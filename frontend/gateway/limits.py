"""What holds a tenant to its limits: a token bucket, and slots with a line. No clock in either."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict

_ROUNDING_S = 1e-6
"""What is this near counts as now: who came back after exactly the time he was told must pass."""


class Bucket:
    """A token bucket: ``rate`` units a second flow in, up to ``burst``; what is taken may be owed.

    It is kept as one time, the one at which the bucket is or was empty (the virtual scheduling form
    of the Generic Cell Rate Algorithm, ITU-T I.371). Times are seconds of one monotonic clock.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._empty_at = now - burst / rate

    def level(self, now: float) -> float:
        """Return the units at hand, negative when units are owed."""
        return min(self.burst, (now - self._empty_at) * self.rate)

    def take(self, units: float, now: float) -> None:
        """Take units that are there or not."""
        # What flowed over the brim does not count.
        self._empty_at = max(self._empty_at, now - self.burst / self.rate) + units / self.rate

    def wait_s(self, units: float, now: float) -> float:
        """Return the seconds until so many units are at hand, if nothing is taken meanwhile."""
        wait = self._empty_at + units / self.rate - now
        return wait if wait > _ROUNDING_S else 0.0

    def change(self, rate: float, burst: float, now: float) -> None:
        """Give the bucket another rate and size; what is in it, or owed, stays."""
        level = min(self.level(now), burst)
        self.rate, self.burst = rate, burst
        self._empty_at = now - level / rate


class Slots:
    """So many may be inside at a time; who comes next waits in line, first come, first served.

    ``asyncio.Semaphore`` cannot be given another size, and leaving its line costs its length.
    For use inside one event loop. Each call costs the same however many wait.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.inside = 0
        self._line: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._line)

    @property
    def full(self) -> bool:
        """Whether who comes now would wait."""
        # Nobody stands in line while there is room: whoever leaves lets the next one in.
        return self.inside >= self.limit

    async def enter(self) -> None:
        """Take a slot, after all who came before. A cancelled call has none."""
        if not self.full:
            self.inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.pop(turn, None)
            else:  # The slot was given in the same turn of the loop as the cancellation.
                self.leave()
            raise

    def leave(self) -> None:
        """Give the slot back."""
        assert self.inside > 0, "more slots were given back than taken"
        self.inside -= 1
        self._let_in()

    def resize(self, limit: float) -> None:
        """Change how many may be inside; those who are stay."""
        self.limit = limit
        self._let_in()

    def _let_in(self) -> None:
        while self._line and not self.full:
            turn, _ = self._line.popitem(last=False)
            if not turn.cancelled():
                self.inside += 1
                turn.set_result(None)
