"""The profile: it counts every kernel, changes no result, and its trace shows all processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deepinfer import AsyncEngine
from deepinfer.gpu_worker.backend import RaggedBatch
from deepinfer.gpu_worker.cpu_backend import CpuBackend
from deepinfer.gpu_worker.llama import Model
from deepinfer.gpu_worker.machine_peaks import Peaks
from deepinfer.gpu_worker.profile import ProfilingBackend, ProfilingRunner, StepProfile
from deepinfer.gpu_worker.runner import Runner
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.recorder import Recorder, clear, merge, read, timed
from deepinfer.wire.steps import RowAdmit, StepPlan
from support.checkpoints import make_checkpoint
from support.scripted_engine import ScriptedFolder

KERNELS = {
    "embed", "qkv", "rope_and_cache", "attention", "output", "gate_up", "down", "head", "take_rows",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, backend: object) -> Model:
    model = Model.load(folder, backend, "float32")  # type: ignore[arg-type]
    model.attach_cache(16, 16)
    return model


def plans() -> list[StepPlan]:
    """A prompt of seven tokens in two chunks, three decode steps, an idle time, another prompt."""
    blocks = pack_int32(np.arange(2))

    def row(epoch: int) -> RowAdmit:
        tokens = pack_int32(np.arange(3, 10))
        return RowAdmit(0, epoch, tokens, 7, 0, blocks, SamplingParams(temperature=0, seed=1))

    chunk = [pack_int32(np.array([0, count])) for count in (4, 3, 7)]
    return [
        StepPlan(1, admitted=[row(1)], chunks=chunk[0]),
        StepPlan(2, chunks=chunk[1]),
        *(StepPlan(step) for step in (3, 4, 5)),
        StepPlan(6, released=pack_int32(np.array([0])), admitted=[row(2)], chunks=chunk[2]),
    ]


SIZES = {"max_num_seqs": 2, "max_model_len": 64, "num_blocks": 16, "block_size": 16}


@pytest.fixture(scope="module")
def profiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """Results of the plans with a profile, and the file that it left."""
    cpu = CpuBackend(num_threads=1)
    folder = tmp_path_factory.mktemp("profile")
    profile = StepProfile(Peaks({"float32": 1e11, "bfloat16": 2e11, "int8": 4e11}, bandwidth=1e10))
    model = load(checkpoint, ProfilingBackend(cpu, profile))
    profile.name_weights(model)
    recorder = Recorder(str(folder), "gpu_worker")
    runner = ProfilingRunner(profile, recorder, model, **SIZES)
    runner.warm_up()
    results = [runner.execute(plan) for plan in plans()]
    recorder.write()
    (trace,) = read(folder)
    return results, trace


def test_a_profiled_step_yields_the_same_bits(checkpoint: Path, profiled) -> None:
    runner = Runner(load(checkpoint, CpuBackend(num_threads=1)), **SIZES)
    for plan, found in zip(plans(), profiled[0], strict=True):
        expected = runner.execute(plan)
        assert (found.slots, found.tokens) == (expected.slots, expected.tokens)
    batch = RaggedBatch(
        token_ids=np.arange(9), positions=np.arange(9), q_start=np.array([0, 9]),
        slots=np.array([0]), lengths=np.array([9]), block_tables=np.array([[0]]),
        logit_index=np.array([3, 8]),
    )  # fmt: skip
    cpu = CpuBackend(num_threads=1)
    plain = load(checkpoint, cpu).forward(batch)
    watched = load(checkpoint, ProfilingBackend(cpu, StepProfile())).forward(batch)
    assert plain.tobytes() == watched.tobytes()


def test_every_kernel_has_its_part_and_the_parts_are_the_whole(profiled) -> None:
    _, trace = profiled
    prefill, decode = sorted(trace.profile.kinds, key=lambda kind: kind.kind, reverse=True)
    assert (prefill.kind, prefill.steps, decode.kind, decode.steps) == ("prefill", 3, "decode", 3)
    for kind in (prefill, decode):
        parts = {part.name: part for part in kind.parts}
        assert set(parts) == KERNELS | {"sampling", "between steps", "profiling", "rest"}
        assert sum(part.share for part in kind.parts) == pytest.approx(1)
        assert all(part.total_ms >= 0 for part in kind.parts)
        assert all(parts[name].floor_ms > 0 for name in KERNELS)
        assert parts["qkv"].calls == 3 * kind.steps  # layers
    steps = sum(result.ended_ns - result.started_ns for result in profiled[0][2:5]) / 1e6
    inside = sum(part.total_ms for part in decode.parts if part.name != "between steps")
    assert inside == pytest.approx(steps)
    # Before the last plan there was nothing to compute.
    between = {part.name: part.calls for part in prefill.parts}["between steps"]
    assert between == 1


@pytest.mark.parametrize("gated", [False, True])
def test_a_floor_is_the_larger_of_bytes_and_operations(checkpoint: Path, gated: bool) -> None:
    width = 16 if gated else 32

    def floor(peaks: Peaks, folder: Path) -> float:
        profile = StepProfile(peaks)
        backend = ProfilingBackend(CpuBackend(num_threads=1), profile)
        profile.recorder = Recorder(str(folder), "gpu_worker")
        weight = backend.pack_linear([np.ones((16, 16), np.float32)] * 2, gated=gated)
        backend.linear(np.ones((2, 16), np.float32), weight, np.empty((2, width), np.float32))
        (kind,) = [kind for kind in profile._parts.values() if kind]
        return kind["linear"].floor_ms

    moved = 4 * (32 * 16 + 32 + 2 * 16 + 2 * width)  # weights, bias, x, out
    folder = checkpoint / "profile"
    assert floor(Peaks({"float32": 1e3}, bandwidth=1e12), folder) == pytest.approx(2 * 2 * 16 * 32)
    assert floor(Peaks({"float32": 1e12}, bandwidth=1e3), folder) == pytest.approx(moved)


def test_a_full_recorder_drops_and_counts(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), "frontend", max_spans=3)
    for i in range(5):
        recorder.span(f"span {i}", i, i + 1, {})
    recorder.write()
    recorder.write()
    (trace,) = read(tmp_path)
    spans = [event.name for event in trace.traceEvents if event.name.startswith("span")]
    assert (spans, trace.dropped) == (["span 0", "span 1", "span 2"], 2)


def test_what_is_not_recorded_is_not_even_wrapped(tmp_path: Path) -> None:
    assert timed(None, "sum", sum) is sum
    recorder = Recorder(str(tmp_path), "frontend")
    before = time.monotonic_ns()
    assert timed(recorder, "sum", sum)([1, 2]) == 3
    with pytest.raises(TypeError):
        timed(recorder, "sum", sum)(None)  # type: ignore[call-overload]
    recorder.write()
    merge(read(tmp_path), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["sum", "sum"]
    assert before / 1000 <= spans[0]["ts"] <= time.monotonic_ns() / 1000
    clear(tmp_path)
    assert read(tmp_path) == []


@pytest.mark.process
def test_a_profiled_bench_leaves_one_trace_of_all_processes(tmp_path: Path) -> None:
    folder, target = ScriptedFolder(tmp_path / "m"), tmp_path / "profile"
    target.mkdir()
    (target / "gpu_worker-1.spans.json").write_text("of an earlier run")
    command = [sys.executable, "-m", "deepinfer", "bench", "--num-prompts", "3", "--json"]
    options = ["--model", str(folder.path), "--worker-module", "support.scripted_worker"]
    done = subprocess.run(
        [*command, *options, "--profile", str(target)], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    assert {kind["kind"] for kind in result["profile"]["kinds"]} == {"decode", "prefill"}
    assert result["trace"]["dropped"] == 0
    events = json.loads(Path(result["trace"]["path"]).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["frontend", "gpu_worker", "scheduler"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == result["trace"]["spans"]
    found = {(names[span["pid"]], span["name"]) for span in spans}
    assert found >= {
        ("frontend", "add request"), ("frontend", "outputs"),
        ("scheduler", "message"), ("scheduler", "plan"), ("scheduler", "result"),
        ("gpu_worker", "prefill step"), ("gpu_worker", "decode step"), ("gpu_worker", "sampling"),
    }  # fmt: skip
    for pid in names:
        nested([span for span in spans if span["pid"] == pid])
    begun = min(span["ts"] for span in spans)
    ended = max(span["ts"] + span["dur"] for span in spans)
    assert ended - begun < 300e6, "one time axis"


@pytest.mark.process
async def test_an_app_with_a_profiled_engine_gets_the_files_too(tmp_path: Path) -> None:
    folder, target = ScriptedFolder(tmp_path / "m"), tmp_path / "profile"
    async with AsyncEngine(folder.args(profile=str(target))) as engine:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len([out async for out in engine.generate([1, 2, 3], params)]) == 4
    traces = {trace.process: trace for trace in read(target)}
    assert set(traces) == {"frontend", "scheduler", "gpu_worker"}
    assert "outputs" in {event.name for event in traces["frontend"].traceEvents}
    assert sum(kind.steps for kind in traces["gpu_worker"].profile.kinds) >= 4


def nested(spans: list[dict]) -> None:
    """Of two spans of a thread one lies in the other, or they do not overlap."""
    assert len({span["tid"] for span in spans}) == 1
    open_until: list[int] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start = round(span["ts"] * 1000)
        end = start + round(span["dur"] * 1000)
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1], span
        open_until.append(end)


def test_without_a_profile_no_field_of_it_travels() -> None:
    from deepinfer.wire.config import EngineArgs

    assert b"profile" not in msgspec.msgpack.encode(EngineArgs())
    with pytest.raises(ValueError, match="profile must be a folder"):
        EngineArgs(profile="")
