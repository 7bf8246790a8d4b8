"""What happened lately, in bounded memory, for whoever asks to see the engine: steps and ends."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from deepinfer.scheduler.sequence import Sequence
from deepinfer.wire.columns import unpack_int32
from deepinfer.wire.messages import End, StepTimes
from deepinfer.wire.steps import StepPlan, StepResult

MAX_STEPS = 120
MAX_ENDS = 64
MAX_USERS = 1024
"""Users whose tokens are remembered though nothing of theirs lives, the latest ones."""


class PastEnd(NamedTuple):
    """One end, and whose it was; ``at`` and ``arrival`` are seconds."""

    at: float
    request_id: str
    user_id: str
    arrival: float
    num_prompt: int
    end: End


class RecentEnds:
    """The latest ends, and the output tokens that each user's ended requests had.

    Those that a request came with were not made here: they are taken off when it is accepted.
    """

    def __init__(self) -> None:
        self.ends: deque[PastEnd] = deque(maxlen=MAX_ENDS)
        self.tokens: OrderedDict[str, int] = OrderedDict()

    def brought(self, sequence: Sequence, num_output: int) -> None:
        """A request came with output tokens, from before a failover."""
        self._count(sequence.user_id, -num_output)

    def add(self, sequence: Sequence, end: End, produced: int, now: float) -> None:
        """Take note of an end; ``produced`` are its output tokens, those after a stop too."""
        user = sequence.user_id
        self.ends.append(
            PastEnd(now, sequence.request_id, user, sequence.arrival, sequence.num_prompt, end)
        )
        self._count(user, produced)

    def _count(self, user: str, tokens: int) -> None:
        self.tokens[user] = self.tokens.pop(user, 0) + tokens
        if len(self.tokens) > MAX_USERS:
            self.tokens.popitem(last=False)


class StepLog:
    """When the latest steps were planned, executed and read."""

    def __init__(self) -> None:
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)

    def planned(self, plan: StepPlan, decode_rows: int, began_ns: int, ended_ns: int) -> None:
        """A step was planned between these times, ``time.monotonic_ns``."""
        prefill_tokens = sum(unpack_int32(plan.chunks)[1::2].tolist()) if plan.chunks else 0
        self._steps.append(
            StepTimes(plan.step, began_ns, ended_ns, 0, 0, 0, decode_rows, prefill_tokens)
        )

    def read(self, result: StepResult, read_ns: int) -> None:
        """Its result came. What the worker says of its times is not believed where it cannot be."""
        for step in reversed(self._steps):
            if step.step < result.step:
                return
            if step.step == result.step:
                if step.plan_began_ns <= result.started_ns <= result.ended_ns <= read_ns:
                    step.began_ns, step.ended_ns = result.started_ns, result.ended_ns
                step.read_ns = read_ns
                return

    def steps(self) -> list[StepTimes]:
        """Return them, the latest last."""
        return list(self._steps)
