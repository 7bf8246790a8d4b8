"""``deepinfer top``: a running engine in a terminal, drawn by rich."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepinfer.frontend.client import Client
from deepinfer.frontend.errors import EngineBusyError
from deepinfer.wire.messages import EngineInfo, EngineView, LiveRequest, StepTimes

_PLAIN_WIDTH = 110
_ENDED_ROWS = 4
_TENANT_ROWS = 6
_BLOCKS = " ▁▂▃▄▅▆▇█"
# Okabe and Ito's, told apart by people with any colour vision; each stands beside its name.
_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#8c6bb1", "#9a8f00")
_STAGES = {"waiting": "bright_black", "prefilling": "#e69f00", "running": "#56b4e9"}


def watch(engine: AbstractAsyncContextManager[Client], interval_s: float) -> None:
    """Draw an engine until ``q`` or Ctrl-C; ``EngineDownError`` when it is gone.

    ``ValueError`` when stdout is no terminal.
    """
    console = Console()
    if not console.is_terminal:
        raise ValueError("stdout is no terminal: use `deepinfer top --once`")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(engine, interval_s, console))


def look_once(engine: AbstractAsyncContextManager[Client], interval_s: float) -> None:
    """Print one frame as plain text; its rates are those of the next ``interval_s`` seconds."""

    async def look() -> RenderableType:
        async with engine as client:
            before = await client.view()
            await asyncio.sleep(interval_s)
            return frame(await client.view(), before, client.info, rows=1 << 16)

    console = Console(file=sys.stdout, width=_PLAIN_WIDTH, color_system=None, highlight=False)
    console.print(asyncio.run(look()))


async def _watch(
    engine: AbstractAsyncContextManager[Client], interval_s: float, console: Console
) -> None:
    left = asyncio.Event()
    # Not by a cancellation, which what is awaited just then may take for its own.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, left.set)
    async with engine as client:
        before = view = await client.view()
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys(left.set):
            while not left.is_set():
                live.update(frame(view, before, client.info, rows=console.height), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await left.wait()
                # While the engine is replaced, the last view stays.
                with contextlib.suppress(EngineBusyError):
                    before, view = view, await client.view()


@contextlib.contextmanager
def _keys(leave: Callable[[], None]) -> Iterator[None]:
    """Call ``leave`` when ``q`` is pressed; keys do not wait for Enter and are not shown."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        if sys.stdin.read(1) in ("q", "Q", ""):
            leave()

    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, read)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# ---- one frame ------------------------------------------------------------------------------


def frame(view: EngineView, before: EngineView, info: EngineInfo, rows: int) -> RenderableType:
    """Draw a view in at most ``rows`` lines; rates are from ``before`` to it."""
    seconds = (view.now_ns - before.now_ns) / 1e9
    rates = {user.user_id: 0.0 for user in view.users}
    if seconds > 0:
        had = {user.user_id: user.output_tokens for user in before.users}
        for user in view.users:
            grown = user.output_tokens - had.get(user.user_id, 0)
            rates[user.user_id] = max(0.0, grown / seconds)
    colours = {
        user: _COLOURS[number % len(_COLOURS)]
        for number, user in enumerate(sorted(user.user_id for user in view.users))
    }
    # A line each for head, gauges and borders, and what the tables below the requests take.
    used = 14 + min(len(view.users), _TENANT_ROWS) + min(len(view.ended), _ENDED_ROWS)
    return Group(
        _head(view, info),
        Panel(_gauges(view, info, sum(rates.values())), border_style="bright_black"),
        _steps(view.steps),
        _requests(view, colours, max(3, rows - used)),
        _tenants(view, rates, colours),
        _ended(view, colours),
    )


def _head(view: EngineView, info: EngineInfo) -> RenderableType:
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    uptime = duration(view.stats.get("uptime_s", 0) * 1e3)
    model = info.model.rstrip("/").rpartition("/")[2]
    facts = f"{clean(model)} · {info.device} · {info.dtype} · up {uptime}"
    if view.ok:
        health = Text("● healthy", "green")
    elif view.worker == "starting":
        health = Text("○ the device worker is loading", "yellow")
    else:
        health = Text(f"✕ {clean(view.cause) or view.worker}", "bold red")
    table.add_row(Text.assemble(("deepinfer  ", "bold"), (facts, "")), health)
    return table


def _gauges(view: EngineView, info: EngineInfo, rate: float) -> RenderableType:
    stats = view.stats
    used = view.blocks_total - view.blocks_free - view.blocks_cached
    steps = [step for step in view.steps if step.ended_ns][-40:]
    step = median((s.ended_ns - s.began_ns) / 1e6 for s in steps) if steps else None
    prompt = stats["prompt_tokens"]
    cells = [
        ("output", f"{rate:.1f} tok/s"),
        ("in slots", f"{stats['running']:.0f} of {info.max_num_seqs}"),
        ("waiting", f"{stats['waiting']:.0f}"),
        ("KV blocks", f"{used} of {view.blocks_total}"),
        ("step", "–" if step is None else duration(step)),
        ("from cache", f"{stats['cached_tokens'] / prompt:.0%}" if prompt else "–"),
        ("preemptions", f"{stats['preemptions']:.0f}"),
        ("restarts", f"{stats['worker_restarts']:.0f}"),
    ]
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in cells:
        table.add_column(ratio=1, no_wrap=True)
    table.add_row(*(Text(name, "bright_black") for name, _ in cells))
    table.add_row(*(Text(value, "bold") for _, value in cells))
    return table


