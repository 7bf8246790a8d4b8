"""The OpenAPI 3.1 document of the HTTP interface, made from the structs that requests become."""

from __future__ import annotations

from typing import Any

import msgspec

from deepinfer.frontend.gateway.openai_requests import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deepinfer.wire.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS,
)

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _number(low: float, high: float | None = None) -> Json:
    return {"type": "number", "minimum": low} | ({} if high is None else {"maximum": high})


def _integer(low: int, high: int) -> Json:
    return {"type": "integer", "minimum": low, "maximum": high}


# The ranges that ``SamplingParams`` checks, and what a prompt may be.
_RANGES: dict[str, Json] = {
    "max_tokens": _integer(1, MAX_TOKENS),
    "max_completion_tokens": _integer(1, MAX_TOKENS),
    "min_tokens": _integer(0, MAX_TOKENS),
    "temperature": _number(0),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _integer(-1, (1 << 31) - 1),
    "min_p": _number(0, 1),
    "n": _integer(1, MAX_N),
    "seed": _integer(-(1 << 63), (1 << 64) - 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "top_logprobs": _integer(0, MAX_LOGPROBS),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]},
    "stop_token_ids": {**_TOKENS, "maxItems": MAX_STOP_TOKEN_IDS},
    "allowed_token_ids": {**_TOKENS, "minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS},
    "bad_words": {"type": "array", "items": _STOP, "maxItems": MAX_BAD_WORDS},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": _number(-100, 100),
        "maxProperties": MAX_LOGIT_BIAS,
    },
}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {**_TOKENS, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
        {
            "type": "array",
            "items": {**_TOKENS, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_IMAGE_PART = {
    "type": "object",
    "description": "For a model that takes images. A data: URL, or an http(s): URL where the "
    "engine fetches them (image_urls).",
    "required": ["type", "image_url"],
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "required": ["url"],
            "properties": {"url": {"type": "string"}, "detail": {"type": "string"}},
        },
    },
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]},
                    },
                    {"type": "null"},
                ]
            },
        },
    },
}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


_TEXT, _COUNT, _BOOL = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
_LOGPROB = {"type": "number", "minimum": -9999, "maximum": 0}
_TOKEN = _object(token=_TEXT, logprob=_LOGPROB, bytes=_array(_integer(0, 255)))
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_END = {
    "finish_reason": {"enum": ["stop", "length"]},
    "stop_reason": {"type": ["string", "integer", "null"]},
}
_MODEL = _object(
    id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT
)


def _answer(kind: str, choice: Json) -> Json:
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices=_array(choice),
        usage=_USAGE,
    )


_ANSWERS: dict[str, Json] = {
    "Error": _object(
        error=_object(
            message=_TEXT,
            type=_TEXT,
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        )
    ),
    "Completion": _answer(
        "text_completion",
        _object(
            index=_COUNT,
            text=_TEXT,
            logprobs=_nullable(
                _object(
                    tokens=_array(_TEXT),
                    token_logprobs=_array(_nullable(_LOGPROB)),
                    top_logprobs=_array(
                        _nullable({"type": "object", "additionalProperties": _LOGPROB})
                    ),
                    text_offset=_array(_COUNT),
                )
            ),
            **_END,
        ),
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        _object(
            index=_COUNT,
            message=_object(
                role={"const": "assistant"}, content=_TEXT, refusal={"type": "null"}
            ),
            logprobs=_nullable(
                _object(
                    content=_array(
                        {**_TOKEN, "properties": {
                            **_TOKEN["properties"], "top_logprobs": _array(_TOKEN)
                        }}
                    )
                )
            ),
            **_END,
        ),
    ),
    "Tokens": _object(tokens=_TOKENS, count=_COUNT, max_model_len=_COUNT),
    "Text": _object(prompt=_TEXT),
    "Model": _MODEL,
    "Models": _object(object={"const": "list"}, data=_array({"$ref": _REF.format(name="Model")})),
    "Health": _object(ok=_BOOL, down=_BOOL, cause=_TEXT),
    "Story": _object(
        id=_TEXT,
        object={"const": "request.story"},
        events=_array(_object(at_ms={"type": "number"}, event=_TEXT, detail={"type": "object"})),
    ),
}  # fmt: skip

_STREAM = (
    "With `stream: true` the answer is `text/event-stream`: each event is `data: ` and a chunk "
    "object, the last one is `data: [DONE]`. A line that begins with a colon is a comment. An "
    "error after the first event is an event with an `error` object, and then nothing follows."
)
_ERRORS = {
    "400": "A parameter is wrong; `param` names it.",
    "401": "The API key is missing or unknown.",
    "404": "There is no such model, request or path.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not `application/json`.",
    "429": "Too much at once; `retry-after` says when to come again.",
    "500": "The request failed in the engine.",
    "503": "The engine is not there, or about to stop.",
    "504": "The request's deadline passed.",
}


def document(version: str) -> Json:
    """Return the document; ``version`` is the program's."""
    kinds = [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for schema in components.values():
        for name, field in schema["properties"].items():
            if name in _RANGES:
                schema["properties"][name] = {"default": None, **_nullable(_RANGES[name])}
            elif name == "messages":
                optional = "messages" not in schema.get("required", [])
                field.clear()
                field.update(_nullable(_MESSAGES) if optional else _MESSAGES)
    completion = components["CompletionRequest"]["properties"]
    completion["prompt"] = _PROMPT
    completion["logprobs"] = {"default": None, **_nullable(_integer(0, MAX_LOGPROBS))}
    components["DetokenizeRequest"]["properties"]["tokens"] = {**_TOKENS, "minItems": 1}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "deepinfer",
            "version": version,
            "description": "The OpenAI API of one engine. docs/gateway.md says more.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": _post("CompletionRequest", "Completion", streams=True),
            "/v1/chat/completions": _post("ChatRequest", "ChatCompletion", streams=True),
            "/tokenize": _post("TokenizeRequest", "Tokens"),
            "/detokenize": _post("DetokenizeRequest", "Text"),
            "/v1/models": _get("Models"),
            "/v1/models/{model}": _get("Model", "model"),
            "/v1/requests/{request_id}/story": _get("Story", "request_id"),
            "/health": _get("Health", unhealthy=True),
        },
        "components": {
            "schemas": {**components, **_ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


def _responses(name: str, *, streams: bool = False) -> Json:
    good: Json = {"description": "The answer.", "content": _content(name)}
    if streams:
        good["content"]["text/event-stream"] = {"schema": _object(data=_TEXT)}
    errors = {
        status: {"description": text, "content": _content("Error")}
        for status, text in _ERRORS.items()
    }
    return {"200": good, **errors}


def _post(request: str, answer: str, *, streams: bool = False) -> Json:
    operation: Json = {
        "operationId": f"create{answer}",
        "requestBody": {"required": True, "content": _content(request)},
        "responses": _responses(answer, streams=streams),
    }
    if streams:
        operation["description"] = _STREAM
    return {"post": operation}


def _get(answer: str, parameter: str | None = None, *, unhealthy: bool = False) -> Json:
    operation: Json = {"operationId": f"get{answer}", "responses": _responses(answer)}
    if unhealthy:
        operation["security"] = []
        operation["responses"]["503"] = {
            "description": "The engine makes no progress; `cause` says why.",
            "content": _content("Health"),
        }
    if parameter is not None:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return {"get": operation}
