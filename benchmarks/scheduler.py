"""What one step costs the scheduler when nothing but tokens changes, in microseconds.

    python benchmarks/scheduler.py [--rows 32,256,1024] [--steps 400] [--clients 4]
        [--policy fcfs] [--waiting 0]
        [--vllm PYTHON --vllm-script SCRIPT --vllm-model FOLDER]

Each row decodes; every block_size-th step it needs a block. The worker's answer is made up outside
the clock. Prints one JSON line per number of rows:

- ``plan_us``, ``result_us``, ``outbox_us``: the core's own time, medians over the steps;
- ``core_us``: their sum per step, the median;
- ``log_us``: noting when the step was planned and read, for whoever asks to see the engine;
- ``encode_us``: msgpack for the plan and the output batches, and decoding the result;
- ``total_us``: all of it;
- ``core_min_us``: the core's time in the quickest step.

Each client is a tenant. With ``--waiting``, so many requests of them wait for a slot all the time,
and every step has to find out whose turn it would be.

With ``--vllm``, an interpreter that has vLLM, its scheduler is measured in between by a script that
is run as ``PYTHON SCRIPT FOLDER --r ROWS --steps STEPS --block BLOCK`` and prints JSON lines with
``R``, ``sched_plus_update_us`` and the medians in ``us_per_step``. This scheduler is then measured
once more, and one line for each number of rows compares the slower of its two readings with the
faster of vLLM's two schedulers (synchronous and asynchronous):

- ``ratio``: vLLM's schedule and update over ``core_us``;
- ``ratio_with_messages``: those plus encoding the outputs, pickling the scheduler's output and
  unpickling the worker's, over ``total_us``;
- ``ratio_of_minima``: the quickest steps instead of the median ones. On a machine that is busy with
  other things this is the one to read: a long step is interrupted more often than a short one, so
  medians flatter the quicker engine there.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import time

import numpy as np

from deepinfer.scheduler.core import Core
from deepinfer.scheduler.recent import StepLog
from deepinfer.wire.codec import Codec
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import AddRequest
from deepinfer.wire.params import SamplingParams
from deepinfer.wire.steps import FromWorker, StepPlan, StepResult, WorkerReady

VOCAB = 49_152
BLOCK_SIZE = 16
PROMPT = 64
VLLM_MESSAGES = ("encode", "pickle_so", "unpickle_mro")


class Mirror:
    """The slots a worker would know, so that results can be made without a model."""

    def __init__(self, slots: int) -> None:
        self.decodes = np.zeros(slots, dtype=np.bool_)
        self.epochs = np.zeros(slots, dtype=np.int32)
        self.left: dict[int, int] = {}
        self.random = np.random.default_rng(0)

    def result(self, plan: StepPlan) -> StepResult:
        """Answer a plan with random tokens that are no EOS."""
        for row in plan.admitted:
            self.epochs[row.slot] = row.epoch
            self.left[row.slot] = len(row.tokens) // 4 - row.num_cached
        slots = np.flatnonzero(self.decodes)
        for slot, q in np.frombuffer(plan.chunks, dtype="<i4").reshape(-1, 2).tolist():
            self.left[slot] -= q
            if not self.left[slot]:
                self.decodes[slot] = True
                slots = np.append(slots, slot)
        return StepResult(
            step=plan.step,
            slots=pack_int32(slots),
            epochs=pack_int32(self.epochs[slots]),
            tokens=pack_int32(self.random.integers(3, VOCAB, len(slots))),
            started_ns=1,
            ended_ns=2,
        )


def measure(
    rows: int, steps: int, clients: int, policy: str = "fcfs", waiting: int = 0
) -> dict[str, float]:
    length = PROMPT + steps + 64
    args = EngineArgs(max_num_seqs=rows, max_num_batched_tokens=max(8192, 2 * rows), policy=policy)
    core = Core(args)
    ready = WorkerReady(
        vocab_size=VOCAB,
        eos_token_ids=[2],
        max_model_len=length,
        num_blocks=rows * (length // BLOCK_SIZE + 2),
        dtype="bfloat16",
        device="cpu",
        architecture="none",
        phases={},
    )
    core.worker_ready(ready, 0.0)
    random = np.random.default_rng(1)
    params = SamplingParams(max_tokens=steps + 64, seed=1, temperature=0.0)
    for row in range(rows + waiting):
        # Lengths run over all places in a block, so every step some rows need one.
        prompt = pack_int32(random.integers(3, VOCAB, PROMPT + row % BLOCK_SIZE))
        client = b"client%d" % (row % clients)
        add = AddRequest(row, f"r{row}", prompt, params, user_id=client.decode())
        core.handle(client, add, 0.0)
    mirror = Mirror(rows)
    codec = Codec(FromWorker)
    in_flight: list[bytes] = []
    log = StepLog()
    times: list[tuple[float, float, float, float, float]] = []
    gc.collect()
    gc.disable()
    while len(times) < steps - 32:
        begin = time.perf_counter()
        plan = core.plan(0.0)
        planned = time.perf_counter()
        if plan is None:
            break
        codec.encode(plan)
        sent = time.perf_counter()
        log.planned(plan, core.decode_rows, 1, 1)
        logged = time.perf_counter()
        in_flight.append(codec.encode(mirror.result(plan)))
        if len(in_flight) < 2:
            continue
        answered = time.perf_counter()
        result = codec.decode(in_flight.pop(0))
        decoded = time.perf_counter()
        log.read(result, 3)
        noted = time.perf_counter()
        core.step_result(result, 0.0)
        read = time.perf_counter()
        messages = core.outbox()
        drained = time.perf_counter()
        for _, message in messages:
            codec.encode(message)
        encoded = time.perf_counter()
        if int(mirror.decodes.sum()) == rows:
            encoding = (sent - planned) + (decoded - answered) + (encoded - drained)
            logging = (logged - sent) + (noted - decoded)
            times.append((planned - begin, read - noted, drained - read, encoding, logging))
    gc.enable()
    core.check()
    # The first steps after the prefill still carry first tokens.
    plan_us, result_us, outbox_us, encode_us, log_us = (
        [1e6 * value for value in column] for column in zip(*times[8:], strict=True)
    )
    core_us = [sum(parts) for parts in zip(plan_us, result_us, outbox_us, strict=True)]
    total_us = [sum(parts) for parts in zip(core_us, encode_us, log_us, strict=True)]
    columns = {
        "plan_us": plan_us,
        "result_us": result_us,
        "outbox_us": outbox_us,
        "core_us": core_us,
        "encode_us": encode_us,
        "log_us": log_us,
        "total_us": total_us,
    }
    medians = {name: round(statistics.median(values), 1) for name, values in columns.items()}
    rest = {"core_min_us": round(min(core_us), 1)}
    settings = {"policy": policy, "rows": rows, "clients": clients, "waiting": waiting}
    return settings | {"steps": len(core_us)} | medians | rest


def measure_vllm(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Return the better of vLLM's schedulers by number of rows, in microseconds a step."""
    command = [options.vllm, options.vllm_script, options.vllm_model, "--r", options.rows]
    command += ["--steps", str(options.steps), "--block", str(BLOCK_SIZE)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    best: dict[int, dict[str, float]] = {}
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        if told.get("what") != "scheduler" or told["block"] != BLOCK_SIZE or told["log_stats"]:
            continue
        if not told["prefix_caching"]:
            continue
        print(json.dumps({"engine": "vllm"} | told), flush=True)
        parts = told["us_per_step"]
        alone = told["sched_plus_update_us"]
        if told["R"] not in best or alone < best[told["R"]]["alone"]:
            best[told["R"]] = {
                "alone": alone,
                "min": parts["schedule"]["min"] + parts["update"]["min"],
                "with_messages": alone + sum(parts[name]["med"] for name in VLLM_MESSAGES),
            }
    return best


def compare(mine: list[dict[str, float]], vllm: dict[str, float]) -> dict[str, float]:
    core_us, total_us, min_us = (
        max(reading[name] for reading in mine) for name in ("core_us", "total_us", "core_min_us")
    )
    return {
        "rows": mine[0]["rows"],
        "core_us": core_us,
        "vllm_us": round(vllm["alone"], 1),
        "ratio": round(vllm["alone"] / core_us, 1),
        "total_us": total_us,
        "vllm_with_messages_us": round(vllm["with_messages"], 1),
        "ratio_with_messages": round(vllm["with_messages"] / total_us, 1),
        "core_min_us": min_us,
        "vllm_min_us": round(vllm["min"], 1),
        "ratio_of_minima": round(vllm["min"] / min_us, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="32,256,1024")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--vllm-script", help="what measures vLLM's scheduler")
    parser.add_argument("--vllm-model", help="a model folder for it")
    options = parser.parse_args()
    if options.vllm and not (options.vllm_script and options.vllm_model):
        parser.error("--vllm needs --vllm-script and --vllm-model")

    def all_rows() -> dict[int, dict[str, float]]:
        found = {}
        for rows in map(int, options.rows.split(",")):
            found[rows] = measure(
                rows, options.steps, options.clients, options.policy, options.waiting
            )
            print(json.dumps(found[rows]), flush=True)
        return found

    before = all_rows()
    if options.vllm:
        vllm = measure_vllm(options)
        after = all_rows()
        for rows, reading in before.items():
            print(json.dumps(compare([reading, after[rows]], vllm[rows])), flush=True)


if __name__ == "__main__":
    main()
