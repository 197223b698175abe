"""Threads: every layer under several Python threads and forks, and the number of them."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest

from tinygrad_qkv.kernels import get_num_threads, set_num_threads, softmax, threads
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

LAYERS = ["tbb", "omp", "workqueue"]


def run(code, **env):
    """stdout of the code in a fresh process in which kernels are compiled, with these variables set."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_") or k == "NUMBA_CACHE_DIR"}
    process = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, (process.returncode, process.stdout, process.stderr)
    return process.stdout.split()


def needs(layer):
    """Skip where this installation of numba cannot run the layer."""
    if layer == "tbb" and not any(d.name == "tbb" for d in importlib.metadata.distributions()):
        pytest.skip("the tbb wheel exists for x86-64 Linux and Windows only")
    if layer == "omp" and importlib.util.find_spec("numba.np.ufunc.omppool") is None:
        pytest.skip("this build of numba has no OpenMP layer")


WORK = """
import os, sys, threading, time
import numba
import numpy as np
from tinygrad_qkv import kernels as k
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

PARALLEL_FROM.update(dict.fromkeys(PARALLEL_FROM, 1))  # threads for the smallest work too
rng = np.random.default_rng(0)
a, b = rng.standard_normal((2, 90, 90)).astype(np.float32)
x = rng.standard_normal((200, 100)).astype(np.float32)
product, share = k.matmul(a, b), k.softmax(x, 1)

def work(times):
    for _ in range(times):
        assert (k.matmul(a, b) == product).all() and (k.softmax(x, 1) == share).all()

def at_once(count, times):
    failed = []
    def guarded():
        try:
            work(times)
        except BaseException as error:
            failed.append(error)
    threads = [threading.Thread(target=guarded) for _ in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed, failed

print(numba.threading_layer())
"""

FORK = """
def fork():
    "Print whether a forked child computes the same, alone and in threads, within 60 seconds."
    child = os.fork()
    if child == 0:
        try:
            work(5)
            at_once(2, 5)
            os._exit(0)
        finally:
            os._exit(1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        status = "hung"
    print("status", status, flush=True)
    work(5)
"""


@pytest.mark.parametrize("layer", LAYERS)
def test_several_python_threads_at_once(layer):
    needs(layer)
    assert run(WORK + "at_once(4, 50); print('done')", NUMBA_THREADING_LAYER=layer) == [layer, "done"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("layer", LAYERS)
def test_forked_children(layer):
    """From the main thread, from another one, while a third computes, and once more at the end.

    NOTE: the third has its threads by then. A child forked while the C library starts threads, as GNU OpenMP does for
    each Python thread that is new to it, inherits the library's locks as they are, and may wait for them for ever.
    """
    needs(layer)
    code = """
fork()
thread = threading.Thread(target=fork); thread.start(); thread.join()
begun = threading.Event()
busy = threading.Thread(target=lambda: (work(1), begun.set(), work(300)))
busy.start(); begun.wait(); fork(); busy.join()
fork()
"""
    words = run(WORK + FORK + code, NUMBA_THREADING_LAYER=layer)  # with TBB's own remarks among them
    statuses = [words[i + 1] for i, word in enumerate(words) if word == "status"]
    assert statuses == ["0"] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_forked_before_any_kernel_ran():
    code = "import os; from tinygrad_qkv import kernels; child = os.fork()\n" + WORK
    code += "work(3)\nif not child: os._exit(0)\nprint('status', os.waitpid(child, 0)[1])\n"
    assert run(code)[-2:] == ["status", "0"]  # both print the layer before, perhaps into each other's words


def test_tbb_is_chosen_where_its_wheel_is_installed():
    needs("tbb")
    assert run(WORK) == ["tbb"]


BLAS = """
import os, time
alone = set(os.listdir("/proc/self/task"))
import numpy as np
workers = [task for task in os.listdir("/proc/self/task") if task not in alone]  # those of NumPy's BLAS

def busy():
    "Nanoseconds that they ran, once they came to rest: idle ones spin for a while."
    last = None
    while True:
        now = [int(open(f"/proc/self/task/{task}/schedstat").read().split()[0]) for task in workers]
        if now == last:
            return now
        last = now
        time.sleep(0.3)

from tinygrad_qkv import Tensor, kernels as k, nn
from tinygrad_qkv.nn import optim
start = busy()
rng = np.random.default_rng(0)
sizes = (63, 64, 65), (64, 64, 64), (65, 64, 64), (1, 9216, 1), (1, 96, 97), (97, 96, 1), (2, 363, 363), (99, 99, 99)
for m, n, p in sizes:
    for lead in ((), (3,), (40,)):
        a, b = rng.standard_normal((*lead, m, n), np.float32), rng.standard_normal((*lead, n, p), np.float32)
        k.matmul(a, b), k.matmul(a, b[0] if lead else b), k.matmul(a.astype(float), b.astype(float))
        k.matmul(b.swapaxes(-1, -2), a.swapaxes(-1, -2))
block = nn.TransformerBlock(96, 3, activation="gelu")
adam = optim.AdamW(block.parameters(), lr=1e-3)
for T in (3, 40, 130):
    block(Tensor(rng.standard_normal((2, T, 96), np.float32)), is_causal=True).square().sum().backward()
    adam.step()
ours = busy()
big = np.ones((300, 300))
big @ big
def ran(since, until):
    "Whether a worker was woken: it then spins for milliseconds. The system's own bookkeeping takes less."
    return sum(until) - sum(since) > 2_000_000
print(len(workers), "woken" if ran(start, ours) else "still", "seen" if ran(ours, busy()) else "missed")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are watched by Linux's /proc")
def test_nothing_that_we_compute_wakes_the_threads_of_numpys_blas():
    """Its idle workers would spin, and take the cores from ours; a large product shows that waking them is seen."""
    env = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "2")
    workers, ours, numpys = run(BLAS, **env)
    if workers == "0" or numpys == "missed":
        pytest.skip("this NumPy has no threads of its own, or one core only")
    assert ours == "still"


def test_the_number_of_threads_holds_in_every_python_thread(monkeypatch):
    monkeypatch.setattr(threads, "_count", None)
    x = np.ones((PARALLEL_FROM["softmax"], 1), np.float32)
    seen = []

    def compute():
        softmax(x, 1)
        seen.append(get_num_threads())
        if not numba.config.DISABLE_JIT:
            seen.append(numba.get_num_threads())

    set_num_threads(1)
    other = threading.Thread(target=compute)
    other.start()
    other.join()
    compute()
    assert set(seen) == {1}
    if not numba.config.DISABLE_JIT:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


def test_set_num_threads_refuses_what_cannot_be(monkeypatch):
    monkeypatch.setattr(threads, "_count", None)
    most = numba.config.NUMBA_NUM_THREADS
    for n in (0, -1, most + 1):
        with pytest.raises(ValueError, match=rf"1 to {most} threads here; .*NUMBA_NUM_THREADS"):
            set_num_threads(n)
    for n in (1.0, "2", None, True):
        with pytest.raises(TypeError, match="int"):
            set_num_threads(n)
    set_num_threads(np.int64(1))
    assert get_num_threads() == 1
