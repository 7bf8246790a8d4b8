"""What Prometheus reads: one table of all metrics, and where their values come from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deepinfer.frontend.gateway.ledger import Ledger
from deepinfer.frontend.gateway.tenants import Tenants


class Definition(NamedTuple):
    """Name, type and meaning of a metric, as ``docs/metrics.md`` lists them."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in seconds."""


# A GPU has a first token in milliseconds and the next in one; a CPU with a long prompt takes
# minutes for the first and a tenth of a second for the next.
_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_GAP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_REQUEST = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

_TENANT = ("tenant",)

REQUESTS = Definition(
    "deepinfer_requests_total",
    "counter",
    "POST requests that ended, by tenant (empty: nobody's key), route and status.",
    ("tenant", "endpoint", "status"),
)
PROMPT_TOKENS = Definition(
    "deepinfer_prompt_tokens_total", "counter", "Prompt tokens of ended requests.", _TENANT
)
CACHED_TOKENS = Definition(
    "deepinfer_cached_prompt_tokens_total",
    "counter",
    "Those of the prompt tokens that came from the prefix cache.",
    _TENANT,
)
GENERATED_TOKENS = Definition(
    "deepinfer_generated_tokens_total", "counter", "Tokens generated for ended requests.", _TENANT
)
SERVED_TOKENS = Definition(
    "deepinfer_served_tokens_total",
    "counter",
    "Tokens computed for a tenant, as the fair policy counts them.",
    _TENANT,
)
FIRST_TOKEN = Definition(
    "deepinfer_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to its first token.",
    buckets=_FIRST_TOKEN,
)
TOKEN_GAP = Definition(
    "deepinfer_inter_token_latency_seconds",
    "histogram",
    "From a token of a completion to the next one.",
    buckets=_TOKEN_GAP,
)
REQUEST_SECONDS = Definition(
    "deepinfer_request_duration_seconds",
    "histogram",
    "From a request's arrival to its end.",
    buckets=_REQUEST,
)

OPEN = Definition(
    "deepinfer_open_requests", "gauge", "Requests that were let in and have not ended.", _TENANT
)
WAITING = Definition(
    "deepinfer_waiting_requests",
    "gauge",
    "Requests that wait in the gateway because max_concurrent are open.",
    _TENANT,
)
REJECTED = Definition(
    "deepinfer_rejected_requests_total",
    "counter",
    "Requests refused with status 429 by a limit of their tenant; reason is the limit's name.",
    ("tenant", "reason"),
)

LEDGER_FAILED = Definition(
    "deepinfer_ledger_failures_total",
    "counter",
    "Entries of the usage ledger that could not be written, or synced, at once.",
)
LEDGER_PENDING = Definition(
    "deepinfer_ledger_pending_entries",
    "gauge",
    "Entries of the usage ledger that wait for the file to be writable again.",
)
LEDGER_LOST = Definition(
    "deepinfer_ledger_lost_entries_total",
    "counter",
    "Entries of the usage ledger that were given up because too many waited.",
)

ENGINE_UP = Definition("deepinfer_engine_up", "gauge", "1 when the engine answers, 0 when not.")
ENDED = Definition(
    "deepinfer_engine_requests_ended_total",
    "counter",
    "Sequences that ended, by the path that ended them (docs/lifecycle.md lists all).",
    ("ending",),
)

_ENDED_PREFIX = "ended_"


def _engine(name: str, kind: str, help: str) -> Definition:
    return Definition(f"deepinfer_engine_{name}", kind, help)


