"""What holds tenants and calls to limits: a token bucket, slots with a line, turns. No clock."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque

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


class Turns:
    """So many may go on in one turn of the event loop; the others follow, turn by turn, in order.

    What comes at once, as a thousand calls do when a server was away, would otherwise be done in a
    single turn, and whoever comes meanwhile would wait for all of it.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        self._left = each
        self._line: deque[asyncio.Future[None]] = deque()
        self._next_comes = False

    async def take(self) -> None:
        """Go on, now if there is room in this turn and nobody waits."""
        if not self._next_comes:
            self._next_comes = True
            asyncio.get_running_loop().call_soon(self._next)
        if self._left and not self._line:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        await turn

    def _next(self) -> None:
        self._left = self._each
        while self._left and self._line:
            turn = self._line.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._left -= 1
        self._next_comes = self._left < self._each
        if self._next_comes:
            asyncio.get_running_loop().call_soon(self._next)
