"""Fork and join of compiled functions over a few threads that wait without the interpreter.

A decode step runs about 200 kernels of 5 to 100 microseconds, so what it costs to start one on
all cores decides how fast small batches are; and the cores are shared with the scheduler and the
frontend, so a thread that waits must not burn one, and a thread that lost its core must not be
waited for while others could do its work. Hence:

- Work is a number of *units* that threads draw from a shared counter; results never depend on who
  drew what. A thread that comes late, or not at all, costs nothing: the launcher only waits for
  threads that are inside a unit.
- Helpers spin for a moment (``_SPINS``, about 50 µs: longer than the gaps between the kernels of
  a step, shorter than those between steps), then sleep on a semaphore until a launch posts it.
- A helper that woke up on the launcher's core yields it, so as not to keep the launcher from
  running. Where the system then leaves both on one core, the team is as fast as one thread.

Measured on 2 cores shared with other programs, medians in µs, 16 units in one run; "passive" is
numba's prange on GNU OpenMP with OMP_WAIT_POLICY=passive. (OpenMP's default spinning took 8 ms
an empty loop, since it holds the core that the other thread needs; numba's workqueue 80 µs.)

    work of one thread       passive    this
    10, back to back              20       6
    10, 200 µs apart             101      18
    80, back to back              68      43
    80, 200 µs apart             178      56
"""

# Compiled functions are typed by numba, for the arrays they are called with.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from deepinfer.gpu_worker.kernels.settings import INNER, JIT
from deepinfer.gpu_worker.kernels.vectors import I32, I64

# The control block: int64 words, those that different threads write on cache lines of their own.
_STATE = 0  # job number << 16 | open << 15 | helpers inside the job
_NEXT = 16  # the next unit to draw
_FUNCTION, _ARGUMENTS, _UNITS = 32, 33, 34
_SLEEPERS = 48  # helpers asleep or about to; an upper bound
_LAUNCHING = 64  # 1 while a thread launches
_STOP = 80
_FAILED = 81
_THREADS = 82
_LAUNCHER_CORE = 83
_SEMAPHORE = 96
_WORDS = 112

_OPEN = 1 << 15
_ACTIVE = _OPEN - 1
_SPINS = 2500
_YIELD_EVERY = 50

_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())


