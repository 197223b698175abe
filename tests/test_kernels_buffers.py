"""Buffers that are used again: never while anyone sees them, within the limit, and safe wherever a loan ends."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from tinygrad_qkv import Tensor
from tinygrad_qkv.kernels import buffers
from tinygrad_qkv.kernels.buffers import empty, empty_lines, free_buffers, is_whole, streamed

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
SHAPE = 521, 1031  # 2.1 MB in float32


@pytest.fixture(autouse=True)
def _nothing_waits():
    free_buffers()
    yield
    free_buffers()


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), SHAPE, (2, 3, 257, 521), (2**18,), (2**18 + 1,)], ids=str)
def test_an_array_is_as_np_empty_makes_it(shape, dtype):
    array, plain = empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.strides, array.dtype) == (plain.shape, plain.strides, plain.dtype)
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    assert is_whole(array) and not is_whole(array[...])
    array[...] = 7
    assert np.all(array == 7)


def test_large_arrays_start_a_cache_line():
    arrays = [empty((2**18 + i,), FLOAT32) for i in range(5)]
    assert [address(array) % 64 for array in arrays] == [0] * 5


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 13)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_small_arrays_may_start_a_cache_line_too(shape, dtype):
    array = empty_lines(shape, np.dtype(dtype))
    assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous and array.flags.writeable
    assert not array.size or address(array) % 64 == 0


def test_large_results_of_whole_lines_are_streamed(monkeypatch):
    monkeypatch.setattr(buffers, "STREAM_FROM", 3 * 128)
    assert streamed(empty_lines((3, 32), np.dtype(np.float32)))
    assert not streamed(empty_lines((2, 32), np.dtype(np.float32)))
    assert not streamed(empty_lines((13, 31), np.dtype(np.float32)))
    assert not streamed(empty_lines((4 * 32 + 1,), np.dtype(np.float32))[1:].reshape(4, 32))


def test_a_buffer_is_used_again_when_the_last_view_is_gone():
    array = empty(SHAPE, FLOAT32)
    place = address(array)
    del array
    again = empty(SHAPE, FLOAT32)
    assert address(again) == place
    views = [
        again[5:],
        again.T,
        again.reshape(-1),
        again.view(np.int32),
        memoryview(again),
        np.asarray(again.base),
        Tensor.from_numpy(again).numpy(),
        np.from_dlpack(again),
    ]
    del again
    while views:
        views.pop()
        other = empty(SHAPE, FLOAT32)
        assert (address(other) == place) == (not views)


def test_sizes_that_are_close_share_buffers():
    place = address(empty((2**20,), FLOAT32))
    assert address(empty((2**20 - 1000,), FLOAT32)) == place
    assert address(empty((2**19,), FLOAT64)) == place
    assert free_buffers() == 2**22 + 64


def test_what_waits_stays_below_the_limit(monkeypatch):
    monkeypatch.setattr(buffers, "LIMIT", 10 * 2**20)
    arrays = [empty((2**18,), FLOAT32) for _ in range(20)]  # 1 MB each
    del arrays
    assert free_buffers() == 9 * (2**20 + 64)


def test_the_size_longest_out_of_use_goes_first(monkeypatch):
    monkeypatch.setattr(buffers, "LIMIT", 7 * 2**20)
    small, middle = empty((2**18,), FLOAT32), empty((2**19,), FLOAT32)
    del small, middle
    place = address(empty((2**18,), FLOAT32))  # in use again, so that the middle one is now the oldest
    large = empty((5 * 2**18,), FLOAT32)
    del large
    assert address(empty((2**18,), FLOAT32)) == place
    assert free_buffers() == 6 * 2**20 + 2 * 64


def test_a_buffer_larger_than_the_limit_goes_back_to_the_system(monkeypatch):
    monkeypatch.setattr(buffers, "LIMIT", 2**20)
    empty(SHAPE, FLOAT32)
    assert free_buffers() == 0


def test_a_loan_may_end_while_the_pool_is_at_work():
    """As when the garbage collector runs inside it: the buffer goes, and nothing hangs."""
    array = empty(SHAPE, FLOAT32)
    with buffers._pool.lock:
        del array
        array = empty(SHAPE, FLOAT32)
    assert free_buffers() == 0
    del array
    assert free_buffers() > 0


def test_loans_in_reference_cycles_end_too():
    cycle = [empty(SHAPE, FLOAT32)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert free_buffers() > 0


def test_threads_never_get_the_same_buffer():
    wrong = []

    def work(number):
        for i in range(200):
            array = empty((2**18,), FLOAT32)
            array[:: 2**10] = number + i
            if np.any(array[:: 2**10] != number + i):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert free_buffers() <= 6 * (2**20 + 64)


def test_gradients_and_results_of_training_keep_their_values():
    rng = np.random.default_rng(0)
    x = Tensor(rng.normal(size=SHAPE), requires_grad=True)
    kept = []
    for _ in range(4):
        x.grad = None
        y = x.softmax(-1)
        (y * y).sum().backward()
        kept.append((y.numpy(), x.grad.numpy()))
        copies = [(a.copy(), b.copy()) for a, b in kept[:1]]
    for (y, g), (y0, g0) in zip(kept, copies * 4, strict=True):
        np.testing.assert_array_equal(y, y0)
        np.testing.assert_array_equal(g, g0)
    places = [address(a) for pair in kept for a in pair]
    assert len(set(places)) == len(places)


FORK = """
import os, threading
import numpy as np
from tinygrad_qkv.kernels import buffers
from tinygrad_qkv.kernels.buffers import empty

array = empty((2**20,), np.dtype(np.float32))
array[...] = 1
buffers._pool.lock.acquire()  # as by a thread that is in the pool at that moment
child = os.fork()
if not child:
    other = empty((2**20,), np.dtype(np.float32))
    other[...] = 2
    ok = array[0] == 1 and buffers.free_buffers() == 0
    del array, other
    os._exit(0 if ok and buffers.free_buffers() == 2 * (2**22 + 64) else 1)
print(os.waitpid(child, 0)[1], array[0])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_has_a_pool_of_its_own():
    process = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stdout) == (0, "0 1.0\n"), process.stderr


def test_the_end_of_the_interpreter_is_silent():
    code = "import numpy as np; from tinygrad_qkv.kernels.buffers import empty; a = empty((2**20,), np.dtype('f'))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (process.returncode, process.stderr) == (0, "")
