"""Sampling parameters and engine arguments are checked where they are made."""

from __future__ import annotations

import math

import msgspec
import pytest

from deepinfer import EngineArgs, SamplingParams
from deepinfer.wire.config import cpu_set


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, None, 1.5, "3", True, 2**40, 10**5000]),
        ("min_tokens", [-1, 17]),
        ("temperature", [-1, -1e-9, math.nan, math.inf, "hot", 10**5000]),
        ("top_p", [0, -0.1, 1.5, math.nan]),
        ("top_k", [-2, 2**40, 1.5]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("n", [0, -1, 10**6]),
        ("seed", ["1", 1.5, 2**64]),
        ("stop", ["", [""], [1], 5, ["x"] * 500_000, "x" * 2000]),
        ("stop_token_ids", [[-1], [2**63], ["a"], [True], [1, 2.0], 5, [1] * 100_000]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [0, -1, 1e-320, 1e308, math.nan, math.inf]),
        ("logit_bias", [{-1: 1.0}, {2**63: 1.0}, {1: math.nan}, {1: 200.0}, [1], {"a": 1.0}]),
        ("allowed_token_ids", [[], [-1], [2**63], [0] * 1_000_000]),
        ("bad_words", [[""], [[]], [[-1]], "word", ["x"] * 50_000]),
        ("logprobs", [-1, 21, 10**6, True]),
        ("prompt_logprobs", [-1, 21]),
        ("golden_token_ids", [[-1], ["a"]]),
        ("structured_output", [{"regex": "("}]),
        ("ignore_eos", ["yes"]),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field, values) -> None:
    for value in values:
        with pytest.raises(ValueError, match=field) as caught:
            SamplingParams(**{field: value})
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model", ["", None, 5, "x" * 5000]),
        ("dtype", ["fp8", None, "float16"]),
        ("kv_cache_dtype", ["fp8", None, "int4"]),
        ("device", ["tpu", "cuda"]),
        ("quantization", ["int3", "fp8"]),
        ("max_model_len", [0, -1, 1.5, "8"]),
        ("block_size", [0, 100_000, None]),
        ("num_kv_blocks", [0, -5]),
        ("kv_cache_bytes", [0, -1]),
        ("max_num_seqs", [0, True, 10**9]),
        ("max_num_batched_tokens", [0, -1]),
        ("policy", ["random", None]),
        ("stop_preempted_request", ["no", 1]),
        ("seed", [-1, 2**63, 1.5]),
        ("heartbeat_timeout_s", [0, -1, 1.9, math.nan, math.inf]),
        ("num_threads", [0]),
        ("worker_cpus", ["", "a", "3-1", "1,,2", "-1", "0-99999", "٣", 4]),
    ],
)
def test_engine_arguments_out_of_range_are_refused_by_name(field, values) -> None:
    for value in values:
        with pytest.raises(ValueError, match=field):
            EngineArgs(**{field: value})


def test_a_list_of_cores_is_read_as_the_system_writes_it() -> None:
    assert cpu_set("0-2,5, 7-7") == {0, 1, 2, 5, 7}


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(max_tokens=3, logit_bias={5: -1.5}, bad_words=[[1, 2]], seed=2**64 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
