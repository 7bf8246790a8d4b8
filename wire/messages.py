"""Messages between clients and the scheduler.

One message is one msgpack frame. Structs travel as arrays whose first element is the tag (the
class name), so a client in another language needs only msgpack. Columns are little-endian bytes:
``int32`` for token ids and counts, ``uint32`` for keys.

A client names each request by a ``key``, a number that it never uses twice on one connection; the
``request_id`` is the name people see. Keys make a request's outputs cheap to name and the reuse of
an id safe: a late message about the earlier request carries the earlier key.

``docs/protocol.md`` is for clients in other languages; a test holds its tables against this file.
"""

from __future__ import annotations

import msgspec

from deepinfer.wire.params import SamplingParams

PROTOCOL_VERSION = 1
MAX_REQUEST_ID_CHARS = 256
MAX_USER_ID_CHARS = 256
MAX_SALT_CHARS = 256
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_IMAGES = 64
MAX_IMAGE_BYTES = 24 << 20
"""Of the files of all images of one request."""
MAX_IMAGE_URL_CHARS = 4096


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of every message that travels as a tagged array."""


class Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the untagged structs inside messages."""


# ---- client to scheduler ----------------------------------------------------------------------


class Hello(Message):
    """First message of a client; answered with ``Welcome`` as soon as the engine is ready."""

    protocol: int = PROTOCOL_VERSION


class ClientHeartbeat(Message):
    """Sent every second; a client silent past the limit is gone and its requests are aborted."""


class Goodbye(Message):
    """The client leaves; its live requests are aborted."""


class Drain(Message):
    """The owner asks the engine to end when what was accepted is finished, or after this time.

    Others are not listened to. New requests are refused from then on.
    """

    timeout_s: float


class ImageRef(Part):
    """One image of a request: its bytes or its URL, and where its placeholder stands in the prompt.

    The prompt holds one placeholder token for an image, whatever its size; the scheduler puts the
    image's own tokens there when they are known.
    """

    data: bytes = b""
    url: str = ""
    position: int = 0


class AddRequest(Message):
    """Ask for one sequence. ``prompt`` holds int32 token ids.

    ``resubmitted`` marks a request that an engine had accepted before a failover: it is not turned
    away for a full queue, and ``output`` holds the tokens that were delivered: the sequence
    continues after them. ``timeout_ms`` is a deadline counted from the arrival.
    ``salt`` separates prefix-cache entries of tenants. ``user_id`` is the tenant and ``weight`` its
    share beside others under the fair policy, from ``MIN_WEIGHT`` to ``MAX_WEIGHT``; that of the
    tenant's latest request counts. ``params.seed`` must be set;
    ``params.stop`` is the frontend's own business and not looked at here.
    """

    key: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    user_id: str = ""
    priority: int = 0
    timeout_ms: float | None = None
    output: bytes = b""
    salt: str = ""
    images: list[ImageRef] = []
    resubmitted: bool = False
    weight: float = 1.0


class Abort(Message):
    """End a request: ``client_abort`` or ``disconnect``. Unknown keys are remembered briefly."""

    key: int
    rule: str = "client_abort"


class StopMatched(Message):
    """The frontend found a stop string after ``num_output_tokens``: end the request as stopped."""

    key: int
    stop: str
    num_output_tokens: int


class Call(Message):
    """Ask for ``stats``, ``health``, ``story`` (of ``request_id``), ``view`` or ``tenants``."""

    call_id: int
    what: str
    request_id: str = ""


# ---- scheduler to client ----------------------------------------------------------------------


class ImageInput(Part):
    """How an engine takes images.

    - ``placeholder``: the token that stands for an image in a prompt.
    - ``max_images``, ``max_bytes``: of one request, all its files together.
    - ``urls``: whether it fetches images.
    """

    placeholder: int
    max_images: int
    max_bytes: int
    urls: bool


class EngineInfo(Part):
    """What a client must know about the engine behind the scheduler."""

    model: str
    tokenizer: str
    vocab_size: int
    eos_token_ids: list[int]
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    architecture: str
    start_s: dict[str, float] = {}
    """Seconds of each phase of the worker's start."""
    images: ImageInput | None = None
    """``None`` when it takes no images."""


class Welcome(Message):
    """The engine is ready."""

    info: EngineInfo
    protocol: int = PROTOCOL_VERSION


class EngineDown(Message):
    """The engine cannot serve: it failed to start or its worker is gone for good."""

    message: str


class Forgotten(Message):
    """The client was silent, or did not read, for too long: its requests have ended.

    It comes as soon as the client reads, and answers whatever it sends under its old identity
    from then on, but ``Hello``. The client may begin anew with ``Hello``, or under another
    identity, and submit its requests with the tokens it has.
    """


class SchedulerHeartbeat(Message):
    """Sent every second to every client."""

    step: int = 0


class Refused(Message):
    """A request that never became a sequence. ``code`` is one of ``invalid``, ``duplicate``,
    ``busy`` (retry later), ``down``, ``shutdown`` (retry elsewhere).
    """

    key: int
    code: str
    field: str
    message: str


class TokenLogprobs(Part):
    """Log probabilities of one generated token. ``top_*`` are sorted, the most likely first."""

    logprob: float
    sum_smaller_probs: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(Part):
    """Log probabilities of prompt tokens ``start, start + 1, …`` given what stands before each.

    ``token_ids[i]`` and ``logprobs[i]`` belong to prompt position ``start + i``: the prompt's own
    token first, then the most likely ones. Position 0 has none and is never sent.
    """

    start: int
    token_ids: list[list[int]]
    logprobs: list[list[float]]


