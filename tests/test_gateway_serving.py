"""Keys, limits, usage, metrics, stories and spans of a whole ``deepinfer serve``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from deepinfer import AsyncEngine
from deepinfer.frontend.gateway.tenants import Tenants, new_key
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.served import MODEL, Served, events, eventually, in_process, post, served

pytestmark = pytest.mark.process

KEYS = {name: new_key() for name in ("alice", "bob", "root")}


def tenants_file(path: Path, **lines: str) -> Path:
    tables = [
        f'[tenants.{name}]\nkeys = ["{digest}"]\n{lines.get(name, "")}\n'
        for name, (_, digest) in KEYS.items()
    ]
    path.write_text("\n".join(tables))
    return path


def as_tenant(server: Served, name: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {KEYS[name][0]}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S)


def complete(server: Served, name: str, **body: Any) -> httpx.Response:
    with as_tenant(server, name) as http:
        headers = body.pop("headers", None)
        return http.post(
            "/v1/completions",
            json={"prompt": "the quick", "temperature": 0, **body},
            headers=headers,
        )


def usage_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples(server: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with as_tenant(server, "root") as http:
        text = http.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    folder = ScriptedFolder(tmp_path_factory.mktemp("model"))
    tenants = tenants_file(
        folder.path / "tenants.toml",
        alice="max_concurrent = 1\nmax_queued = 1\nmax_tokens = 900\npriority = [0, 5]",
        root="operator = true",
    )
    ledger = folder.path / "usage.jsonl"
    with served(folder, "--tenants", str(tenants), "--usage-ledger", str(ledger)) as server:
        yield server


def test_only_who_has_a_key_is_served(server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        for path in ("/v1/models", "/metrics", "/v1/requests/x/story"):
            assert http.get(path).status_code == 401
        assert http.get("/health").status_code == 200
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="di-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as error,
    ):
        client.models.list()
    assert error.value.code == "invalid_api_key"


def test_operators_see_what_concerns_all_and_others_do_not(server) -> None:
    for name, status in (("bob", 403), ("root", 200)):
        with as_tenant(server, name) as http:
            assert http.get("/metrics").status_code == status


def test_a_story_is_its_tenants_own(server) -> None:
    done = complete(server, "bob", max_tokens=3)
    request_id = done.json()["id"]
    with as_tenant(server, "bob") as http:
        story = http.get(f"/v1/requests/{request_id}/story").json()
    told = [event["event"] for event in story["events"]]
    assert told[0] == "arrived" and told[-1] == "ended"
    with as_tenant(server, "alice") as http:
        assert http.get(f"/v1/requests/{request_id}/story").status_code == 404


async def test_a_story_names_no_other_tenant(tmp_path) -> None:
    """SEC-01: who passed a request over, or took its slot, is named to operators only."""
    folder = ScriptedFolder(tmp_path / "m")
    tenants = Tenants.from_file(tenants_file(tmp_path / "tenants.toml", root="operator = true"))
    args = folder.args(policy="fair", max_num_seqs=2, stop_preempted_request=False)
    async with AsyncEngine(args) as engine, in_process(engine, tenants) as url:
        own, other, operator = (
            httpx.AsyncClient(
                base_url=url,
                timeout=PATIENCE_S,
                headers={"authorization": f"Bearer {KEYS[name][0]}"},
            )
            for name in ("alice", "bob", "root")
        )

        async def ask(http: httpx.AsyncClient, request_id: str, length: int) -> None:
            body = {"prompt": [length, 7], "max_tokens": length, "ignore_eos": True}
            headers = {"x-request-id": request_id}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text

        async def told(http: httpx.AsyncClient, path: str) -> tuple[str, dict[str, Any]]:
            answer = await http.get(path)
            events = answer.json()["events"]
            return answer.text, {event["event"]: event["detail"] for event in events}

        async def are(name: str, count: int) -> bool:
            return (await engine.stats())[name] == count

        async with own, other, operator:
            with folder.held(after=1):
                asked = [asyncio.ensure_future(ask(own, "first", 60))]
                await eventually(lambda: are("output_tokens", 1))
                asked += [asyncio.ensure_future(ask(own, f"more{n}", 60)) for n in range(3)]
                await eventually(lambda: are("accepted", 4))
                asked.append(asyncio.ensure_future(ask(other, "secret", 5)))
                await eventually(lambda: are("accepted", 5))
            await asyncio.gather(*asked)
            seen = set()
            for name in ("first", "more0", "more1", "more2"):
                text, mine = await told(own, f"/v1/requests/cmpl-{name}/story")
                assert "bob" not in text and "secret" not in text
                engine_id = f"alice%2Fcmpl-{name}"
                _, whole = await told(operator, f"/v1/engine/requests/{engine_id}/story")
                for event, detail in whole.items():
                    if "by_user" in detail:
                        seen.add(event)
                        assert (detail["by"], detail["by_user"]) == ("bob/cmpl-secret", "bob")
                        assert mine[event]["by"] == "another tenant's request"
                        assert mine[event]["why"] == detail["why"]
                        assert not any(name.startswith("by_") for name in mine[event])
                    else:
                        assert mine[event] == detail
            assert seen, "nobody made way for the other tenant"


def test_one_id_of_two_tenants_is_two_requests(server) -> None:
    """ID-01."""
    headers = {"x-request-id": "same"}
    one = {"prompt": "the quick", "max_tokens": 2, "temperature": 0, "stream": True}
    with as_tenant(server, "bob") as bob, ThreadPoolExecutor() as pool, ExitStack() as hold:
        hold.enter_context(server.folder.held(after=1))
        with bob.stream("POST", "/v1/completions", json=one, headers=headers) as first:
            lines = first.iter_lines()
            assert next(lines).startswith("data: ")
            # Its own second request under that id is refused, another tenant's is not.
            again = complete(server, "bob", max_tokens=2, headers=headers)
            assert again.status_code == 400 and "in use" in again.json()["error"]["message"]
            other = pool.submit(complete, server, "root", max_tokens=2, headers=headers)
            hold.close()
            assert "data: [DONE]" in lines
        assert other.result().status_code == 200


def test_limits_of_a_tenant(server) -> None:
    over = complete(server, "alice", max_tokens=901)
    assert (over.status_code, over.json()["error"]["param"]) == (400, "max_tokens")
    rank = complete(server, "alice", max_tokens=1, priority=-1)
    assert (rank.status_code, rank.json()["error"]["param"]) == (400, "priority")

    before = samples(server)
    with ThreadPoolExecutor() as pool:
        with server.folder.held():
            calls = [pool.submit(complete, server, "alice", max_tokens=2) for _ in range(3)]
            # One runs, one waits in the gateway, and the third is turned away at once.
            refused = next(iter(_done_first(calls)))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            # Another tenant's limit is its own.
            free = pool.submit(complete, server, "bob", max_tokens=2)
        statuses = sorted(call.result().status_code for call in calls)
        assert statuses == [200, 200, 429]
        assert free.result().status_code == 200
    key = (
        "deepinfer_rejected_requests_total",
        frozenset({("tenant", "alice"), ("reason", "max_concurrent")}),
    )
    assert samples(server)[key] == before[key] + 1


def _done_first(calls: list[Any]) -> Iterator[httpx.Response]:
    from concurrent.futures import FIRST_COMPLETED, wait

    done, _ = wait(calls, PATIENCE_S, FIRST_COMPLETED)
    return (call.result() for call in done)


def test_usage_is_written_for_each_end_and_counted(server) -> None:
    """USG-01: the ledger, the answer and the metrics agree."""
    path = server.folder.path / "usage.jsonl"
    labels = frozenset({("tenant", "bob")})
    before = samples(server)
    start = len(usage_lines(path))
    whole = complete(server, "bob", max_tokens=5, n=2).json()
    streamed = complete(
        server, "bob", max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    usages = [whole["usage"], events(streamed.text)[-2]["usage"]]
    lines = usage_lines(path)[start:]
    assert [line["tenant"] for line in lines] == ["bob", "bob"]
    for line, usage in zip(lines, usages, strict=True):
        for name in ("prompt_tokens", "completion_tokens"):
            assert line[name] == usage[name]
        assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert (line["finish_reason"], line["finish_detail"]) == ("length", "max_tokens")
        assert line["endpoint"] == "/v1/completions" and line["model"] == MODEL
    assert lines[0]["request_id"] == whole["id"]
    after = samples(server)
    for name, field in (
        ("deepinfer_prompt_tokens_total", "prompt_tokens"),
        ("deepinfer_generated_tokens_total", "completion_tokens"),
    ):
        grown = after[name, labels] - before.get((name, labels), 0.0)
        assert grown == sum(usage[field] for usage in usages)


def test_a_client_that_leaves_is_charged_for_what_ran(server) -> None:
    path = server.folder.path / "usage.jsonl"
    start = len(usage_lines(path))
    body = {"prompt": "the quick", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.folder.held(after=3), as_tenant(server, "bob") as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line)
            while len(json.loads(next(lines).removeprefix("data: "))["choices"]) == 0:
                pass
        while len(lines := usage_lines(path)) == start:
            http.get("/health")
    (line,) = lines[start:]
    assert (line["finish_reason"], line["finish_detail"]) == ("abort", "disconnect")
    assert 1 <= line["completion_tokens"] <= 3
    assert line["prompt_tokens"] > 0


def test_the_ledger_outlives_a_killed_server(tmp_path) -> None:
    folder = ScriptedFolder(tmp_path / "m")
    ledger = tmp_path / "usage.jsonl"
    with served(folder, "--usage-ledger", str(ledger)) as server:
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        ids = [post(server, "/v1/completions", **body).json()["id"] for _ in range(20)]
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert [line["request_id"] for line in usage_lines(ledger)] == ids


def test_keys_are_read_again_when_the_file_changes(tmp_path) -> None:
    folder = ScriptedFolder(tmp_path / "m")
    path = tenants_file(tmp_path / "t.toml")
    key, digest = new_key()
    with served(folder, "--tenants", str(path)) as server:
        assert complete(server, "alice", max_tokens=1).status_code == 200
        new = tmp_path / "new"
        new.write_text(f'[tenants.carol]\nkeys = ["{digest}"]\n')
        os.replace(new, path)
        while complete(server, "alice", max_tokens=1).status_code != 401:
            pass
        headers = {"authorization": f"Bearer {key}"}
        models = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S)
        assert models.status_code == 200


class _Collector(BaseHTTPRequestHandler):
    """An OpenTelemetry collector as far as spans need one: OTLP over HTTP, protobuf."""

    spans: list[Any] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def test_spans_reach_a_collector(tmp_path, monkeypatch) -> None:
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}"
    )
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    try:
        with served(ScriptedFolder(tmp_path)) as server:
            done = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
                headers={"traceparent": f"00-{trace_id}-{parent_id}-01"},
                timeout=PATIENCE_S,
            ).json()
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    (span,) = _Collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent_id)
    assert span.name == f"chat {MODEL}"
    values = {each.key: each.value for each in span.attributes}
    assert values["gen_ai.response.id"].string_value == done["id"]
    assert values["gen_ai.usage.output_tokens"].int_value == done["usage"]["completion_tokens"]
    assert values["http.response.status_code"].int_value == 200
    names = [event.name for event in span.events]
    assert names[0] == "arrived" and names[-1] == "ended"
    assert span.start_time_unix_nano < span.end_time_unix_nano
