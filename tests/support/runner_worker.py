"""A core and the real runner in one process: real sampler, real log probabilities, no sockets.

    engine = core_with_runner(args, num_blocks)
    request = engine.add(prompt, params)

``CoreDriver`` then decides when a step is planned and when its result is read. The model is a
``ScriptedModel`` of ``VOCAB`` tokens.
"""

from __future__ import annotations

from deepinfer.gpu_worker.runner import Runner
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.steps import StepPlan, StepResult
from support.core_driver import CoreDriver
from support.scripted_model import ScriptedModel

VOCAB = 64
EOS = 0


class RunnerWorker:
    """A device worker without its process."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def __init__(self, args: EngineArgs, num_blocks: int) -> None:
        max_model_len = args.max_model_len or 64
        model = ScriptedModel(
            VOCAB,
            num_blocks,
            args.block_size,
            max_model_len=max_model_len,
            eos_token_ids=self.eos_token_ids,
        )
        self._runner = Runner(
            model,
            max_num_seqs=args.max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=args.block_size,
            eos_token_ids=self.eos_token_ids,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        return self._runner.execute(plan)


def core_with_runner(args: EngineArgs, num_blocks: int) -> CoreDriver:
    """Return a driver whose worker is the real runner over a scripted model."""
    return CoreDriver(args, num_blocks, make_worker=lambda: RunnerWorker(args, num_blocks))
