"""The one decorator for all kernels.

Two kinds of function carry it. `@kernel` alone makes a building block, which other kernels call and which is compiled
into them. `@kernel(arguments=...)` makes a kernel that Python calls: compiled once a dtype, when first called, for the
argument types written there, so that a read-only or a strided array never costs another compilation.

Everything that numba calls private stays in this file and in cache.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from numba.core import codegen, types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import register_jitable

from tinygrad_qkv.kernels import threads
from tinygrad_qkv.kernels.cache import KernelCache, Stored
from tinygrad_qkv.locks import fork_safe_lock

JIT = not numba.config.DISABLE_JIT
# nogil: other Python threads go on meanwhile. numpy's error model: x / 0 is inf, and no test for it stops a loop from
# being vectorised. There is no fastmath: it would assume away the NaN and inf that masks feed in, and change the order
# of sums. Where a product may be fused with a sum, the instruction says so itself (vectors.CONTRACT).
OPTIONS = {"nogil": True, "error_model": "numpy"}


def host_features() -> frozenset[str]:
    """Names of the CPU features that numba compiles for, such as "avx2" and "fma"."""
    text = numba.config.CPU_FEATURES
    if text is None:
        text = codegen.get_host_cpu_features()
    return frozenset(word[1:] for word in text.split(",") if word.startswith("+"))


def array_in(scalar: types.Type, ndim: int, layout: str = "C") -> types.Array:
    """The type of an array that a kernel reads: writable ones fit too, and layout "A" takes any strides."""
    return types.Array(scalar, ndim, layout, readonly=True)


def array_out(scalar: types.Type, ndim: int, layout: str = "C") -> types.Array:
    """The type of an array that a kernel writes."""
    return types.Array(scalar, ndim, layout)


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    arguments: Callable[[types.Type], tuple[types.Type, ...]] | None = None,
    plain: Callable[..., Any] | None = None,
) -> Any:
    """Compile a function with numba; see the module's docstring for the two kinds.

    `arguments` maps the float type (of the first argument) to the types of all arguments.
    `plain` is what runs in place of the function under NUMBA_DISABLE_JIT, where a loop over elements would crawl.
    """
    if function is None:
        return lambda f: kernel(f, arguments=arguments, plain=plain)
    if arguments is not None:
        return Kernel(function, arguments).run
    if not JIT:
        return plain or function
    # Not njit: the code by which Python would call each part is a fifth of what attention takes to compile.
    _PARTS.add(function.__name__)
    return register_jitable(**OPTIONS)(function)


class Kernel:
    """A function that Python calls, compiled when first called with a dtype, in a parallel and in a serial form.

    Both forms run the same loops and give the same bits. The serial one is for small work, and for processes in which
    a parallel region would be fatal.
    """

    def __init__(self, function: Callable[..., Any], arguments: Callable[..., Any]) -> None:
        self.function = function
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self.has_threads = "prange" in function.__code__.co_names  # without, the serial form is all that is called
        self._arguments = arguments
        self._compiled: tuple[dict[int, Any], dict[int, Any]] = {}, {}  # serial and parallel, by the dtype's number
        KERNELS[self.name] = self

    def run(self, *args: Any, parallel: bool) -> None:
        """Run the kernel; `parallel` comes from the size rules in `threads.PARALLEL_FROM`.

        This bound method is what `@kernel` leaves in the function's place: calling an object would cost 0.2 us more.
        """
        if not JIT:
            with np.errstate(all="ignore"):  # compiled code does not warn of inf and NaN either
                self.function(*args)
            return
        dtype = args[0].dtype
        if not parallel or threads.serial_process:
            (self._compiled[0].get(dtype.num) or self.form(dtype, False))(*args)
        else:
            threads.run(self._compiled[1].get(dtype.num) or self.form(dtype, True), args)

    def form(self, dtype: np.dtype, parallel: bool) -> Any:
        """The compiled form for a dtype, from memory, disk or the compiler."""
        forms = self._compiled[parallel]
        with _compiling:
            if dtype.num not in forms:
                if parallel:
                    threads.start()
                assert self.function.__name__ not in _PARTS, f"{self.name} has the name of a building block"
                dispatcher, types_of_arguments = self._uncompiled(dtype, parallel)
                with _each_part_once(dispatcher.targetctx.codegen()):
                    dispatcher.compile(types_of_arguments)
                # From here on arguments are converted to the types compiled for, and never cause a compilation.
                dispatcher.disable_compile()
                forms[dtype.num] = dispatcher
            return forms[dtype.num]

    def stored(self, dtype: np.dtype, parallel: bool) -> Stored | None:
        """What lies in the disk cache for this form, if anything."""
        dispatcher, types_of_arguments = self._uncompiled(dtype, parallel)
        return dispatcher._cache.stored(types_of_arguments, dispatcher.targetctx)

    def cache_folder(self) -> str | None:
        """Where the compiled forms are kept; None where no folder can be written."""
        return KernelCache(self.function, self.name, "serial").folder

    def _uncompiled(self, dtype: np.dtype, parallel: bool) -> tuple[Any, tuple[types.Type, ...]]:
        dispatcher = numba.njit(self.function, parallel=parallel, **OPTIONS)
        dispatcher._cache = KernelCache(self.function, self.name, "parallel" if parallel else "serial")
        return dispatcher, self._arguments(numba.from_dtype(dtype))


class _Library(codegen.JITCodeLibrary):
    """Numba's unit of code, but for what becomes a part of another unit and of nothing else.

    Building blocks are such parts, and so are a parallel loop's body, a wrapper around it and one around that, each
    linked into the next and the last into the kernel. Numba translates each to machine code, and optimises what a loop
    calls four times; once, in the kernel, is enough. That is a third of the time that matmul and attention take.
    """

    def _optimize_final_module(self) -> None:
        if not self._is_wrapper() and not self.name.startswith("__numba_parfor_gufunc"):
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if self._is_wrapper() or self.name in _PARTS:
            self._finalize_dynamic_globals()
            self._finalized = True
        else:
            super()._finalize_final_module()

    def _is_wrapper(self) -> bool:
        return self.name == "parallelgufuncwrapper" or "_GufuncWrapper object" in self.name


@contextlib.contextmanager
def _each_part_once(units: Any) -> Iterator[None]:
    """Let numba make its units of code as `_Library` meanwhile; what it did not translate has no place in memory."""

    def set_env(name: str, env: Any) -> None:
        if units._engine.get_global_value_address(name):
            type(units).set_env(units, name, env)

    with global_compiler_lock:
        before, units._library_class, units.set_env = units._library_class, _Library, set_env
        try:
            yield
        finally:
            units._library_class = before
            del units.set_env


_PARTS: set[str] = set()  # names of the building blocks
KERNELS: dict[str, Kernel] = {}  # every kernel of the files that are imported, as "file.function"
_compiling = fork_safe_lock()