def _steps(steps: list[StepTimes]) -> RenderableType:
    """A bar a step, as high as it took long; those with prefill have another colour."""
    done = [step for step in steps if step.ended_ns][-60:]
    if not done:
        return Text("steps        none yet", "bright_black")
    longest = max(step.ended_ns - step.began_ns for step in done)
    bars = Text("steps        ", "bright_black")
    for step in done:
        height = round((step.ended_ns - step.began_ns) / max(longest, 1) * (len(_BLOCKS) - 1))
        stage = "prefilling" if step.prefill_tokens else "running"
        bars.append(_BLOCKS[max(height, 1)], _STAGES[stage])
    planned = median((step.plan_ended_ns - step.plan_began_ns) / 1e6 for step in done)
    bars.append(
        f"  up to {duration(longest / 1e6)}, planned in {duration(planned)}", "bright_black"
    )
    return bars


def _requests(view: EngineView, colours: dict[str, str], rows: int) -> RenderableType:
    table = _table("REQUEST", "TENANT", "STATUS", "", ">TOKENS", ">BLOCKS", ">AGE")
    # What waits comes last in a view, and is seen too where there is room for few.
    waiting = [request for request in view.requests if request.status == "waiting"]
    computing = [request for request in view.requests if request.status != "waiting"]
    shown = computing[: max(rows - min(len(waiting), rows // 3), 0)]
    shown += waiting[: rows - len(shown)]
    for request in shown:
        done, whole = _progress(request)
        stage = _STAGES.get(request.status, "")
        marks = f" ⟲{request.preemptions}" if request.preemptions else ""
        table.add_row(
            _id(request.request_id, request.user_id),
            _tenant(request.user_id, colours),
            Text(request.status + marks, stage),
            ProgressBar(whole, min(done, whole), width=16, complete_style=stage, style="grey23"),
            f"{done:,} / {whole:,}",
            f"{request.blocks:,}",
            duration(request.age_ms),
        )
    if not view.requests:
        table.add_row(Text("none", "bright_black"))
    hidden = view.left_out + len(view.requests) - len(shown)
    if hidden:
        table.add_row(Text(f"and {hidden:,} more", "bright_black"))
    return table


def _progress(request: LiveRequest) -> tuple[int, int]:
    if request.status == "running":
        return request.output_tokens, max(request.max_tokens, 1)
    return request.computed_tokens, max(request.prompt_tokens + request.output_tokens, 1)


def _tenants(view: EngineView, rates: dict[str, float], colours: dict[str, str]) -> RenderableType:
    table = _table("TENANT", ">TOK/S", "SHARE", ">RUNNING", ">PREFILL", ">WAITING", ">BLOCKS")
    total = sum(rates.values())
    users = sorted(view.users, key=lambda user: (-rates[user.user_id], user.user_id))
    for user in users[:_TENANT_ROWS]:
        rate = rates[user.user_id]
        table.add_row(
            _tenant(user.user_id, colours),
            f"{rate:.1f}",
            Text.assemble(
                ("█" * round(rate / total * 16) if total else "", colours[user.user_id]),
                f" {rate / total:.0%}" if total else "–",
            ),
            *(f"{n:,}" for n in (user.running, user.prefilling, user.waiting, user.blocks)),
        )
    return table


def _ended(view: EngineView, colours: dict[str, str]) -> RenderableType:
    table = _table("ENDED", "TENANT", "REASON", "DETAIL", ">TOKENS", ">TOOK", ">AGO")
    for end in reversed(view.ended[-_ENDED_ROWS:]):
        style = {"stop": "green", "length": "cyan", "abort": "yellow"}.get(end.reason, "red")
        table.add_row(
            _id(end.request_id, end.user_id),
            _tenant(end.user_id, colours),
            Text(end.reason, style),
            clean(end.detail),
            f"{end.output_tokens:,}",
            duration(end.total_ms),
            duration(end.ago_ms),
        )
    return table


def _table(*names: str) -> Table:
    """A table without lines; names that begin with > are of numbers, the first takes the room."""
    table = Table(box=None, expand=True, header_style="bright_black", pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if number == 0 else None,
            max_width=None if number == 0 else 24,
        )
    return table


def _id(request_id: str, user_id: str) -> Text:
    return Text(clean(request_id.removeprefix(f"{user_id}/")), overflow="ellipsis", no_wrap=True)


def _tenant(user_id: str, colours: dict[str, str]) -> Text:
    return Text.assemble(("■ ", colours.get(user_id, "")), clean(user_id) or "anonymous")


def clean(text: str) -> str:
    """Return what a client named in a form that a terminal only prints, whatever it holds."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def duration(ms: float) -> str:
    """Return a time for people: 0.42 ms, 310 ms, 3.2 s, 4 min 3 s, 2 h 5 min."""
    if ms < 1000:
        return f"{ms:.2f} ms" if ms < 10 else f"{ms:.0f} ms"
    seconds = ms / 1e3
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
