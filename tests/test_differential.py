"""On the real model a request gets, however the engine runs, what it gets alone: to the last bit.

``support.differential`` says how, and how to run more of it or to repeat one request.
"""

from __future__ import annotations

import pytest

from support.differential import Report, covering, run

pytestmark = [
    pytest.mark.process,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


def check(report: Report) -> None:
    """No difference, in a run that went through what its configurations are named after."""
    assert not report.differences, "\n".join(report.differences[:5])
    for block in report.blocks:
        configuration, stats = block.configuration, block.stats
        if configuration.worker == "killed":
            assert stats["worker_restarts"], block
        if configuration.cache == "cached":
            assert stats["cached_tokens"], block
        preempted = {
            "roomy": not stats["preemptions"] and not block.ended_early,
            "recompute": stats["preemptions"] and not block.ended_early,
            "stop": block.ended_early and not stats["preemptions"],
        }
        assert preempted[configuration.pool], block


def test_five_hundred_requests_in_float32_get_what_they_get_alone(smollm2_folder) -> None:
    report = run(
        smollm2_folder, dtype="float32", runs=504, distinct=144, configurations=covering(2)
    )
    assert report.num_runs >= 500
    check(report)


def test_a_hundred_requests_in_bfloat16_get_what_they_get_alone(smollm2_folder) -> None:
    report = run(
        smollm2_folder, dtype="bfloat16", runs=104, distinct=52, configurations=covering(2)
    )
    check(report)


@pytest.mark.parametrize(
    "options", [{"quantization": "int8", "kv_cache_dtype": "int8"}, {"quantization": "int4"}]
)
def test_requests_on_quantised_weights_get_what_they_get_alone(smollm2_folder, options) -> None:
    report = run(
        smollm2_folder,
        dtype="bfloat16",
        runs=36,
        distinct=18,
        configurations=covering(1),
        **options,
    )
    check(report)
