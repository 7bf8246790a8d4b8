"""Two tenants on one engine: A floods it with long requests, B sends a short one every second.

    python benchmarks/fairness.py [--runs alone,fcfs,fair,1:1,3:1] [--seconds 30] [--svg FILE]
        [--results FILE] [--model smollm2-135m]

Real processes: an ``AsyncEngine`` for A and a ``Client`` of it for B. Each run has an engine of its
own; its first ``--warm`` seconds under A's flood are not counted. They are to be long enough for
the first prompts to be computed, and for B to make up for the slots that A took before it came:
that is up to ``--slots`` whole requests, which a shorter run would show as a share that is off.

- ``alone``, ``fcfs``, ``fair``: B's time to the first token when it has the engine to itself, and
  beside A's ``--flood`` requests under either policy. A request that got no token until the end of
  its run counts with the time it had waited by then: the table says how many there were.
  B's outputs are short, so that its requests end before the next one comes: more than its share of
  the slots at once would make it a flood of its own.
- ``1:1``, ``3:1``: both tenants flood the engine, with these weights, A with prompts that are eight
  and outputs that are four times shorter than above, B with short prompts and long outputs. The
  shares are those of the tokens that were served, prompt and output, while both had some waiting.

``idle`` is the part of the time in which the device worker had no step although requests waited;
``step`` is how long a step took on average. ``--results`` keeps the runs of several calls in one
file of JSON lines, and table and plot are made of all in it. ``--model scripted`` measures the
engine around an instant model whose steps last ``--step-ms`` (it needs ``PYTHONPATH=tests``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepinfer import AsyncEngine, Client, EngineArgs, SamplingParams

Run = dict[str, Any]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100, 200) for _ in range(length)]


async def stream(source: AsyncEngine | Client, length: int, out: int, **who: Any) -> float:
    """Stream a request to its end; return the seconds to its first token."""
    rng = random.Random(time.perf_counter_ns())
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
    started, first = time.perf_counter(), 0.0
    async for output in source.generate(prompt(rng, length), params, **who):
        if output.num_output_tokens == 1:
            first = time.perf_counter() - started
    return first


async def served(engine: AsyncEngine, started: float, names: tuple[str, ...]) -> list[float]:
    """Return the seconds since the start and the tokens served to each tenant."""
    told = await engine.tenants()
    return [time.perf_counter() - started, *(told[n]["served_tokens"] for n in names)]


async def latency(engine: AsyncEngine, b: Client, options: argparse.Namespace) -> Run:
    """B sends a short request every second; return its times to first token, by second."""
    waits: list[tuple[float, float, bool]] = []
    started = time.perf_counter()

    async def one(at: float) -> None:
        begun, told = time.perf_counter(), False
        try:
            wait = await stream(b, options.b_prompt, options.b_output, user_id="b")
            told = True
        except asyncio.CancelledError:
            wait = time.perf_counter() - begun
        waits.append((at, wait, told))

    tasks = []
    for second in range(options.seconds):
        await asyncio.sleep(started + second - time.perf_counter())
        tasks.append(asyncio.create_task(one(time.perf_counter() - started)))
    await asyncio.wait(tasks, timeout=2.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks)
    return {"waits": sorted(waits)}


async def shares(engine: AsyncEngine, options: argparse.Namespace) -> Run:
    """Both flood; return what was served to each, once a second while both have some waiting."""
    started, curve = time.perf_counter(), []
    while time.perf_counter() < started + options.seconds:
        told = await engine.tenants()
        if not (told["a"]["waiting"] and told["b"]["waiting"]):
            break
        curve.append(await served(engine, started, ("a", "b")))
        await asyncio.sleep(1.0)
    return {"curve": curve}


async def run(kind: str, options: argparse.Namespace) -> Run:
    """Start an engine, let A flood it, and measure."""
    with args_of("fcfs" if kind in ("alone", "fcfs") else "fair", options) as args:
        async with AsyncEngine(args) as engine, Client(str(args.endpoint)) as b:
            assert args.endpoint is not None
            weights = [float(w) for w in kind.split(":")] if ":" in kind else [1.0, 1.0]
            await stream(b, options.b_prompt, 4, user_id="b")
            await stream(engine, options.a_prompt, 4, user_id="a")
            flood = []
            if kind != "alone":
                floods = [("a", weights[0], options.a_prompt, options.a_output)]
                if ":" in kind:
                    floods = [
                        ("a", weights[0], options.a_prompt // 8, options.a_output // 4),
                        ("b", weights[1], options.b_prompt, options.b_output * 32),
                    ]
                for name, weight, length, out in floods:
                    source = b if name == "b" else engine
                    flood += [
                        asyncio.create_task(
                            stream(source, length, out, user_id=name, weight=weight)
                        )
                        for _ in range(options.flood)
                    ]
                await asyncio.sleep(options.warm)
            before, began = await engine.stats(), time.perf_counter()
            found = await (shares(engine, options) if ":" in kind else latency(engine, b, options))
            after, took_s = await engine.stats(), time.perf_counter() - began
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
    gained = {name: after[name] - before[name] for name in before}
    busy, idle = gained["worker_busy_s"], gained["worker_idle_s"]
    return found | {
        "run": kind,
        "model": options.model,
        "weights": weights,
        "tokens_s": (gained["computed_tokens"] + gained["output_tokens"]) / took_s,
        "step_ms": 1e3 * busy / max(gained["steps_done"], 1),
        "idle": idle / max(busy + idle, 1e-9),
        "waiting": after["waiting"],
        "preemptions": gained["preemptions"],
        "computed": gained["computed_tokens"],
        "recomputed": gained["recomputed_tokens"],
        "output_tokens": gained["output_tokens"],
    }


@contextlib.contextmanager
def args_of(policy: str, options: argparse.Namespace) -> Iterator[EngineArgs]:
    """Yield the arguments of an engine that clients can connect to."""
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {
            "policy": policy,
            "endpoint": f"ipc://{folder}/engine",
            "max_num_seqs": options.slots,
            "max_num_batched_tokens": options.budget,
            "max_step_ms": options.max_step_ms,
            "max_model_len": options.a_prompt + options.a_output + 64,
            "num_kv_blocks": options.blocks,
            "stop_preempted_request": False,
        }
        if options.model != "scripted":
            yield EngineArgs(model=options.model, **fields)
            return
        from support.scripted_engine import ScriptedFolder

        limit = fields["max_model_len"]
        scripted = ScriptedFolder(
            Path(folder) / "model", step_ms=options.step_ms, max_model_len=limit
        )
        yield scripted.args(**fields)


# ---- what is shown ------------------------------------------------------------------------------


def percentile(values: list[float], part: float) -> float:
    """Return the smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def table(runs: list[Run]) -> str:
    """Return what was measured, as text."""
    lines = []
    waits = {r["run"]: r for r in runs if "waits" in r}
    if waits:
        lines.append(
            f"{'run':8}{'requests':>9}{'no token':>9}{'p50 ms':>9}{'p95 ms':>9}{'step ms':>9}"
            f"{'tokens/s':>10}{'idle':>8}{'recomputed':>12}"
        )
    for kind, r in waits.items():
        times = [1e3 * wait for _, wait, _ in r["waits"]]
        silent = sum(not told for *_, told in r["waits"])
        lines.append(
            f"{kind:8}{len(times):9}{silent:9}{statistics.median(times):9.0f}"
            f"{percentile(times, 0.95):9.0f}{r['step_ms']:9.1f}"
            f"{r['tokens_s']:10.0f}{r['idle']:8.1%}"
            f"{r['recomputed'] / max(r['computed'], 1):12.1%}"
        )
    if {"alone", "fair"} <= waits.keys():
        alone, fair = (
            percentile([1e3 * wait for _, wait, _ in waits[kind]["waits"]], 0.95)
            for kind in ("alone", "fair")
        )
        lines.append(f"B's p95 beside A: {fair / alone:.2f} times that alone")
    both = {r["run"]: r for r in runs if "curve" in r}
    if both:
        lines.append("")
        lines.append(
            f"{'weights':8}{'A tokens':>10}{'B tokens':>10}{'A share':>9}{'weight':>8}"
            f"{'off by':>8}{'seconds':>9}{'idle':>8}{'recomputed':>12}"
        )
    for kind, r in both.items():
        first, last = r["curve"][0], r["curve"][-1]
        a, b = last[1] - first[1], last[2] - first[2]
        part = r["weights"][0] / sum(r["weights"])
        off = max(abs(a / (a + b) / part - 1), abs(b / (a + b) / (1 - part) - 1))
        lines.append(
            f"{kind:8}{a:10}{b:10}{a / (a + b):9.1%}{part:8.1%}{off:8.1%}{last[0] - first[0]:9.0f}"
            f"{r['idle']:8.1%}{r['recomputed'] / max(r['computed'], 1):12.1%}"
        )
    return "\n".join(lines)