def _word(builder: Any, control: Any, index: Any) -> Any:
    address = builder.add(control, builder.mul(index, ir.Constant(I64, 8)))
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def _load(typingctx, control, index):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word(builder, *args), "seq_cst", 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _store(typingctx, control, index, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[2], _word(builder, *args[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _read_modify_write(operation: str) -> Any:
    @intrinsic
    def update(typingctx, control, index, value):
        def codegen(context, builder, signature, args):
            return builder.atomic_rmw(operation, _word(builder, *args[:2]), args[2], "seq_cst")

        return types.int64(types.int64, types.int64, types.int64), codegen

    return update


_fetch_add = _read_modify_write("add")
_fetch_and = _read_modify_write("and")
_exchange = _read_modify_write("xchg")


@intrinsic
def _compare_and_swap(typingctx, control, index, expected, value):
    def codegen(context, builder, signature, args):
        word = _word(builder, *args[:2])
        pair = builder.cmpxchg(word, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            nothing = ir.FunctionType(ir.VoidType(), [])
            pause = cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause")
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _call(typingctx, function, arguments, unit):
    """Call an outlined body by its address; 0 when it went well."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(I32, [I64, I64])
        function = builder.inttoptr(args[0], function_type.as_pointer())
        return builder.zext(builder.call(function, args[1:]), I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def _outline(typingctx, body, arguments):
    """Addresses of ``body`` as int32(int64 arguments, int64 unit), and of its arguments.

    ``body`` is a compiled function of (tuple, int64). The arguments lie on the caller's stack and
    live as long as the caller runs.
    """
    signature = types.UniTuple(types.int64, 2)(body, arguments)
    body.get_call_type(typingctx, (arguments, types.int64), {})

    def codegen(context, builder, signature, args):
        compiled = body.dispatcher.overloads[arguments, types.int64]
        context.add_linking_libs([compiled.library])
        place = cgutils.alloca_once_value(builder, args[1])

        module = builder.module
        name = module.get_unique_name("outlined." + compiled.fndesc.mangled_name)
        function = ir.Function(module, ir.FunctionType(I32, [I64, I64]), name)
        function.linkage = "internal"
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        held = inner.load(inner.inttoptr(function.args[0], place.type))
        callee = context.declare_function(module, compiled.fndesc)
        status, _ = context.call_conv.call_function(
            inner,
            callee,
            compiled.signature.return_type,
            compiled.signature.args,
            [held, function.args[1]],
        )
        inner.ret(inner.zext(status.is_error, I32))
        addresses = [builder.ptrtoint(function, I64), builder.ptrtoint(place, I64)]
        return context.make_tuple(builder, signature.return_type, addresses)

    return signature, codegen


@njit(**INNER)
def _draw_units(control, function, arguments, units):
    unit = _fetch_add(control, _NEXT, 1)
    while unit < units:
        if _call(function, arguments, unit) != 0:
            _store(control, _FAILED, 1)
        unit = _fetch_add(control, _NEXT, 1)


@njit("void(int64)", **JIT)
def _serve(control):
    """A helper's life: take part in every job it sees in time, until told to stop."""
    done = 0
    spins = 0
    while _load(control, _STOP) == 0:
        state = _load(control, _STATE)
        if state & _OPEN and state >> 16 != done:
            # While this helper counts as active the launcher does not retire the job, so
            # the words that describe it stay valid. Another job number makes the swap fail.
            if _compare_and_swap(control, _STATE, state, state + 1):
                done = state >> 16
                function = _load(control, _FUNCTION)
                arguments = _load(control, _ARGUMENTS)
                _draw_units(control, function, arguments, _load(control, _UNITS))
                _fetch_add(control, _STATE, -1)
                spins = 0
            continue
        spins += 1
        if spins < _SPINS:
            _pause()
            # Only there: on a core of its own, a yield would hand it to another program for
            # milliseconds, and the helper would miss every kernel of the step.
            if spins % _YIELD_EVERY == 0 and _sched_getcpu() == _load(control, _LAUNCHER_CORE):
                _sched_yield()
            continue
        # Announce the sleep, then look once more: a launcher opens its job first and looks for
        # sleepers afterwards, so one of the two sees the other. A post too many is harmless.
        _fetch_add(control, _SLEEPERS, 1)
        state = _load(control, _STATE)
        if not (state & _OPEN and state >> 16 != done) and _load(control, _STOP) == 0:
            _sem_wait(control + _SEMAPHORE * 8)
        spins = 0


@njit(**INNER)
def _run(control, function, arguments, units):
    """Run all units; return when they are done. True when each went well."""
    alone = units < 2 or _load(control, _THREADS) < 2
    if alone or not _compare_and_swap(control, _LAUNCHING, 0, 1):
        # One launch at a time: a second thread of the process computes by itself.
        failed = 0
        for unit in range(units):
            failed |= _call(function, arguments, unit)
        return failed == 0
    _store(control, _FAILED, 0)
    _store(control, _FUNCTION, function)
    _store(control, _ARGUMENTS, arguments)
    _store(control, _UNITS, units)
    _store(control, _NEXT, 0)
    _store(control, _LAUNCHER_CORE, _sched_getcpu())
    _store(control, _STATE, ((_load(control, _STATE) >> 16) + 1) << 16 | _OPEN)
    for _ in range(_exchange(control, _SLEEPERS, 0)):
        _sem_post(control + _SEMAPHORE * 8)
    _draw_units(control, function, arguments, units)
    _fetch_and(control, _STATE, ~_OPEN)
    waits = 0
    while _load(control, _STATE) & _ACTIVE:
        _pause()
        waits += 1
        if waits % _YIELD_EVERY == 0:
            _sched_yield()
    well = _load(control, _FAILED) == 0
    _store(control, _LAUNCHING, 0)
    return well


@njit(**INNER)
def fork_join(control, body, arguments, units):
    """Call ``body(arguments, unit)`` for every unit in ``range(units)``, on all threads.

    ``body`` must be a compiled function of a tuple and an int64, and units must write to
    different places.
    """
    function, place = _outline(body, arguments)
    if not _run(control, function, place, units):
        raise MemoryError("a kernel could not allocate its scratch memory")


@njit(**INNER)
def num_threads(control):
    """Threads that take part in a job, the launching one included."""
    return _load(control, _THREADS)


class ThreadTeam:
    """The launching thread and ``num_threads - 1`` helpers; ``control`` goes to ``fork_join``."""

    def __init__(self, num_threads: int) -> None:
        """Start the helpers. ``ValueError`` unless ``num_threads`` is 1 to 1024."""
        if not 1 <= num_threads <= 1024:
            raise ValueError(f"num_threads must be 1 to 1024, got {num_threads}")
        words = np.zeros(_WORDS + 16, np.int64)
        # On a cache line boundary, so that the spacing of the words means something.
        offset = -words.ctypes.data % 128 // 8
        self._words = words[offset : offset + _WORDS]
        self.control = int(self._words.ctypes.data)
        self.num_threads = num_threads
        self._words[_THREADS] = num_threads
        self._libc = ctypes.CDLL(None, use_errno=True)
        if self._libc.sem_init(ctypes.c_void_p(self.control + _SEMAPHORE * 8), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init: unnamed semaphores are not available")
        self._helpers = [
            threading.Thread(target=_serve, args=(self.control,), name=f"compute-{i}", daemon=True)
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()
        # A helper must not outlive the memory it looks at.
        atexit.register(self.close)

    def close(self) -> None:
        """End the helpers; later launches run on the caller alone. Calling it twice is fine."""
        atexit.unregister(self.close)
        self._words[_THREADS] = 1
        self._words[_STOP] = 1
        for _ in self._helpers:
            self._libc.sem_post(ctypes.c_void_p(self.control + _SEMAPHORE * 8))
        for helper in self._helpers:
            helper.join()
        self._helpers = []


def default_num_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
