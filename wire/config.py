"""``EngineArgs``: everything that configures one engine."""

from __future__ import annotations

import re

import msgspec

from deepinfer.wire.checks import check_choice, check_float, check_int, shown

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")
QUANTIZATIONS = ("none", "int8", "int4")
POLICIES = ("fcfs", "priority", "fair")

_CORES = re.compile(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", re.ASCII)


class EngineArgs(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Configuration of an engine. The commands take each field as a flag or a variable as well.

    Values are checked when the object is made; ``ValueError`` names the field and the limit.
    """

    model: str = "smollm2-135m"
    """A name in the model cache, a model folder, or a .gguf file."""
    tokenizer: str | None = None
    """A folder with tokenizer.json; the model's own when not given."""
    dtype: str = "auto"
    """Weights: auto (bfloat16), float32 or bfloat16."""
    device: str = "auto"
    """auto or cpu."""
    quantization: str = "none"
    """Weights: none (as dtype says), int8, or int4 (with a scale for each 32)."""
    kv_cache_dtype: str = "auto"
    """KV cache: auto (as dtype), float32, bfloat16 or int8 (half of bfloat16's memory)."""
    max_model_len: int | None = None
    """Tokens a sequence may hold, prompt and output; the model's own limit when not given."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_kv_blocks: int | None = None
    """KV blocks; overrides kv_cache_bytes."""
    kv_cache_bytes: int | None = None
    """Bytes for the KV cache; by default a quarter of the free memory, at most 4 GiB."""
    max_num_seqs: int = 256
    """Sequences that run at the same time, at most."""
    max_num_batched_tokens: int = 2048
    """Tokens one step may compute, prefill chunks and decode rows together."""
    max_step_ms: float | None = None
    """How long a step may take: prefill chunks are kept small, 16 tokens at the least."""
    stop_preempted_request: bool = True
    """End a preempted request (True) or recompute it later (False)."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt beginnings."""
    async_scheduling: bool = True
    """Plan the next step while one runs."""
    num_image_workers: int = 1
    """Processes that read images, for a model that takes some; 0 takes none."""
    image_arena_bytes: int = 256 << 20
    """Memory for images that were read, taken at the start of a model that takes some."""
    image_urls: bool = False
    """Fetch images by their http and https URLs; else only files and data URLs are taken."""
    image_timeout_s: float = 120.0
    """Longest time to fetch and read one image."""
    policy: str = "fcfs"
    """Whose turn it is: fcfs, priority (a lower number goes first) or fair (between user_ids)."""
    seed: int | None = None
    """Base for the seeds of requests that bring none; random when not given."""
    endpoint: str | None = None
    """ZeroMQ endpoint clients connect to; a private ipc socket when not given."""
    curve_keys: str | None = None
    """Folder of `deepinfer keys`: only clients with a key, also beyond this machine, over tcp."""
    max_queue_len: int = 16384
    """Requests that may wait; more are refused (retry later), but who has few finds room still."""
    heartbeat_timeout_s: float = 10.0
    """A process or client silent for longer counts as dead; at least 2: all speak every second."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long accepted requests may take to finish before they are ended."""
    start_timeout_s: float = 600.0
    """Longest time for loading the model."""
    weight_cache: bool = True
    """Keep the weights on disk as the kernels take them, so that the next start is faster."""
    num_threads: int | None = None
    """Compute threads of the CPU worker; one for each core it may use when not given."""
    worker_cpus: str | None = None
    """Cores the CPU worker may use, such as 0-7,16-23 (those of one NUMA node, say)."""
    profile: str | None = None
    """Folder where each process of the engine writes at its end where its time went."""
    worker_module: str = "deepinfer.gpu_worker"
    """Python module that is run as the device worker."""
    image_worker_module: str = "deepinfer.image_worker"
    """Python module that is run as an image worker."""

    def __post_init__(self) -> None:
        for field in ("model", "worker_module", "image_worker_module"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value or len(value) > 4096:
                raise ValueError(f"{field} must be a non-empty string, got {shown(value)}")
        if self.curve_keys is not None and not (
            isinstance(self.curve_keys, str) and self.curve_keys
        ):
            raise ValueError(f"curve_keys must be a folder, got {shown(self.curve_keys)}")
        if self.profile is not None and not (isinstance(self.profile, str) and self.profile):
            raise ValueError(f"profile must be a folder, got {shown(self.profile)}")
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_choice("device", self.device, DEVICES)
        check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("policy", self.policy, POLICIES)
        check_int("block_size", self.block_size, 1, 1024)
        check_int("max_num_seqs", self.max_num_seqs, 1, 65_536)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        check_int("max_queue_len", self.max_queue_len, 1, 1 << 24)
        check_int("num_image_workers", self.num_image_workers, 0, 64)
        check_int("image_arena_bytes", self.image_arena_bytes, 1 << 16, 1 << 50)
        if self.max_step_ms is not None:
            check_float("max_step_ms", self.max_step_ms, 0.1, 3_600_000)
        check_float("image_timeout_s", self.image_timeout_s, 0.1, 86_400)
        check_float("heartbeat_timeout_s", self.heartbeat_timeout_s, 2.0, 86_400)
        check_float("drain_timeout_s", self.drain_timeout_s, 0.0, 86_400)
        check_float("start_timeout_s", self.start_timeout_s, 0.1, 86_400)
        for field, high in (
            ("max_model_len", 1 << 50),
            ("num_kv_blocks", 1 << 50),
            ("kv_cache_bytes", 1 << 50),
            ("num_threads", 1024),
        ):
            value = getattr(self, field)
            if value is not None:
                check_int(field, value, 1, high)
        if self.worker_cpus is not None:
            cpu_set(self.worker_cpus)
        if self.seed is not None:
            check_int("seed", self.seed, 0, (1 << 63) - 1)
        for field in (
            "stop_preempted_request",
            "enable_prefix_caching",
            "async_scheduling",
            "image_urls",
            "weight_cache",
        ):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be a bool, got {shown(getattr(self, field))}")


def cpu_set(text: str) -> set[int]:
    """Return the cores of a list such as ``0-7,16``; ``ValueError`` when it is none."""
    cores: set[int] = set()
    for part in text.split(",") if isinstance(text, str) and len(text) <= 1024 else [""]:
        found = _CORES.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ValueError(
                f"worker_cpus must be a list of cores such as 0-7,16-23, got {shown(text)}"
            )
        cores.update(range(first, last + 1))
    return cores


class SchedulerConfig(msgspec.Struct, kw_only=True):
    """What the frontend tells the scheduler process at its start."""

    args: EngineArgs
    directory: str
    """Private directory of this engine's sockets; the scheduler removes it at its end.

    The owner connects to ``ipc://DIRECTORY/engine``, others to ``args.endpoint`` if there is one.
    """
    owner: bytes = b""
    """How the identities of the client begin that owns this process.

    Its life is watched by the lifeline and not by its heartbeats.
    """


class WorkerConfig(msgspec.Struct, kw_only=True):
    """What the scheduler tells a device worker or an image worker at its start."""

    args: EngineArgs
    endpoint: str
    identity: bytes
    arena_fd: int | None = None
    """The arena's descriptor, inherited; ``None`` for a model without images."""
