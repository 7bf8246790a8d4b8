"""Calls of kernels, recorded once and then run again in one compiled call.

A decode step calls some 180 kernels of a small model, and each call costs 2 µs in Python, which
types, checks and unboxes five to fifteen arguments. A recording keeps the unboxed arguments in
memory, and replaying it is a loop of indirect calls.

The kernels are the ones that are compiled anyway, called by their address: nothing is compiled
twice. Only for each list of argument types there is a function of some instructions that takes them
out of memory again.
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, typeof, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.settings import JIT
from deepinfer.gpu_worker.kernels.vectors import I32, I64


def _borrowed(context: Any, builder: Any, type_: Any, value: Any) -> Any:
    """``value`` without the reference that numba counts for an array: Python holds the array."""
    if not isinstance(type_, types.Array):
        return value
    array = context.make_array(type_)(context, builder, value)
    array.meminfo = ir.Constant(array.meminfo.type, None)
    array.parent = ir.Constant(array.parent.type, None)
    return array._getvalue()


@intrinsic
def _keep(typingctx, arguments, place):
    """Write ``arguments`` to ``place``; return the address of a caller for them.

    The caller is an int32(int64 kernel, int64 place): it calls a kernel without a result with the
    arguments at ``place``, and returns 0 when that went well.
    """

    def codegen(context, builder, signature, args):
        kinds = signature.args[0].types
        values = [
            _borrowed(context, builder, kind, builder.extract_value(args[0], i))
            for i, kind in enumerate(kinds)
        ]
        kept = context.make_tuple(builder, signature.args[0], values)
        pointer = kept.type.as_pointer()
        builder.store(kept, builder.inttoptr(args[1], pointer), align=8)

        module = builder.module
        name = module.get_unique_name("caller")
        function = ir.Function(module, ir.FunctionType(I32, [I64, I64]), name)
        function.linkage = "internal"
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        held = inner.load(inner.inttoptr(function.args[1], pointer), align=8)
        kernel_type = context.call_conv.get_function_type(types.none, kinds)
        status, _ = context.call_conv.call_function(
            inner,
            inner.inttoptr(function.args[0], kernel_type.as_pointer()),
            types.none,
            kinds,
            [inner.extract_value(held, i) for i in range(len(kinds))],
        )
        inner.ret(inner.zext(status.is_error, I32))
        return builder.ptrtoint(function, I64)

    return types.int64(arguments, types.int64), codegen


@intrinsic
def _call(typingctx, caller, kernel, place):
    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(I32, [I64, I64])
        function = builder.inttoptr(args[0], function_type.as_pointer())
        return builder.call(function, args[1:])

    return types.int32(types.int64, types.int64, types.int64), codegen


@njit(**JIT)
def _kept(arguments, place):
    return _keep(arguments, place)


@njit("void(int64[:, ::1])", **JIT)
def _replay(calls):
    for i in range(calls.shape[0]):
        if _call(calls[i, 0], calls[i, 1], calls[i, 2]) != 0:
            raise MemoryError("a kernel could not allocate its scratch memory")


def _address(kernel: Any, kinds: tuple[Any, ...]) -> int:
    """Address of a compiled kernel for these argument types; compiled or loaded if need be."""
    kernel.compile(kinds)
    compiled = kernel.overloads[kinds]
    assert compiled.signature.return_type == types.none
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


class Recording:
    """Calls of kernels, in the order of ``add``; calling it runs them.

    Arrays are held by reference: what they contain at that time counts.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, int]] = []
        self._table = np.empty((0, 3), np.int64)
        self._held: list[Any] = []
        self._kernels: dict[Any, tuple[int, int]] = {}

    def add(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        """Append a call of a kernel, a compiled function without a result."""
        kinds = tuple(typeof(argument) for argument in arguments)
        known = self._kernels.get((kernel, kinds))
        if known is None:
            context = cpu_target.target_context
            size = context.get_abi_sizeof(context.get_value_type(typeof(arguments)))
            known = self._kernels[kernel, kinds] = _address(kernel, kinds), size
        address, size = known
        held = np.zeros(-(-size // 8), np.int64)
        place = held.ctypes.data
        self._held += [arguments, held]
        self._calls.append((_kept(arguments, place), address, place))

    def __call__(self) -> None:
        """Run the calls."""
        if len(self._table) < len(self._calls):
            self._table = np.array(self._calls, np.int64)
        _replay(self._table)
