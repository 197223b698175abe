"""Packing and transposing: every element where it belongs, for edges of the squares in registers and any strides."""

import itertools

import numpy as np
import pytest

from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.panels import pack
from tinygrad_qkv.kernels.simd import VECTOR_BYTES


@kernel(arguments=lambda scalar: (array_in(scalar, 2, "A"), array_out(scalar, 2, "A")))
def packed(source, panel):
    """panel = source."""
    pack(source, panel)


def layouts(x):
    """The same values in every kind of memory order, with NaN between them."""
    yield x
    yield np.ascontiguousarray(x.T).T
    yield np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    wide = np.full((2 * x.shape[0], 3 * x.shape[1]), np.nan, x.dtype)
    wide[::2, ::3] = x
    yield wide[::2, ::3]
    wide[: x.shape[0], : x.shape[1]] = x
    yield wide[: x.shape[0], : x.shape[1]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_panel_holds_the_block_and_nothing_around_it_changes(dtype):
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    sizes = (0, 1, lanes - 1, lanes, lanes + 1, 2 * lanes + 3)
    for shape in itertools.product(sizes, sizes):
        x = np.arange(1, shape[0] * shape[1] + 1).reshape(shape).astype(dtype)
        for source in layouts(x):
            around = np.full((shape[0] + 2, shape[1] + 5), -1, dtype)
            packed(source, around[1:-1, 2:-3], parallel=False)
            np.testing.assert_array_equal(around[1:-1, 2:-3], x)
            around[1:-1, 2:-3] = -1
            assert (around == -1).all()
