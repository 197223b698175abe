"""The one decorator for all kernels, and the disk cache of what it compiles.

Two kinds of function carry it. `@kernel` alone makes a building block, which other kernels call and which is compiled
into them. `@kernel(arguments=...)` makes a kernel that Python calls: compiled once a dtype, when first called, for the
argument types written there, so that a read-only or a strided array never costs another compilation.

Everything here that numba calls private stays in this file.
"""

import functools
import hashlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import codegen, types
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps as _dumps

from tinygrad_qkv.kernels import threads
from tinygrad_qkv.locks import fork_safe_lock

JIT = not numba.config.DISABLE_JIT


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
    fastmath: frozenset[str] = frozenset(),
    plain: Callable[..., Any] | None = None,
) -> Any:
    """Compile a function with numba; see the module's docstring for the two kinds.

    `arguments` maps the float type (of the first argument) to the types of all arguments.
    `fastmath` names the liberties that LLVM may take; the reason stands beside each use.
    `plain` is what runs in place of the function under NUMBA_DISABLE_JIT, where a loop over elements would crawl.
    """
    if function is None:
        return lambda f: kernel(f, arguments=arguments, fastmath=fastmath, plain=plain)
    if arguments is not None:
        return Kernel(function, arguments, fastmath)
    if not JIT:
        return plain or function
    return numba.njit(function, **_options(fastmath))


def _options(fastmath: frozenset[str]) -> dict[str, Any]:
    # nogil: other Python threads go on meanwhile. numpy's error model: x / 0 is inf, and no test for it stops a loop
    # from being vectorised.
    return {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath) or False}


class Kernel:
    """A function that Python calls, compiled when first called with a dtype, in a parallel and in a serial form.

    Both forms run the same loops and give the same bits. The serial one is for small work, and for processes in which
    a parallel region would be fatal.
    """

    def __init__(self, function: Callable[..., Any], arguments: Callable[..., Any], fastmath: frozenset[str]) -> None:
        self.function = function
        functools.update_wrapper(self, function)
        self._arguments = arguments
        self._fastmath = fastmath
        self._compiled: dict[tuple[np.dtype, bool], Callable[..., Any]] = {}

    def __call__(self, *args: Any, parallel: bool) -> None:
        """Run the kernel; `parallel` comes from the size rules in `threads.PARALLEL_FROM`."""
        if not JIT:
            with np.errstate(all="ignore"):  # compiled code does not warn of inf and NaN either
                self.function(*args)
        elif parallel and threads.can_run_parallel():
            with threads.parallel_region:
                self._form(args[0].dtype, True)(*args)
        else:
            self._form(args[0].dtype, False)(*args)

    def _form(self, dtype: np.dtype, parallel: bool) -> Callable[..., Any]:
        """The compiled form for a dtype."""
        form = self._compiled.get((dtype, parallel))
        if form is None:
            with _compiling:
                form = self._compiled.get((dtype, parallel)) or self._compile(dtype, parallel)
                self._compiled[dtype, parallel] = form
        return form

    def _compile(self, dtype: np.dtype, parallel: bool) -> Callable[..., Any]:
        dispatcher = numba.njit(self.function, parallel=parallel, **_options(self._fastmath))
        dispatcher._cache = _Cache(self.function, "parallel" if parallel else "serial")
        dispatcher.compile(self._arguments(numba.from_dtype(dtype)))
        # From here on arguments are converted to the types compiled for, and never cause a compilation.
        dispatcher.disable_compile()
        return dispatcher


_compiling = fork_safe_lock()


def _hash_of_sources() -> bytes | None:
    """A hash of all that compiled code depends on: every file of this folder, and the compilers.

    None where the files cannot be read, as in a zip archive: what cannot be stamped is not cached.
    """
    sha = hashlib.sha256()
    try:
        sources = [(path.name, path.read_bytes()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    except OSError:
        return None
    for name, text in sources:
        sha.update(f"{name} {len(text)} ".encode() + text)
    settings = (numba.config.OPT, numba.config.BOUNDSCHECK, numba.config.LOOP_VECTORIZE, numba.config.SLP_VECTORIZE)
    sha.update(repr((numba.__version__, llvmlite.__version__, np.__version__, *map(str, settings))).encode())
    return sha.digest() if sources else None


# Taken at import, before the kernels' own files are read: code edited later must not be filed under the new stamp.
_STAMP = _hash_of_sources()


class _Cache(FunctionCache):
    """numba's disk cache with three differences: a stamp of all kernel files, checked contents, and no exceptions.

    numba stamps the file of the function alone, so an edited building block in another file would run stale.
    """

    def __init__(self, function: Callable[..., Any], form: str) -> None:
        self._folder: str | None = None
        self._cache_path: str | None = None
        self._started = time.perf_counter()
        try:
            super().__init__(function)
        except Exception:  # no folder can be written: RuntimeError or OSError, from any of numba's locators
            return
        if _STAMP is not None:
            self._folder = self._impl.locator.get_cache_path()
            stem = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}-{form}"
            self._cache_file = _OverloadFiles(Path(self._folder), stem, _STAMP)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function from disk, or None."""
        self._started = time.perf_counter()
        if self._folder is None:
            target_context.refresh()
            return None
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unreadable, or made by something else: compile anew
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the compiled function on disk where that is possible."""
        _say_that_compiling_takes_time(time.perf_counter() - self._started, self._folder)
        if self._folder is None:
            return
        try:
            super().save_overload(sig, data)
        except Exception:  # a full or read-only disk, or a folder that went away: the code stays in memory
            return


class _OverloadFiles:
    """One file for each compiled signature: a digest of stamp, key and contents, then the contents.

    numba's own format has an index beside the data; two processes that fill it at once can swap each other's entries.
    A stale and a damaged file fail the same check, and the next compilation overwrites them.
    """

    def __init__(self, folder: Path, stem: str, stamp: bytes) -> None:
        self._folder = folder
        self._stem = stem
        self._stamp = stamp

    def load(self, key: Any) -> Any:
        """The object saved under the key, or None where it is missing, stale or damaged."""
        try:
            contents = self._path(key).read_bytes()
        except OSError:
            return None
        digest, data = contents[:32], contents[32:]
        return pickle.loads(data) if digest == self._digest(key, data) else None

    def save(self, key: Any, obj: Any) -> None:
        """Write the object under the key, whole or not at all."""
        data = _dumps(obj)
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(self._digest(key, data) + data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, key: Any) -> Path:
        # The key's last part, a hash of the bytecode, stays out of the name: an edited function overwrites its file.
        name = repr((key[:2], numba.__version__, sys.version_info[:2], getattr(sys, "abiflags", "")))
        return self._folder / f"{self._stem}.{hashlib.sha256(name.encode()).hexdigest()[:16]}.kernel"

    def _digest(self, key: Any, data: bytes) -> bytes:
        return hashlib.sha256(self._stamp + repr(key).encode() + data).digest()


_told = False


def _say_that_compiling_takes_time(seconds: float, folder: str | None) -> None:
    """Print one line on stderr, once a process, when a compilation took over a second."""
    global _told
    if seconds > 1 and not _told:
        _told = True
        keep = f"later runs load them from {folder}" if folder else "no cache folder can be written, so every run does"
        print(f"tinygrad_qkv: compiling numerical kernels for this machine; {keep}", file=sys.stderr, flush=True)