COLOURS = {"alone": "#2a9d5c", "fcfs": "#c0392b", "fair": "#2c5fb3", "a": "#c0392b", "b": "#2c5fb3"}


def svg(runs: list[Run]) -> str:
    """Return a plot: B's waits by second on a logarithmic axis, and what two floods were served."""
    panels = []
    waits = [r for r in runs if "waits" in r]
    if waits:
        marks = []
        longest = max(at for r in waits for at, _, _ in r["waits"]) or 1.0
        tallest = max(1.0, *(wait for r in waits for _, wait, _ in r["waits"]))
        decades = [d for d in (0.01, 0.1, 1.0, 10.0, 100.0) if d <= tallest * 1.01]

        def height(seconds: float) -> float:
            top, bottom = math.log10(tallest * 1.2), math.log10(0.01)
            return 260 - 220 * (math.log10(max(seconds, 0.01)) - bottom) / (top - bottom)

        for d in decades:
            marks.append(
                f'<line x1="60" x2="460" y1="{height(d):.1f}" y2="{height(d):.1f}" stroke="#ddd"/>'
                f'<text x="54" y="{height(d) + 4:.1f}" text-anchor="end">{d:g} s</text>'
            )
        for number, r in enumerate(waits):
            colour = COLOURS[r["run"]]
            for at, wait, told in r["waits"]:
                fill = colour if told else "none"
                marks.append(
                    f'<circle cx="{60 + 400 * at / longest:.1f}" cy="{height(wait):.1f}" r="3" '
                    f'fill="{fill}" stroke="{colour}"/>'
                )
            marks.append(f'<text x="{330 + 55 * number}" y="26" fill="{colour}">{r["run"]}</text>')
        marks.append('<text x="60" y="26">B: seconds to the first token</text>')
        marks.append(f'<text x="460" y="280" text-anchor="end">{longest:.0f} s of the run</text>')
        panels.append("".join(marks))
    for r in (r for r in runs if "curve" in r):
        start = r["curve"][0]
        longest = (r["curve"][-1][0] - start[0]) or 1.0
        most = max(r["curve"][-1][1] - start[1], r["curve"][-1][2] - start[2]) or 1
        marks = [f'<text x="60" y="26">tokens served, weights {r["run"]}</text>']
        total = sum(r["curve"][-1][i] - start[i] for i in (1, 2))
        for i, name in ((1, "a"), (2, "b")):
            points = " ".join(
                f"{60 + 400 * (p[0] - start[0]) / longest:.1f},"
                f"{260 - 220 * (p[i] - start[i]) / most:.1f}"
                for p in r["curve"]
            )
            ideal = 260 - 220 * total * r["weights"][i - 1] / sum(r["weights"]) / most
            marks.append(
                f'<line x1="60" y1="260" x2="460" y2="{ideal:.1f}" stroke="{COLOURS[name]}" '
                f'stroke-dasharray="2 4"/>'
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" '
                f'stroke-width="2"/><text x="{390 + 30 * i}" y="26" fill="{COLOURS[name]}">'
                f"{name.upper()}</text>"
            )
        marks.append(f'<text x="54" y="44" text-anchor="end">{most}</text>')
        marks.append(f'<text x="460" y="280" text-anchor="end">{longest:.0f} s</text>')
        panels.append("".join(marks))
    width = 490 * len(panels)
    body = "".join(
        f'<g transform="translate({490 * i})"><rect x="60" y="40" width="400" height="220" '
        f'fill="none" stroke="#888"/>{panel}</g>'
        for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="300" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{body}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="alone,fcfs,fair,1:1,3:1")
    parser.add_argument("--seconds", type=int, default=30, help="that count, for each run")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of flood before that")
    parser.add_argument("--results", type=Path, help="JSON lines to add to and to read from")
    parser.add_argument("--svg", type=Path, help="where the plot goes")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--flood", type=int, default=200, help="requests of A")
    parser.add_argument("--a-prompt", type=int, default=2048)
    parser.add_argument("--a-output", type=int, default=256)
    parser.add_argument("--b-prompt", type=int, default=64)
    parser.add_argument("--b-output", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8, help="max_num_seqs")
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--max-step-ms", type=float, default=40.0)
    parser.add_argument("--blocks", type=int, default=1200, help="num_kv_blocks")
    options = parser.parse_args()
    runs = []
    if options.results is not None and options.results.exists():
        runs = [json.loads(line) for line in options.results.read_text().splitlines()]
    for kind in filter(None, options.runs.split(",")):
        found = asyncio.run(run(kind, options))
        runs = [r for r in runs if r["run"] != kind] + [json.loads(json.dumps(found))]
        if options.results is not None:
            options.results.write_text("".join(json.dumps(r) + "\n" for r in runs))
    print(table(runs))
    if options.svg is not None:
        options.svg.write_text(svg(runs))


if __name__ == "__main__":
    main()
