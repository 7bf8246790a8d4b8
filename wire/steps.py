"""Messages between the scheduler and a device worker.

The worker mirrors the scheduler's batch table by slot, so a plan carries only what changed. Each
slot that holds a sequence whose whole prompt is computed is a *decode row* and takes part in every
step without being named; a slot whose prompt is not yet computed takes part only in the steps that
name a chunk for it. The last chunk of a prompt yields a token and makes the slot a decode row from
the next step on.

Columns are little-endian int32 bytes.
"""

from __future__ import annotations

from deepinfer.wire.arena import Region
from deepinfer.wire.messages import Message, Part, PromptLogprobs, TokenLogprobs
from deepinfer.wire.params import SamplingParams

# ---- scheduler to worker ----------------------------------------------------------------------


class ImageSpan(Part):
    """An image in a sequence's tokens.

    - ``position``: of the first of its tokens in the sequence.
    - ``runs``: int32 column of pairs (offset from ``position``, count): the tokens whose embeddings
      are the lines of ``region``, float32 [total of the runs, hidden size], in this order.
    - ``grid``: (frames, rows, columns) for rotary positions in three axes, else empty.
    """

    position: int
    runs: bytes
    region: Region
    grid: tuple[int, ...] = ()


class RowAdmit(Part):
    """A sequence enters a slot, with everything the worker needs about it.

    - ``tokens``: int32 column, prompt and the outputs so far (after a recompute preemption or a
      failover there are some).
    - ``num_prompt``: how many of them are the prompt; penalties and seeds count outputs from there.
    - ``num_cached``: tokens at the front whose keys and values already lie in ``blocks``.
    - ``blocks``: int32 column, the block table so far; enough for all of ``tokens``.
    - ``prompt_logprobs_start``: first prompt position whose log probabilities are still wanted.
    - ``images``: in order of position. Their regions stay as they are until the result of the first
      step that has released the slot, or of the last step of the worker, was read.
    """

    slot: int
    epoch: int
    tokens: bytes
    num_prompt: int
    num_cached: int
    blocks: bytes
    params: SamplingParams
    prompt_logprobs_start: int = 1
    images: list[ImageSpan] = []


class StepPlan(Message):
    """One step, applied in the order of the fields; a worker executes plans in ``step`` order.

    - ``released``: slots that are empty from now on.
    - ``admitted``: rows that enter a slot.
    - ``grown``: pairs (slot, block): one more block at the end of a slot's block table.
    - ``chunks``: pairs (slot, q): compute the next ``q`` tokens of a prompt in this step.

    All decode rows take part with one token each. (With drafts: 1 + drafts.)
    """

    step: int
    released: bytes = b""
    admitted: list[RowAdmit] = []
    grown: bytes = b""
    chunks: bytes = b""


class StopWorker(Message):
    """Leave, cleanly."""


# ---- worker to scheduler ----------------------------------------------------------------------


class WorkerHello(Message):
    """The process runs and begins to load."""


class WorkerReady(Message):
    """The model is loaded. ``phases`` are the seconds of each part of the start."""

    vocab_size: int
    eos_token_ids: list[int]
    max_model_len: int
    num_blocks: int
    dtype: str
    device: str
    architecture: str
    phases: dict[str, float]


class WorkerFailed(Message):
    """The worker cannot go on (bad model, out of memory); it exits after this message."""

    message: str


class WorkerHeartbeat(Message):
    """Sent every second by a thread of its own, also while a step computes or a model loads."""

    step: int
    busy_s: float


class RowLogprobs(Part):
    """Log probabilities of the tokens that a slot got in this step, one entry a token."""

    slot: int
    logprobs: list[TokenLogprobs]


class RowPromptLogprobs(Part):
    """Prompt log probabilities that a chunk of a slot brought."""

    slot: int
    prompt_logprobs: PromptLogprobs


class RowFailed(Part):
    """A row that failed alone (for example all its logits are banned or not finite)."""

    slot: int
    epoch: int
    message: str


class StepResult(Message):
    """What a step brought, for the rows that sampled.

    - ``slots``, ``epochs``: int32 columns; the epoch is the one the row was admitted with.
    - ``counts``: tokens per row; empty when each row has one.
    - ``tokens``: int32 column, the rows' tokens one after the other.
    - ``failed``: rows without a token; they are not in ``slots``.
    - ``started_ns``, ``ended_ns``: ``time.monotonic_ns`` around the computation.
    """

    step: int
    slots: bytes = b""
    epochs: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowPromptLogprobs] = []
    failed: list[RowFailed] = []
    started_ns: int = 0
    ended_ns: int = 0


ToWorker = StepPlan | StopWorker
FromWorker = WorkerHello | WorkerReady | WorkerFailed | WorkerHeartbeat | StepResult
