"""The OpenAPI document says what the server does: schemathesis makes requests out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as _  # noqa: F401 (registers them)

from deepinfer.frontend.gateway.openai_requests import ChatRequest, CompletionRequest
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.served import MODEL, Served, served

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    # A short context: n may be 128, and max_tokens anything.
    folder = ScriptedFolder(tmp_path_factory.mktemp("model"), max_model_len=48)
    with served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Served) -> dict[str, Any]:
    return httpx.get(server.url + "/openapi.json", timeout=PATIENCE_S).json()


@pytest.fixture(scope="module")
def api_schema(server: Served, document: dict[str, Any]) -> Any:
    # A random name is refused with 404, and nothing behind it would be reached.
    for kind in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"):
        document["components"]["schemas"][kind]["properties"]["model"] = {"enum": [MODEL, None]}
    loaded = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=server.url)
    return loaded


OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/requests/{request_id}/story"),
    ("GET", "/health"),
]
CHECKS = checks.CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    ]
)


@pytest.mark.parametrize(
    ("mode", "method", "path"),
    [(GenerationMode.POSITIVE, *operation) for operation in OPERATIONS]
    # No string is wrong as a part of a path.
    + [(GenerationMode.NEGATIVE, *operation) for operation in OPERATIONS[:4]],
)
def test_whatever_is_sent_the_answer_is_as_described(api_schema, mode, method, path) -> None:
    """No 5xx, statuses and bodies as the document says, and what it forbids is refused."""
    operation = api_schema[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    def holds(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)

    holds()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_a_stream_is_as_described(api_schema, path, body) -> None:
    case = api_schema[path]["POST"].Case(
        body={"model": MODEL, "stream": True, "max_tokens": 4, **body},
        media_type="application/json",
    )
    answer = case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)
    assert "text/event-stream" in answer.headers["content-type"][0]


def test_the_document_has_every_parameter(document) -> None:
    schemas = document["components"]["schemas"]
    for kind in (CompletionRequest, ChatRequest):
        described = schemas[kind.__name__]
        assert described["properties"].keys() == set(kind.__struct_fields__)
        assert described["additionalProperties"] is False


def test_the_document_has_every_path(document, server) -> None:
    described = [(method.upper(), path) for path, found in document["paths"].items()
                 for method in found]  # fmt: skip
    assert described == OPERATIONS
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        for method, path in OPERATIONS:
            url = path.replace("{model}", MODEL).replace("{request_id}", "none")
            assert http.request(method, url).status_code in (200, 404, 415), path
            if "{" not in path:
                other = "POST" if method == "GET" else "GET"
                assert http.request(other, url).status_code == 405
