"""A device worker with a scripted model: ``EngineArgs(worker_module="support.scripted_worker")``.

The process, its socket, the runner and the sampler are the real ones; only the transformer is
replaced. ``scripted.json`` in the model folder configures it (see ``ScriptedFolder``):

- ``vocab_size``, ``max_model_len``, ``eos_token_id``, ``eos_odds``: as in ``ScriptedModel``;
- ``step_ms``: how long a step takes at least (it stands for computation);
- ``poison``: a token id whose computation kills the process, -1 for none;
- ``fail_load``: an error to fail the start with;
- ``damaged``: a file that stands for a damaged kernel cache while it is there.

A test holds the worker before its next step by holding an exclusive flock on ``hold`` in the
folder. Its first byte says how many steps still pass, counted from the next one that begins a
prompt (with no cached beginning); its second one whether that has come. These are read and written
under a lockf, and read again and again while the worker is held: what an earlier request computes
for nothing may have come between the test's lock and its bytes, and the test may let more pass.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from pathlib import Path

from deepinfer.gpu_worker.backend import RaggedBatch
from deepinfer.gpu_worker.process import LoadedModel, main
from deepinfer.wire.config import EngineArgs
from support.scripted_model import ScriptedModel, hash_chain


def load_scripted_model(args: EngineArgs, phases: dict[str, float]) -> LoadedModel:
    folder = Path(args.model)
    script = json.loads((folder / "scripted.json").read_text())
    if script["fail_load"]:
        raise ValueError(script["fail_load"])
    if script["damaged"] and Path(script["damaged"]).exists():
        raise EOFError("Ran out of input")
    phases["load"] = 0.0
    hold = os.open(folder / "hold", os.O_RDWR)

    def may_pass(batch: RaggedBatch) -> bool:
        fcntl.lockf(hold, fcntl.LOCK_EX)
        try:
            passing, begun = os.pread(hold, 2, 0) or b"\0\0"
            # What an earlier request still computes for nothing does not count.
            if passing and (begun or (batch.positions == 0).any()):
                os.pwrite(hold, bytes([passing - 1, 1]), 0)
        finally:
            fcntl.lockf(hold, fcntl.LOCK_UN)
        return passing > 0 or not _locked(hold)

    def on_forward(batch: RaggedBatch) -> None:
        while not may_pass(batch):
            time.sleep(0.001)
        if (batch.token_ids == script["poison"]).any():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(script["step_ms"] / 1000)

    num_blocks = args.num_kv_blocks or 4096
    model = ScriptedModel(
        script["vocab_size"],
        num_blocks,
        args.block_size,
        max_model_len=args.max_model_len or script["max_model_len"],
        eos_token_ids=[script["eos_token_id"]],
        next_token=hash_chain(script["vocab_size"], script["eos_token_id"], script["eos_odds"]),
        on_forward=on_forward,
    )
    return LoadedModel(model, num_blocks)


def _locked(descriptor: int) -> bool:
    """Whether another process holds an exclusive flock on a file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


if __name__ == "__main__":
    main(load_scripted_model)
