"""Threads of the kernels: the layer that runs them, how many there are, and when they are worth waking.

The safe layer is TBB: several Python threads and forked children may use it, and its workers do not spin while idle.
numba does not find the library of the `tbb` wheel by itself, so it is loaded here. Elsewhere OpenMP serves (a forked
child then runs kernels on one thread, since GNU OpenMP kills it otherwise), or numba's workqueue behind a lock (it
aborts the process when two Python threads enter at once).
"""

import contextlib
import ctypes
import importlib.metadata
import os
import threading
from collections.abc import Callable
from typing import Any

import numba

from tinygrad_qkv.locks import fork_safe_lock

# Size rules, by sizes alone so that bits never depend on the machine's load or on the number of threads. Work below
# these runs on one thread: waking another costs more than it saves. Measured with two cores; both forms take equally
# long at these sizes. Units stand beside the numbers.
PARALLEL_FROM = {
    "matmul": 2**20,  # multiply-adds; smaller matrices than 2**18 go to NumPy, see matmul.py
    "matrix_vector": 2**18,  # multiply-adds of a product with a vector, which memory bounds
    "softmax": 2**15,  # elements
    "cross_entropy": 2**15,  # elements
    "layer_norm": 2**15,  # elements
    "rms_norm": 2**16,  # elements
    "scatter": 2**17,  # elements added
    "gather": 2**19,  # elements; fewer go to NumPy
    "elementwise": 2**16,  # elements
    "transcendental": 2**15,  # elements, where a formula is dear: erf, GELU, softplus, SiLU's pullback
    "select": 2**13,  # elements of the mask; fewer go to NumPy
    "reductions": 2**15,  # elements; fewer go to NumPy, but for columns of many rows
    "relu": 2**12,  # elements; fewer go to NumPy, which takes 7 times a kernel's time at 2**16
    "tanh": 2**12,  # elements; fewer go to NumPy
    "adam": 2**17,  # elements
    "dropout": 2**15,  # elements
    "attention": 2**18,  # multiply-adds
}

_count: int | None = None  # what set_num_threads was given; None leaves numba's own setting alone
serial_process = False  # True in a forked child that must not enter a parallel region
tbb_library: str | None = None  # the file that was loaded for the TBB layer
_started = False
_starting = fork_safe_lock()
_turn: Any = None  # a lock on workqueue: one Python thread at a time
_users: set[int] = set()  # idents of the Python threads that ever entered a parallel region
_fork_is_clean = True  # the last fork came from the main thread, and no other living thread was a user


def set_num_threads(n: int) -> None:
    """Let every kernel use `n` threads, whichever Python thread calls it.

    Errors: TypeError unless `n` is an int, ValueError unless 1 <= n <= the number that numba may launch.
    """
    global _count
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"set_num_threads needs an int, got {type(n).__name__}")
    n = n.__index__()
    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= n <= most:
        raise ValueError(
            f"set_num_threads got {n}, but can use 1 to {most} threads here; "
            "the environment variable NUMBA_NUM_THREADS, set before the start of Python, raises the limit"
        )
    _count = n


def get_num_threads() -> int:
    """How many threads the kernels use in this Python thread."""
    if _count is not None:
        return _count
    start()
    return numba.get_num_threads()


def run(form: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """form(*args), a call that wakes threads: as many as was said, and only when the layer can take it."""
    if _count is not None:
        numba.set_num_threads(_count)  # numba keeps the number for each Python thread
    _users.add(threading.get_ident())
    if _turn is None:
        form(*args)
    else:
        with _turn:
            form(*args)


def start() -> None:
    """Launch the threads, on TBB where it is installed, unless the user chose another layer.

    It comes before the first parallel code is compiled or loaded: numba would choose the layer then.
    """
    global _started, _turn
    with _starting:
        if _started:
            return
        if numba.config.THREADING_LAYER not in ("omp", "workqueue"):
            _load_tbb()
        numba.get_num_threads()  # launches the threads
        if numba.threading_layer() == "workqueue":
            _turn = threading.Lock()
        _started = True


def _load_tbb() -> None:
    """Load the library of the `tbb` wheel, so that numba, which asks the loader for it by name, finds it loaded."""
    global tbb_library
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name in ("libtbb.so.12", "tbb12.dll", "libtbb.12.dylib"):
            with contextlib.suppress(OSError):
                library = os.path.realpath(str(file.locate()))
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
                tbb_library = library
                return


def _before_fork() -> None:
    """Note whether TBB can stop its workers, which it can only from the main thread and without another user."""
    global _fork_is_clean
    me = threading.current_thread()
    others = any(thread.ident in _users for thread in threading.enumerate() if thread is not me)
    _fork_is_clean = me is threading.main_thread() and not others


def _after_fork_in_child() -> None:
    """Make the child safe: it has none of the workers, and a lock may be held by a thread that is not in it."""
    global serial_process, _turn
    if _turn is not None:
        _turn = threading.Lock()
    try:
        layer = numba.threading_layer()
    except ValueError:  # no parallel code ran before the fork: the child starts afresh
        return
    serial_process = serial_process or layer == "omp" or (layer == "tbb" and not _fork_is_clean)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
