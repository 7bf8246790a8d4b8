"""The sums of products of bytes become the instructions that they were written for."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from deepinfer.gpu_worker.kernels.byte_dot import Dot, lowerings_of


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("lowering", "cpu", "instruction"),
    [("vnni", "sapphirerapids", "vpdpbusd"), ("avx2", "haswell", "vpmaddubsw")],
)
def test_the_inner_loop_becomes_the_instruction_it_was_written_for(
    bits, lowering, cpu, instruction
):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    byte = ir.IntType(8).as_pointer()
    result = ir.VectorType(ir.IntType(32), 16)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [byte] * 3), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    dot = Dot(builder, lowering, bits)
    x = dot.activations(function.args[1])
    runs = dot.codes(function.args[0]) if bits == 4 else [dot.weights(function.args[0])]
    sums = dot.begin()
    for run in runs:
        sums = dot.add(sums, run, x)
    total = dot.end(sums, ir.Constant(ir.IntType(32), 7))
    builder.store(total, builder.bitcast(function.args[2], result.as_pointer()), align=1)
    builder.ret_void()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    assembly = target.create_target_machine(cpu=cpu, opt=3).emit_assembly(
        llvm.parse_assembly(str(module))
    )
    assert instruction in assembly


@pytest.mark.parametrize(
    ("features", "lowerings"),
    [
        (
            {"avx2": True, "avx512vnni": True, "avx512bw": True, "avx512vl": True},
            ["vnni", "avx2", "generic"],
        ),
        ({"avx2": True, "avx512bw": True, "avx512vl": True}, ["avx2", "generic"]),
        ({"sse4.2": True}, ["generic"]),
        ({}, ["generic"]),
    ],
)
def test_a_machine_gets_instructions_that_it_has(features, lowerings):
    assert lowerings_of(features) == lowerings
