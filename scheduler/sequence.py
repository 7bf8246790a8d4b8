"""``Sequence``: one accepted request, and the only place where its status moves."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from deepinfer.scheduler.client_names import asker_of, key_of
from deepinfer.scheduler.story import Detail, Story, Whose
from deepinfer.wire.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.scheduler.images import ImageSet


class Status(Enum):
    """Where a sequence is in its life; the value is the finish reason a user sees."""

    WAITING = ("WAITING", "")
    RUNNING = ("RUNNING", "")
    FINISHED_STOPPED = ("FINISHED_STOPPED", "stop")
    FINISHED_LENGTH_CAPPED = ("FINISHED_LENGTH_CAPPED", "length")
    FINISHED_ABORTED = ("FINISHED_ABORTED", "abort")
    FINISHED_PREEMPTED = ("FINISHED_PREEMPTED", "insufficient_system_resource")
    FINISHED_IGNORED = ("FINISHED_IGNORED", "prompt_length_exceeded")
    FINISHED_VE_FAILED = ("FINISHED_VE_FAILED", "image_failed")
    FINISHED_SO_FAILED = ("FINISHED_SO_FAILED", "structured_output_failed")

    @property
    def reason(self) -> str:
        """``finish_reason``: empty while the sequence lives."""
        return self.value[1]

    @property
    def finished(self) -> bool:
        """Whether this is the last status of a sequence."""
        return bool(self.value[1])


# Every legal move. WAITING covers the queue and an unfinished prompt in a slot; a sequence is
# RUNNING from the plan that holds the last chunk of its prompt on. WAITING may end as STOPPED or
# LENGTH_CAPPED: a re-submitted request can turn out complete, and a frontend may find a stop string
# in the tokens of a sequence that was preempted meanwhile.
TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.WAITING: frozenset(
        {
            Status.RUNNING,
            Status.FINISHED_STOPPED,
            Status.FINISHED_LENGTH_CAPPED,
            Status.FINISHED_ABORTED,
            Status.FINISHED_PREEMPTED,
            Status.FINISHED_IGNORED,
            Status.FINISHED_VE_FAILED,
            Status.FINISHED_SO_FAILED,
        }
    ),
    Status.RUNNING: frozenset(
        {
            Status.WAITING,
            Status.FINISHED_STOPPED,
            Status.FINISHED_LENGTH_CAPPED,
            Status.FINISHED_ABORTED,
            Status.FINISHED_PREEMPTED,
        }
    ),
} | {status: frozenset() for status in Status if status.finished}


class InvalidTransition(AssertionError):
    """A status was asked to move against the table; the text holds the sequence's story."""


class Sequence:
    """One accepted request.

    While the sequence holds a slot its tokens stand in the batch table (``table.tokens[slot]``);
    ``tokens`` is then only what it entered the slot with. Out of a slot ``tokens`` is everything:
    int32 little-endian bytes, prompt first.
    """

    __slots__ = (
        "arrival",
        "arrival_number",
        "asker",
        "cached_tokens",
        "charged",
        "chosen",
        "client",
        "client_index",
        "computed_before",
        "deadline",
        "digests",
        "first_scheduled",
        "images",
        "key",
        "num_preemptions",
        "num_prompt",
        "num_registered",
        "num_restarts",
        "params",
        "passed_by",
        "passed_over",
        "priority",
        "prompt_logprobs_next",
        "queue_key",
        "queued_at",
        "recomputed_tokens",
        "request_id",
        "resubmitted",
        "salt",
        "schedulable",
        "slot",
        "status",
        "stop_ids",
        "story",
        "strikes",
        "struck_at",
        "tenant",
        "tokens",
        "user_id",
        "waited_s",
    )

    def __init__(
        self,
        *,
        client: bytes,
        client_index: int,
        key: int,
        request_id: str,
        prompt: bytes,
        output: bytes,
        params: SamplingParams,
        priority: int,
        salt: str,
        arrival: float,
        arrival_number: int,
        deadline: float | None,
        user_id: str = "",
        tenant: int = 0,
        resubmitted: bool = False,
    ) -> None:
        self.client = client
        self.client_index = client_index
        self.tenant = tenant
        self.key = key
        self.request_id = request_id
        self.user_id = user_id
        self.resubmitted = resubmitted
        self.asker = asker_of(client, user_id)
        self.params = params
        self.stop_ids = frozenset(params.stop_token_ids or ())
        self.priority = priority
        self.salt = salt
        self.arrival = arrival
        self.arrival_number = arrival_number
        self.deadline = deadline
        self.num_prompt = len(prompt) // 4
        self.tokens = prompt + output
        self.status = Status.WAITING
        self.slot = -1
        self.story = Story(arrival, Whose(request_id, user_id, key_of(client)))

        # Waiting: when it entered the queue, how long it has waited in all, where it stands.
        self.queued_at = arrival
        self.waited_s = 0.0
        self.queue_key: tuple[float, int, int] = (0.0, 0, arrival_number)
        self.first_scheduled: float | None = None
        # Under the fair policy: why it was admitted, and how often another tenant's younger
        # sequence was admitted while it was the oldest that waited.
        self.chosen: dict[str, Detail] = {}
        self.passed_over = 0

        # Its images, if it has any. It is not schedulable until all of them are there, and others
        # pass it meanwhile.
        self.images: ImageSet | None = None
        self.schedulable = True
        self.passed_by = 0

        # Prefix cache: digests of the full blocks known so far, and how many of the sequence's
        # own blocks are findable by them.
        self.digests: list[bytes] = []
        self.num_registered = 0
        # Prompt positions below this have had their log probabilities sent.
        self.prompt_logprobs_next = 1

        self.cached_tokens = 0
        self.num_preemptions = 0
        self.num_restarts = 0
        self.recomputed_tokens = 0
        # Deaths of workers that computed it without getting further, and where it stood then.
        self.strikes = 0
        self.struck_at = -1
        # Positions that were computed when the sequence last lost its blocks: what of them the
        # prefix cache does not give back has to be recomputed.
        self.computed_before = 0
        # Positions that its tenant was charged for, or that the prefix cache had, in earlier slots.
        self.charged = 0

    @property
    def wire_bytes(self) -> int:
        """About how many bytes it takes to tell a worker of this sequence."""
        params = self.params
        ids = len(params.allowed_token_ids or ()) + len(params.golden_token_ids or ())
        return len(self.tokens) + 4 * ids

    def move(self, status: Status) -> None:
        """Change the status; raise ``InvalidTransition`` when the table does not allow it."""
        if status not in TRANSITIONS[self.status]:
            raise InvalidTransition(
                f"request {self.request_id!r}: {self.status.name} -> {status.name} is no legal "
                f"move; its story: {self.story.text()}"
            )
        self.status = status
