"""``/dashboard``: a page that shows the engine at work, and the JSON that it asks for.

The page is three files that lie beside this one. It needs nothing from elsewhere, and its policy
lets it load nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deepinfer.wire.messages import EngineInfo, EngineView, Part

_FILES = {
    "/dashboard": ("dashboard.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the files of a new version belong together
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files. They hold no data, so they ask for no key."""
    folder = files("deepinfer.frontend.gateway")
    return [
        _file_route(path, (folder / name).read_bytes(), kind)
        for path, (name, kind) in _FILES.items()
    ]


def _file_route(path: str, content: bytes, kind: str) -> Route:
    async def serve(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return Route(path, serve, methods=["GET"])


def view_body(info: EngineInfo, models: Sequence[str], view: EngineView) -> dict[str, Any]:
    """Return the JSON object of a view: its fields by name, and which engine it is of."""
    engine = {
        name: getattr(info, name)
        for name in ("architecture", "device", "dtype", "max_model_len", "block_size")
        + ("max_num_seqs", "max_num_batched_tokens", "vocab_size")
    }
    return {"object": "engine.view", "models": list(models), "engine": engine, **_named(view)}


def _named(part: Part) -> dict[str, Any]:
    """On the wire a part is an array; here its fields have their names."""
    return {
        name: [_named(item) for item in value] if isinstance(value, list) else value
        for name, value in msgspec.structs.asdict(part).items()
    }