class RowExtra(Part):
    """What some rows of an ``OutputBatch`` carry beside their tokens."""

    key: int
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    draft_tokens: int = 0
    accepted_tokens: int = 0


class RowNote(Part):
    """Counters of a request, sent when they change (with its first token, after a preemption).

    ``prompt_tokens`` counts an image as all the tokens that took the place of its placeholder.
    """

    key: int
    cached_tokens: int
    num_preemptions: int
    prompt_tokens: int


class End(Part):
    """The one end of a request. ``detail`` is ``rule`` or ``rule:what matched``."""

    key: int
    status: str
    reason: str
    detail: str
    num_output_tokens: int
    last_token_id: int
    cached_tokens: int
    num_preemptions: int
    recomputed_tokens: int
    queue_ms: float
    total_ms: float
    message: str = ""
    prompt_tokens: int = 0


class OutputBatch(Message):
    """What one step (or one event) brought for one client.

    ``keys``: uint32 column. ``counts``: int32 column of tokens per key; empty when each has one.
    ``tokens``: int32 column, all keys' tokens one after the other. An end in ``ends`` comes after
    the tokens of its key in the same batch.
    """

    step: int
    keys: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    notes: list[RowNote] = []
    extras: list[RowExtra] = []
    ends: list[End] = []


class StoryEvent(Part):
    """One thing that happened to a request: milliseconds after its arrival, what, and why."""

    at_ms: float
    event: str
    detail: dict[str, str | int | float]

    def without_other(self, by: str) -> StoryEvent:
        """Return the event without what it says of another request; ``by`` stands for that one."""
        own = {name: value for name, value in self.detail.items() if not name.startswith("by_")}
        return StoryEvent(self.at_ms, self.event, own | {"by": by})


class LiveRequest(Part):
    """A request that has not ended.

    ``status`` is ``waiting`` (no slot), ``prefilling`` (a part of its prompt is computed) or
    ``running``. ``computed_tokens`` counts what all plans so far compute, ``max_tokens`` what it
    may put out at most, ``blocks`` the KV blocks in its block table. ``age_ms`` is since its
    arrival.
    """

    request_id: str
    user_id: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    blocks: int
    priority: int
    preemptions: int
    age_ms: float


class EndedRequest(Part):
    """A request that ended ``ago_ms`` milliseconds before the view, after ``total_ms``."""

    request_id: str
    user_id: str
    reason: str
    detail: str
    prompt_tokens: int
    output_tokens: int
    total_ms: float
    ago_ms: float


class UserShare(Part):
    """What the requests of one user hold now, and the tokens that they have had.

    ``blocks`` are KV blocks that this user's requests alone own, each counted once.
    ``output_tokens`` only grows: a reader of two views knows the tokens per second. It begins
    anew for a user of whom nothing was heard for long.
    """

    user_id: str
    waiting: int
    prefilling: int
    running: int
    blocks: int
    output_tokens: int


class StepTimes(Part):
    """One step in nanoseconds of the engine's monotonic clock, as ``EngineView.now_ns``.

    The scheduler planned it from ``plan_began_ns`` to ``plan_ended_ns``, the worker executed it
    from ``began_ns`` to ``ended_ns``, and the scheduler took its result up at ``read_ns``; the
    last three are 0 for a step that is in flight or was lost with its worker.
    """

    step: int
    plan_began_ns: int
    plan_ended_ns: int
    began_ns: int
    ended_ns: int
    read_ns: int
    decode_rows: int
    prefill_tokens: int


class EngineView(Part):
    """What an engine does at one moment, for people who look on. Bounded whatever the load.

    - ``stats``: the gauges and totals of the call ``stats``.
    - ``worker``: starting, ready or down; ``ok`` and ``cause`` are those of the call ``health``.
    - ``requests``: live ones, what computes first, then what is admitted next; ``left_out`` counts
      those that are not listed.
    - ``ended``: the latest last.
    - ``users``: those that hold most first. What is not listed of them is missing in all its
      columns.
    - ``blocks_shared``: KV blocks that requests of several users own.
    - ``steps``: the latest last.
    """

    now_ns: int
    ok: bool
    cause: str
    worker: str
    stats: dict[str, int | float]
    requests: list[LiveRequest] = []
    left_out: int = 0
    ended: list[EndedRequest] = []
    users: list[UserShare] = []
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_shared: int = 0
    steps: list[StepTimes] = []


class Answer(Message):
    """Answer to a ``Call``: the fields that belong to ``what`` are set. ``error`` says why not.

    For ``tenants``, ``texts`` holds the ``user_id`` of the i-th tenant under ``"i"``, ``numbers``
    what there is to say of it under ``"i.NAME"``: ``weight``, ``served_tokens``, ``counter``,
    ``running``, ``waiting``.
    """

    call_id: int
    error: str = ""
    numbers: dict[str, int | float] = {}
    texts: dict[str, str] = {}
    story: list[StoryEvent] = []
    view: EngineView | None = None


FromClient = Hello | ClientHeartbeat | Goodbye | Drain | AddRequest | Abort | StopMatched | Call
ToClient = Welcome | EngineDown | Forgotten | SchedulerHeartbeat | Refused | OutputBatch | Answer
