"""Reading a request's outputs in tests, and what each whole stream must be."""

from __future__ import annotations

from typing import Any

from deepinfer import AsyncEngine, Client, RequestOutput


async def outputs(engine: AsyncEngine | Client, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    """All outputs of one request, held to what every stream promises (one sample)."""
    outs = [out async for out in engine.generate(*args, **kwargs)]
    check_stream(outs)
    return outs


async def token_ids(engine: AsyncEngine | Client, *args: Any, **kwargs: Any) -> list[int]:
    return tokens(await outputs(engine, *args, **kwargs))


def tokens(outs: list[RequestOutput]) -> list[int]:
    """The generated ids; an end without a new token repeats the last one and does not count."""
    return [out.token_id for i, out in enumerate(outs) if out.num_output_tokens == i + 1]


def text(outs: list[RequestOutput]) -> str:
    return "".join(out.text for out in outs)


def end(outs: list[RequestOutput]) -> tuple[str, str]:
    return outs[-1].finish_reason, outs[-1].finish_detail


def check_stream(outs: list[RequestOutput]) -> None:
    """Exactly one end, it comes last, and only it has a reason."""
    assert [out.finished for out in outs] == [False] * (len(outs) - 1) + [True]
    assert all(not out.finish_reason and not out.finish_detail for out in outs[:-1])
    assert outs[-1].finish_reason and outs[-1].finish_detail
    counts = [out.num_output_tokens for out in outs]
    assert counts[:-1] == list(range(1, len(outs)))
    assert counts[-1] in (len(outs) - 1, len(outs))
