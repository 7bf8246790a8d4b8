"""What Prometheus is told is true, complete, and named as the documents say."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deepinfer import AsyncEngine, SamplingParams
from deepinfer.frontend.gateway.errors import ApiError
from deepinfer.frontend.gateway.ledger import Ledger
from deepinfer.frontend.gateway.metrics import DEFINITIONS, ENGINE, Metrics
from deepinfer.frontend.gateway.tenants import Tenants, digest_of
from deepinfer.scheduler.ends import Ending
from deepinfer.wire.config import EngineArgs
from support.core_driver import CoreDriver
from support.scripted_engine import ScriptedFolder

ROOT = Path(__file__).parent.parent
KINDS = {each.name: each for each in DEFINITIONS}


def families(metrics: Metrics, stats: dict[str, float] | None = None) -> dict[str, Metric]:
    """What a Prometheus server would read, by documented name."""
    text = metrics.render(stats).decode()
    read = list(text_string_to_metric_families(text))
    by_name = {each.name + "_total" * (each.type == "counter"): each for each in read}
    assert len(by_name) == len(read), "one name, two families"
    return by_name


def value(family: Metric, **labels: str) -> float:
    [found] = [each.value for each in family.samples if each.labels == labels]
    return found


def everything_happened(tmp_path: Path) -> Metrics:
    metrics = Metrics(Tenants.anonymous(), Ledger(tmp_path / "usage.jsonl", fsync_every_s=None))
    metrics.request_ended("", "/v1/completions", 200)
    metrics.tokens("", 1, 1, 1)
    metrics.first_token(0.1)
    metrics.token_gap(0.1)
    metrics.request_seconds(0.1)
    return metrics


def test_names_follow_the_conventions() -> None:
    for each in DEFINITIONS:
        assert re.fullmatch(r"deepinfer_[a-z_]+", each.name)
        assert each.name.endswith("_total") == (each.kind == "counter")
        assert not re.search(r"_(ms|s|milliseconds|created|count|sum|bucket)$", each.name)
        assert each.help.endswith(".")
        assert (each.kind == "histogram") == bool(each.buckets)
        assert list(each.buckets) == sorted(set(each.buckets))
    assert len(KINDS) == len(DEFINITIONS)


def test_what_is_served_is_what_is_documented(tmp_path: Path) -> None:
    stats = dict.fromkeys(ENGINE, 1.0) | {"ended_eos": 1.0}
    read = families(everything_happened(tmp_path), stats)
    assert set(read) == set(KINDS)
    for name, family in read.items():
        assert family.type == KINDS[name].kind
        assert family.documentation == KINDS[name].help
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(KINDS[name].labels)


def test_two_gateways_in_one_process_count_apart_and_nothing_is_global() -> None:
    before = {each.name for each in REGISTRY.collect()}
    first, second = Metrics(Tenants.anonymous()), Metrics(Tenants.anonymous())
    first.request_ended("", "/v1/models", 200)
    assert value(
        families(first)["deepinfer_requests_total"], tenant="", endpoint="/v1/models", status="200"
    )
    assert not families(second)["deepinfer_requests_total"].samples
    assert {each.name for each in REGISTRY.collect()} == before


def test_requests_tokens_and_times_are_added_up() -> None:
    """USG: tokens by tenant."""
    metrics = Metrics(Tenants.anonymous())
    for status in (200, 200, 429):
        metrics.request_ended("acme", "/v1/completions", status)
    metrics.tokens("acme", 100, 60, 7)
    metrics.tokens("acme", 10, 0, 3)
    metrics.tokens("beta", 1, 0, 0)
    metrics.first_token(0.02)
    metrics.first_token(70.0)
    metrics.token_gap(0.0005)
    metrics.request_seconds(3.0)
    read = families(metrics)
    requests = read["deepinfer_requests_total"]
    assert value(requests, tenant="acme", endpoint="/v1/completions", status="200") == 2
    assert value(requests, tenant="acme", endpoint="/v1/completions", status="429") == 1
    assert value(read["deepinfer_prompt_tokens_total"], tenant="acme") == 110
    assert value(read["deepinfer_cached_prompt_tokens_total"], tenant="acme") == 60
    assert value(read["deepinfer_generated_tokens_total"], tenant="acme") == 10
    assert value(read["deepinfer_prompt_tokens_total"], tenant="beta") == 1
    first = {each.labels.get("le", each.name): each.value for each in _samples(read, "first_token")}
    assert (first["0.01"], first["0.025"], first["60.0"], first["120.0"]) == (0, 1, 1, 2)
    assert first["deepinfer_time_to_first_token_seconds_sum"] == pytest.approx(70.02)
    gaps = {each.labels.get("le", each.name): each.value for each in _samples(read, "inter_token")}
    assert gaps["0.001"] == gaps["+Inf"] == 1


def _samples(read: dict[str, Metric], part: str) -> list:
    [family] = [each for name, each in read.items() if part in name]
    return family.samples


async def test_gauges_and_rejections_are_those_of_the_tenants(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[tenants.acme]\nkeys = ["{digest_of("di-acme")}"]\nmax_concurrent = 1\nmax_queued = 2\n'
    )
    tenants = Tenants.from_file(path)
    acme = tenants.identify("Bearer di-acme")
    metrics = Metrics(tenants)
    running = await acme.enter()
    in_line = [asyncio.create_task(acme.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError):
        await acme.enter()
    read = families(metrics)
    assert value(read["deepinfer_open_requests"], tenant="acme") == 1
    assert value(read["deepinfer_waiting_requests"], tenant="acme") == 2
    rejected = read["deepinfer_rejected_requests_total"]
    assert value(rejected, tenant="acme", reason="max_concurrent") == 1
    assert value(rejected, tenant="acme", reason="requests_per_s") == 0
    acme.leave(running)
    for task in in_line:
        acme.leave(await task)
    read = families(metrics)
    assert value(read["deepinfer_open_requests"], tenant="acme") == 0
    assert value(read["deepinfer_waiting_requests"], tenant="acme") == 0


async def test_counters_only_grow_whoever_is_removed_or_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    acme = f'[tenants.acme]\nkeys = ["{digest_of("di-acme")}"]\nmax_concurrent = 1\n'
    other = "[tenants.other]\nkeys = []\n"
    path.write_text(acme + other)
    tenants = Tenants.from_file(path)
    metrics = Metrics(tenants)

    async def refuse_one() -> float:
        tenant = tenants.identify("Bearer di-acme")
        running = await tenant.enter()
        with pytest.raises(ApiError):
            await tenant.enter()
        tenant.leave(running)
        return refused()

    def refused() -> float:
        rejected = families(metrics)["deepinfer_rejected_requests_total"]
        return value(rejected, tenant="acme", reason="max_concurrent")

    def served(**tokens: float) -> float:
        metrics.served({name: {"served_tokens": count} for name, count in tokens.items()})
        return value(families(metrics)["deepinfer_served_tokens_total"], tenant="acme")

    assert await refuse_one() == 1
    assert served(acme=10, other=5) == 10
    path.write_text(other)
    assert tenants.reload_if_changed()
    assert refused() == 1 and served(acme=12) == 12
    path.write_text(acme + other + "# again\n")
    assert tenants.reload_if_changed()
    assert await refuse_one() == 2
    assert served() == 12
    assert served(acme=3, stranger=1) == 15, "the engine had forgotten it"
    told = families(metrics)["deepinfer_served_tokens_total"]
    assert {sample.labels["tenant"] for sample in told.samples} == {"acme", "other"}


def test_an_engine_that_does_not_answer_is_down_and_its_numbers_are_missing() -> None:
    read = families(Metrics(Tenants.anonymous()), None)
    assert value(read["deepinfer_engine_up"]) == 0
    assert [name for name in read if name.startswith("deepinfer_engine_")] == [
        "deepinfer_engine_up"
    ]


def test_a_newer_engines_numbers_break_nothing() -> None:
    read = families(Metrics(Tenants.anonymous()), {"running": 3, "moon_phase": 0.5})
    assert value(read["deepinfer_engine_running_requests"]) == 3
    assert value(read["deepinfer_engine_up"]) == 1
    assert not [name for name in read if "moon" in name]


async def test_metrics_can_be_read_in_a_thread_while_tenants_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    texts = [
        "".join(f"[tenants.t{number}]\nkeys = []\n" for number in range(count))
        for count in (150, 10)
    ]
    path.write_text(texts[0])
    tenants = Tenants.from_file(path)
    metrics = Metrics(tenants)

    def read_often() -> set[int]:
        counts = set()
        for _ in range(30):
            counts.add(len(families(metrics)["deepinfer_open_requests"].samples))
        return counts

    reading = asyncio.create_task(asyncio.to_thread(read_often))
    turn = 0
    while not reading.done():
        turn += 1
        path.write_text(texts[turn % 2])
        tenants.reload_if_changed()
        await asyncio.sleep(0)
    assert await reading <= {10, 150}


def test_every_ending_is_told_from_the_others() -> None:
    core = CoreDriver(EngineArgs(block_size=4, max_model_len=64), 24).core
    ended = families(Metrics(Tenants.anonymous()), core.stats())[
        "deepinfer_engine_requests_ended_total"
    ]
    assert {each.labels["ending"] for each in ended.samples} == {
        ending.name.lower() for ending in Ending
    }


@pytest.mark.process
async def test_every_number_of_a_running_engine_is_exposed(tmp_path: Path) -> None:
    folder = ScriptedFolder(tmp_path)
    metrics = Metrics(Tenants.anonymous())
    async with AsyncEngine(folder.args()) as engine:
        async for _ in engine.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=0.0)):
            pass
        stats = await engine.stats()
        read = families(metrics, stats)
    assert {name for name in stats if not name.startswith("ended_")} == set(ENGINE)
    assert value(read["deepinfer_engine_output_tokens_total"]) == 8
    assert value(read["deepinfer_engine_prompt_tokens_total"]) == 3
    assert value(read["deepinfer_engine_requests_ended_total"], ending="max_tokens") == 1
    assert value(read["deepinfer_engine_worker_busy_seconds_total"]) == stats["worker_busy_s"] > 0


# ---- the dashboard ----------------------------------------------------------------------------


def expressions() -> list[str]:
    board = json.loads((ROOT / "docs" / "grafana" / "deepinfer.json").read_text())
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [each.get("definition") for each in board["templating"]["list"]]
    return panels + [each for each in variables if each]


def test_the_dashboard_uses_metrics_and_labels_that_exist() -> None:
    used = set()
    for expression in expressions():
        names = re.findall(r"deepinfer_\w+", expression)
        assert names, expression
        labels = {"le"} if "_bucket" in expression else set()
        for name in names:
            metric = KINDS.get(name) or KINDS[re.sub(r"_(bucket|sum|count)$", "", name)]
            assert (metric.kind == "histogram") == (name != metric.name), expression
            # What only ever grows says nothing without its rate.
            grows = rf"(rate|increase)\({name}\b"
            assert metric.kind == "gauge" or re.search(grows, expression), expression
            labels |= set(metric.labels)
            used.add(metric.name)
        asked = re.findall(r"(\w+)=~?\"", expression)
        for group in re.findall(r"by \(([^)]*)\)", expression):
            asked += [label.strip() for label in group.split(",")]
        assert set(asked) <= labels, expression
    histograms = {each.name for each in DEFINITIONS if each.kind == "histogram"}
    assert histograms < used


def test_the_dashboards_panels_do_not_overlap() -> None:
    board = json.loads((ROOT / "docs" / "grafana" / "deepinfer.json").read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not own & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= own
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
