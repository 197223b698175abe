"""An array at an address is the memory itself, compiled and plain."""

import numba
import numpy as np
import pytest

from tinygrad_qkv.kernels.addresses import array_at


@numba.njit
def double(address, size, like):
    array = array_at(address, size, like)
    array *= 2
    return array.sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_reads_and_writes_go_to_the_array(dtype):
    x = np.arange(7, dtype=dtype)
    total = double(x.ctypes.data + 2 * x.itemsize, 3, np.zeros((1, 1), dtype))
    assert total == 18
    np.testing.assert_array_equal(x, [0, 1, 4, 6, 8, 5, 6])
