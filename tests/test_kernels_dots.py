"""Dot products with many rows: every edge of rows and lanes, exactly, with nothing read or written around them."""

import itertools

import numpy as np
import pytest

from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.dots import ROWS, dots
from tinygrad_qkv.kernels.simd import VECTOR_BYTES

RNG = np.random.default_rng(0)


@kernel(arguments=lambda scalar: (array_in(scalar, 2, "A"), array_in(scalar, 1), array_out(scalar, 1)))
def products(a, x, out):
    """out = a x."""
    dots(a, x, out)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_whole_numbers_are_exact_at_every_edge(dtype):
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    for rows, length in itertools.product(range(2 * ROWS + 2), (0, 1, lanes - 1, lanes, lanes + 1, 5 * lanes + 3)):
        whole, x = np.full((rows + 2, length + 6), np.nan, dtype), np.full(length + 6, np.nan, dtype)
        a, x = whole[1:-1, 3:-3], x[3:-3]
        a[...], x[...] = RNG.integers(-9, 10, a.shape), RNG.integers(-9, 10, length)
        for given in (a, a[::-1]):
            around = np.full(rows + 6, 77, dtype)
            products(given, x, around[3:-3], parallel=False)
            np.testing.assert_array_equal(around[3:-3], given @ x)
            assert (around[:3] == 77).all() and (around[rows + 3 :] == 77).all()


def test_nan_and_inf_mean_what_they_mean_in_a_sum():
    a, x, out = np.ones((4, 19), np.float32), np.ones(19, np.float32), np.empty(4, np.float32)
    a[0, 18], a[1, 3], a[2, 2], a[2, 17] = np.nan, np.inf, np.inf, -np.inf
    products(a, x, out, parallel=False)
    np.testing.assert_array_equal(out, [np.nan, np.inf, np.nan, 19])