ENGINE = {
    "live": _engine("live_requests", "gauge", "Sequences that were accepted and have not ended."),
    "waiting": _engine("waiting_requests", "gauge", "Sequences in the engine's queue."),
    "prefilling": _engine(
        "prefilling_requests", "gauge", "Sequences whose prompt is partly computed."
    ),
    "running": _engine(
        "running_requests", "gauge", "Sequences that hold a slot, prefilling or decoding."
    ),
    "in_flight": _engine("steps_in_flight", "gauge", "Steps planned whose result is not in yet."),
    "blocks_total": _engine("kv_blocks", "gauge", "KV blocks there are."),
    "blocks_free": _engine("kv_blocks_free", "gauge", "KV blocks that hold nothing."),
    "blocks_cached": _engine(
        "kv_blocks_cached", "gauge", "KV blocks without an owner that the prefix cache can find."
    ),
    "images_waiting": _engine("images_waiting", "gauge", "Images that wait for an image worker."),
    "images_encoding": _engine("images_encoding", "gauge", "Images that an image worker has."),
    "image_arena_bytes": _engine("image_arena_bytes", "gauge", "Memory for images there is."),
    "image_arena_used_bytes": _engine(
        "image_arena_used_bytes", "gauge", "Memory that images take, cached ones too."
    ),
    "image_arena_cached_bytes": _engine(
        "image_arena_cached_bytes", "gauge", "Memory of images that no request uses now."
    ),
    "image_file_bytes": _engine(
        "image_file_bytes", "gauge", "Bytes of the files of open requests' images."
    ),
    "images_encoded": _engine("images_encoded_total", "counter", "Images encoded."),
    "images_failed": _engine("images_failed_total", "counter", "Images that could not be had."),
    "image_cache_hits": _engine(
        "image_cache_hits_total", "counter", "Images that were known when they were asked for."
    ),
    "image_retries": _engine(
        "image_retries_total", "counter", "Images tried again because their worker died."
    ),
    "images_taken_back": _engine(
        "images_taken_back_total",
        "counter",
        "Images that made room for those of a request before theirs, to be encoded again.",
    ),
    "image_worker_restarts": _engine(
        "image_worker_restarts_total", "counter", "Image workers replaced."
    ),
    "clients": _engine("clients", "gauge", "Clients connected to the engine."),
    "tenants": _engine(
        "tenants", "gauge", "Tenants (`user_id`s) whose share of the tokens is remembered."
    ),
    "last_step_age_s": _engine(
        "last_step_age_seconds", "gauge", "Time since a step ended; it grows when nothing runs."
    ),
    "uptime_s": _engine("uptime_seconds", "gauge", "Time since the scheduler started."),
    "accepted": _engine("requests_accepted_total", "counter", "Sequences accepted."),
    "refused": _engine("requests_refused_total", "counter", "Sequences refused by the engine."),
    "preemptions": _engine(
        "preemptions_total", "counter", "Running sequences that lost their KV blocks."
    ),
    "prompt_tokens": _engine(
        "prompt_tokens_total", "counter", "Prompt tokens of sequences that began to run."
    ),
    "cached_tokens": _engine(
        "cached_prompt_tokens_total", "counter", "Those that came from the prefix cache."
    ),
    "computed_tokens": _engine(
        "computed_tokens_total", "counter", "Tokens put through the model, prompt and output."
    ),
    "recomputed_tokens": _engine(
        "recomputed_tokens_total",
        "counter",
        "Tokens computed once more after a preemption or a worker's death.",
    ),
    "output_tokens": _engine("output_tokens_total", "counter", "Tokens generated."),
    "steps_planned": _engine("steps_planned_total", "counter", "Steps sent to the worker."),
    "steps_done": _engine("steps_total", "counter", "Steps whose result came."),
    "ignored_results": _engine(
        "ignored_results_total", "counter", "Results of steps of a worker that was replaced."
    ),
    "voided_rows": _engine(
        "voided_rows_total", "counter", "Rows computed for a sequence that had left the batch."
    ),
    "worker_busy_s": _engine(
        "worker_busy_seconds_total", "counter", "Time the device worker computed steps."
    ),
    "worker_idle_s": _engine(
        "worker_idle_seconds_total",
        "counter",
        "Time between steps while requests were open.",
    ),
    "worker_restarts": _engine(
        "worker_restarts_total", "counter", "Device workers that were replaced."
    ),
    "unknown_keys": _engine(
        "unknown_keys_total",
        "counter",
        "Connections over a network that were not let in, for nobody knows their key.",
    ),
    "junk_frames": _engine(
        "junk_frames_total", "counter", "Frames dropped because they could not be read."
    ),
}
"""Metrics by the name their value has in the engine's ``stats()``."""

DEFINITIONS = (
    REQUESTS,
    REJECTED,
    OPEN,
    WAITING,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    GENERATED_TOKENS,
    SERVED_TOKENS,
    FIRST_TOKEN,
    TOKEN_GAP,
    REQUEST_SECONDS,
    LEDGER_FAILED,
    LEDGER_PENDING,
    LEDGER_LOST,
    ENGINE_UP,
    ENDED,
    *ENGINE.values(),
)
"""All metrics there are."""


