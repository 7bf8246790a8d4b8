"""Sums of products of bytes, four to a 32-bit lane, by the instructions that a machine has.

Weights are unsigned bytes and activations int8. Their sums are exact integers, so all lowerings
give the same bits:

- "vnni": ``vpdpbusd``, 64 products and their sums in one instruction.
- "avx2": ``vpmaddubsw``, whose pairs must fit in int16. Those of 4-bit codes do, even eight times;
  for 8-bit weights it takes ``|w|`` and the activations with the sign of w.
- "generic": what any machine can do, and what the others are tested against.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from deepinfer.gpu_worker.kernels.vectors import (
    I8,
    I16,
    I32,
    LANES,
    VECTOR_I32,
    index,
    same_int,
)

RUN = 4 * LANES
"""Bytes of weights that meet the same four activations, or two times four where codes share one."""


_NEEDS = {"vnni": ("avx512vnni", "avx512bw", "avx512vl"), "avx2": ("avx2",), "generic": ()}


def lowerings_of(features: Mapping[str, bool]) -> list[str]:
    """Those that a machine has the instructions for, the fastest first."""
    return [name for name, needs in _NEEDS.items() if all(features.get(need) for need in needs)]


HOST = lowerings_of(llvm.get_host_cpu_features())[0]


class Dot:
    """How to sum products of weights of ``bits`` (4 or 8) and int8 activations.

    A run of 64 bytes is handled as ``parts`` vectors of ``width`` bytes. Weights of 8 bits are
    stored plus 128.
    """

    def __init__(self, builder: Any, lowering: str, bits: int) -> None:
        self.builder = builder
        self.lowering = lowering
        self.bits = bits
        self.width = 32 if lowering == "avx2" else 64
        self.parts = RUN // self.width
        self.bytes = ir.VectorType(I8, self.width)
        self.words = ir.VectorType(I32, self.width // 4)
        self.held = ir.VectorType(I16, 16) if (lowering, bits) == ("avx2", 4) else self.words
        """What a part is summed in."""

    def begin(self) -> list[Any]:
        """Accumulators of one row and one panel, at zero."""
        return [ir.Constant(self.held, [0] * self.held.count)] * self.parts

    def _run(self, pointer: Any) -> list[Any]:
        builder = self.builder
        places = [builder.gep(pointer, [index(i * self.width)]) for i in range(self.parts)]
        return [
            builder.load(builder.bitcast(at, self.bytes.as_pointer()), align=1) for at in places
        ]

    def codes(self, pointer: Any) -> tuple[list[Any], list[Any]]:
        """Low and high halves of the 64 bytes at ``pointer``, as bytes from 0 to 15."""
        builder = self.builder
        mask = ir.Constant(self.bytes, [15] * self.width)
        four = ir.Constant(self.words, [4] * (self.width // 4))
        low, high = [], []
        for both in self._run(pointer):
            low.append(builder.and_(both, mask))
            shifted = builder.lshr(builder.bitcast(both, self.words), four)
            high.append(builder.and_(builder.bitcast(shifted, self.bytes), mask))
        return low, high

    def weights(self, pointer: Any) -> list[Any]:
        """The 64 weights of 8 bits at ``pointer``, in the form that ``add`` takes."""
        run = self._run(pointer)
        if self.lowering != "avx2":
            return run
        offset = ir.Constant(self.bytes, [-128] * self.width)
        signed = [self.builder.xor(part, offset) for part in run]
        absent = ir.Constant(ir.IntType(1), 0)
        return [(self._call("llvm.abs.v32i8", self.bytes, w, absent), w) for w in signed]

    def activations(self, pointer: Any) -> Any:
        """The four int8 at ``pointer`` in every 32-bit lane."""
        builder = self.builder
        four = builder.load(builder.bitcast(pointer, I32.as_pointer()), align=4)
        undefined = ir.Constant(self.words, ir.Undefined)
        first = builder.insert_element(undefined, four, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, self.width // 4), [0] * (self.width // 4))
        return builder.bitcast(builder.shuffle_vector(first, undefined, zeros), self.bytes)

    def add(self, sums: list[Any], weights: list[Any], x: Any) -> list[Any]:
        """``sums`` with the products of one run of weights added to them."""
        return [self._add(total, part, x) for total, part in zip(sums, weights, strict=True)]

    def _add(self, total: Any, weights: Any, x: Any) -> Any:
        builder = self.builder
        if self.lowering == "vnni":
            words = [builder.bitcast(value, VECTOR_I32) for value in (weights, x)]
            return self._call("llvm.x86.avx512.vpdpbusd.512", VECTOR_I32, total, *words)
        if self.lowering == "avx2":
            pair = ir.VectorType(I16, 16)
            if self.bits == 4:
                # A pair is at most 2 * 15 * 127 = 3810, so the 8 of a group fit in int16.
                pairs = self._call("llvm.x86.avx2.pmadd.ub.sw", pair, weights, x)
                return self._in_this_order(builder.add(total, pairs))
            magnitude, sign = weights
            x = self._call("llvm.x86.avx2.psign.b", self.bytes, x, sign)
            pairs = self._call("llvm.x86.avx2.pmadd.ub.sw", pair, magnitude, x)
            return self._in_this_order(builder.add(total, self._pairs_to_words(pairs)))
        wide = ir.VectorType(I16, self.width)
        products = builder.mul(builder.zext(weights, wide), builder.sext(x, wide))
        for i in range(4):
            every = ir.Constant(VECTOR_I32, list(range(i, self.width, 4)))
            some = builder.shuffle_vector(products, products, every)
            total = builder.add(total, builder.sext(some, VECTOR_I32))
        return total

    def _in_this_order(self, value: Any) -> Any:
        """The same value; what goes through here is computed in the order of the source.

        Left to itself, LLVM sums up all of one part before the next, and runs out of registers
        for the activations that both need.
        """
        kind = ir.FunctionType(value.type, [value.type])
        return self.builder.asm(kind, "", "=x,0", [value], True)

    def _pairs_to_words(self, pairs: Any) -> Any:
        ones = ir.Constant(pairs.type, [1] * 16)
        return self._call("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), pairs, ones)

    def end(self, sums: list[Any], activations: Any = None) -> Any:
        """The sums of the 16 columns as int32.

        ``activations`` is, for weights of 8 bits, the sum of a row's own activations as an int32.
        """
        builder = self.builder
        if self.lowering == "avx2":
            if self.bits == 4:
                sums = [self._pairs_to_words(part) for part in sums]
            return builder.shuffle_vector(*sums, ir.Constant(VECTOR_I32, list(range(LANES))))
        if self.bits == 4:
            return sums[0]
        # Sums of weights plus 128 may have wrapped around; so does this, back to what they are.
        undefined = ir.Constant(VECTOR_I32, ir.Undefined)
        offset = builder.shl(activations, ir.Constant(I32, 7))
        offset = builder.insert_element(undefined, offset, ir.Constant(I32, 0))
        return builder.sub(sums[0], builder.shuffle_vector(offset, undefined, same_int(0)))

    def _call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name), args
        )
