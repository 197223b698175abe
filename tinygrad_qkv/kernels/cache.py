"""The disk cache of compiled kernels: one checked file for each kernel, form and dtype.

Everything that numba calls private stays in this file and in compile.py.
"""

import hashlib
import io
import os
import pickle
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.environment import Environment, _rebuild_env, lookup_environment
from numba.core.runtime import rtsys
from numba.core.serialize import dumps as _dumps

from tinygrad_qkv.kernels import progress

SUFFIX = ".kernel"


class Stored(NamedTuple):
    """A kernel's file: whether it is what the sources would give now, its size, and what compiling it took."""

    current: bool
    size: int
    seconds: float


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


class KernelCache(FunctionCache):
    """numba's disk cache with three differences: a stamp of all kernel files, checked contents, and no exceptions.

    numba stamps the file of the function alone, so an edited building block in another file would run stale.
    """

    def __init__(self, function: Any, name: str, form: str) -> None:
        self.folder: str | None = None
        self._label = f"{name} ({form})"
        self._cache_path: str | None = None
        self._started = 0.0
        try:
            super().__init__(function)
        except Exception:  # no folder can be written: RuntimeError or OSError, from any of numba's locators
            return
        if _STAMP is not None:
            self.folder = self._impl.locator.get_cache_path()
            self._cache_file = _OverloadFiles(Path(self.folder), f"{name}-{form}", _STAMP)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function from disk, or None, upon which numba compiles it."""
        loaded = self._loaded(sig, target_context)
        if loaded is None:
            progress.begin(self._label)
            self._started = time.perf_counter()
        return loaded

    def _loaded(self, sig: Any, target_context: Any) -> Any:
        """What numba's own method does, but for `target_context.refresh()`.

        That fills numba's tables of all that it can compile, and imports SciPy's BLAS: 0.2 s which only a compilation
        needs, and does then. Code from disk needs the runtime alone.
        """
        if self.folder is None:
            return None
        try:
            rtsys.initialize(target_context)
            data = self._cache_file.load(self._index_key(sig, target_context.codegen()))
            return data and self._impl.rebuild(target_context, data)
        except Exception:  # unreadable, or made by something else: compile anew
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the compiled function on disk where that is possible."""
        seconds = time.perf_counter() - self._started
        progress.end(self._label, seconds, self.folder)
        if self.folder is None:
            return
        self._cache_file.seconds = seconds
        try:
            super().save_overload(sig, data)
        except Exception:  # a full or read-only disk, or a folder that went away: the code stays in memory
            return

    def stored(self, sig: Any, target_context: Any) -> Stored | None:
        """What lies on disk for the signature, if anything."""
        if self.folder is None:
            return None
        return self._cache_file.stored(self._index_key(sig, target_context.codegen()))


class _OverloadFiles:
    """One file for each compiled signature: a digest of stamp, key and contents; seconds to compile; the contents.

    numba's own format has an index beside the data; two processes that fill it at once can swap each other's entries.
    A stale and a damaged file fail the same check, and the next compilation overwrites them.
    """

    def __init__(self, folder: Path, stem: str, stamp: bytes) -> None:
        self.seconds = 0.0  # what the next object to be saved took to compile
        self._folder = folder
        self._stem = stem
        self._stamp = stamp

    def load(self, key: Any) -> Any:
        """The object saved under the key, or None where it is missing, stale or damaged."""
        try:
            contents = self._path(key).read_bytes()
        except OSError:
            return None
        return _Unpickler(io.BytesIO(contents[40:])).load() if self._fits(key, contents) else None

    def stored(self, key: Any) -> Stored | None:
        """What the file says of itself, or None where there is none."""
        try:
            contents = self._path(key).read_bytes()
        except OSError:
            return None
        fits = self._fits(key, contents)
        return Stored(fits, len(contents), struct.unpack("<d", contents[32:40])[0] if fits else 0.0)

    def save(self, key: Any, obj: Any) -> None:
        """Write the object under the key, whole or not at all."""
        data = struct.pack("<d", self.seconds) + _dumps(obj)
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
        return self._folder / f"{self._stem}.{hashlib.sha256(name.encode()).hexdigest()[:16]}{SUFFIX}"

    def _fits(self, key: Any, contents: bytes) -> bool:
        return contents[:32] == self._digest(key, contents[32:])

    def _digest(self, key: Any, data: bytes) -> bytes:
        return hashlib.sha256(self._stamp + repr(key).encode() + data).digest()


class _Unpickler(pickle.Unpickler):
    """Makes numba's objects again, without importing for each function the file that it came from.

    Only a compilation needs those: numba's own np.finfo comes from a file that imports SciPy's linear algebra, which
    took 0.12 s of the 0.66 s of a fresh process with a first gradient, and 0.05 s more at its end.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _environment if found is _rebuild_env else found


def _environment(module: str, constants: list[Any], name: str) -> Environment:
    """What numba keeps beside a function: constants, and the globals, which code that needs no Python never reads."""
    found = lookup_environment(name)
    if found is None:
        loaded = sys.modules.get(module)
        found = Environment({"__name__": module} if loaded is None else vars(loaded))
        found.consts[:] = constants
        found.env_name = name
        Environment._memo[name] = found
    return found