class Metrics:
    """The gateway's numbers. Gauges and rejections are read off the tenants when asked for.

    ``endpoint`` must be the route that was matched and never what a client wrote: each value is a
    time series for good.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, tenants: Tenants, ledger: Ledger | None = None) -> None:
        self._tenants = tenants
        self._ledger = ledger
        self._registry = CollectorRegistry()
        self._requests = self._counter(REQUESTS)
        self._prompt = self._counter(PROMPT_TOKENS)
        self._cached = self._counter(CACHED_TOKENS)
        self._generated = self._counter(GENERATED_TOKENS)
        self._served = self._counter(SERVED_TOKENS)
        self._served_so_far: dict[str, float] = {}
        self._histograms = [Histogram(of) for of in (FIRST_TOKEN, TOKEN_GAP, REQUEST_SECONDS)]
        first_token, token_gap, request_seconds = self._histograms
        self.first_token = first_token.observe
        """Take in the seconds from a request's arrival to its first token."""
        self.token_gap = token_gap.observe
        """Take in the seconds from a token to the next one of the same completion."""
        self.request_seconds = request_seconds.observe
        """Take in the seconds from a request's arrival to its end."""

    def request_ended(self, tenant: str, endpoint: str, status: int) -> None:
        """Count a request that was answered, or given up by its client (status 499)."""
        self._requests.labels(tenant, endpoint, str(status)).inc()

    def tokens(self, tenant: str, prompt: int, cached: int, generated: int) -> None:
        """Count the tokens of a request that ended; ``cached`` are among ``prompt``."""
        self._prompt.labels(tenant).inc(prompt)
        self._cached.labels(tenant).inc(cached)
        self._generated.labels(tenant).inc(generated)

    def served(self, told: Mapping[str, Mapping[str, float]]) -> None:
        """Take in what the engine tells of its tenants (``AsyncEngine.tenants``).

        It forgets tenants of whom nothing was heard for long, and all when it is replaced; what was
        counted here stays.
        """
        for tenant in self._tenants.refused.keys() & told.keys():
            now, before = told[tenant]["served_tokens"], self._served_so_far.get(tenant, 0)
            self._served.labels(tenant).inc(now - before if now >= before else now)
            self._served_so_far[tenant] = now

    def render(self, stats: Mapping[str, float] | None) -> bytes:
        """Return all metrics as Prometheus reads them, with ``content_type``.

        ``stats`` are the engine's, ``None`` when it does not answer. A name in them that stands in
        no table, which a newer engine may have, is left out. With a thousand tenants this takes
        some 60 ms; it may be called in a thread of its own.
        """
        return generate_latest(_Scrape(self._registry, [*self._own(), *_of_engine(stats)]))

    def _own(self) -> Iterator[Metric]:
        yield from (each.family() for each in self._histograms)
        tenants = list(self._tenants)
        yield _family(OPEN, [((each.name,), each.open) for each in tenants])
        yield _family(WAITING, [((each.name,), each.waiting) for each in tenants])
        refusals = [
            ((name, limit), count)
            for name, refused in self._tenants.refused.items()
            for limit, count in refused.items()
        ]
        yield _family(REJECTED, refusals)
        if self._ledger is not None:
            yield _family(LEDGER_FAILED, [((), self._ledger.failed)])
            yield _family(LEDGER_PENDING, [((), self._ledger.pending)])
            yield _family(LEDGER_LOST, [((), self._ledger.lost)])

    def _counter(self, of: Definition) -> Counter:
        return Counter(of.name, of.help, of.labels, registry=self._registry)


class Histogram:
    """Counts seconds by bucket.

    The library's own takes eight times as long (a lock for each of three counters, so that threads
    may count), which is too much for every token.
    """

    def __init__(self, of: Definition) -> None:
        self._of = of
        self._counts = [0] * (len(of.buckets) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value; a bucket holds those up to its bound."""
        self._counts[bisect_left(self._of.buckets, seconds)] += 1
        self._sum += seconds

    def family(self) -> Metric:
        """Return what was counted so far."""
        bounds = [*(str(float(bound)) for bound in self._of.buckets), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._of.name, self._of.help, buckets, self._sum)


class _Scrape(Collector):
    """One answer: what was counted here, and what was read off others for it."""

    def __init__(self, registry: CollectorRegistry, families: list[Metric]) -> None:
        self._registry = registry
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            # A second series for each one, saying when it began: the library can leave them out
            # only for the whole process, which belongs to the app.
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family
        yield from self._families


def _of_engine(stats: Mapping[str, float] | None) -> Iterator[Metric]:
    yield _family(ENGINE_UP, [((), stats is not None)])
    if stats is None:
        return
    endings = [
        ((name.removeprefix(_ENDED_PREFIX),), count)
        for name, count in stats.items()
        if name.startswith(_ENDED_PREFIX)
    ]
    yield _family(ENDED, endings)
    for name, definition in ENGINE.items():
        if name in stats:
            yield _family(definition, [((), stats[name])])


def _family(of: Definition, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    make = CounterMetricFamily if of.kind == "counter" else GaugeMetricFamily
    family = make(of.name, of.help, labels=of.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family
