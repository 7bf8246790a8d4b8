"""deepinfer: an LLM inference engine to embed, to talk to, or to put behind a gateway.

The public names are imported on first use, so that ``import deepinfer`` costs a few milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.frontend.client import Client
    from deepinfer.frontend.engine import AsyncEngine
    from deepinfer.frontend.errors import EngineBusyError, EngineDownError, EngineError
    from deepinfer.frontend.llm import LLM
    from deepinfer.frontend.llm_engine import LLMEngine
    from deepinfer.frontend.outputs import Completion, RequestOutput
    from deepinfer.wire.config import EngineArgs
    from deepinfer.wire.params import SamplingParams

_HOME = {
    "AsyncEngine": "deepinfer.frontend.engine",
    "Client": "deepinfer.frontend.client",
    "Completion": "deepinfer.frontend.outputs",
    "EngineArgs": "deepinfer.wire.config",
    "EngineBusyError": "deepinfer.frontend.errors",
    "EngineDownError": "deepinfer.frontend.errors",
    "EngineError": "deepinfer.frontend.errors",
    "LLM": "deepinfer.frontend.llm",
    "LLMEngine": "deepinfer.frontend.llm_engine",
    "RequestOutput": "deepinfer.frontend.outputs",
    "SamplingParams": "deepinfer.wire.params",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "Client",
    "Completion",
    "EngineArgs",
    "EngineBusyError",
    "EngineDownError",
    "EngineError",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
