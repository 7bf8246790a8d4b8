"""Errors as clients of the HTTP interface see them: OpenAI's error objects and their status."""

from __future__ import annotations

import re

from deepinfer.frontend.errors import (
    EngineBusyError,
    EngineDownError,
    EngineError,
    PromptTooLongError,
)
from deepinfer.wire.params import SamplingParams

_FIELD = re.compile(r"[a-z_]+(?=[ :\[.])")
# What the messages of the engine's own checks begin with. Others, of a chat template for example,
# begin with any word.
_FIELDS = {
    *SamplingParams.__struct_fields__,
    *("messages", "priority", "prompt", "request_id", "top_logprobs"),
}


class ApiError(Exception):
    """What went wrong with a request: HTTP status, type, code and the parameter at fault.

    ``retry_after_s`` says when the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        if self.retry_after_s is None:
            return {}
        # Whole seconds, rounded up: whoever waits so long is not refused for the same reason.
        return {"retry-after": str(max(1, -int(-self.retry_after_s // 1)))}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return status 400; ``param`` is the field, by default the one the message begins with."""
    if param is None and (found := _FIELD.match(message)) and found[0] in _FIELDS:
        param = found[0]
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, code: str, param: str | None = None) -> ApiError:
    """Return status 404."""
    return ApiError(404, message, code=code, param=param)


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    """Return status 429: the same request may come again in so many seconds."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )


def unavailable(message: str, retry_after_s: float | None = None) -> ApiError:
    """Return status 503."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="engine_unavailable",
        retry_after_s=retry_after_s,
    )


def as_api_error(error: Exception) -> ApiError:
    """Return what a client is told about an error of the engine or of its input."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return bad_request(str(error), "prompt", "context_length_exceeded")
        case ValueError():
            return bad_request(str(error))
        case EngineBusyError(closing=False):
            return rate_limited(str(error), 1.0)
        case EngineBusyError():
            return unavailable(str(error), 1.0)
        case EngineDownError() | EngineError():
            return unavailable(str(error))
        case _:
            return ApiError(500, "internal error", kind="server_error", code="internal_error")
