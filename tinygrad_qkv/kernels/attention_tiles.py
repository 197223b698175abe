"""Building blocks of fused attention on tiles, the small matrices that stay in the cache.

A pass over a tile is one function, so that constants stay in registers over all its rows: row by row, loading them
costs more than a row of 128 elements.
"""

import numpy as np

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.passes import row_pass
from tinygrad_qkv.kernels.rows import row_max, row_times

# What tile_product does to its result. A literal True or False would be a type of its own, and another compilation.
ADD, SET = np.True_, np.False_


@kernel
def scratch(size, like):
    """`size` elements of the dtype of `like`, from the start of a cache line."""
    room = np.empty(size + 64 // like.itemsize, like.dtype)
    start = (-room.ctypes.data % 64) // like.itemsize
    return room[start : start + size]


@kernel
def matrix(room, rows, columns):
    """The first rows * columns elements of a flat array as a matrix."""
    return room[: rows * columns].reshape((rows, columns))


@kernel
def tile_max(x, out):
    """out[i] = max(x[i])."""
    for i in range(x.shape[0]):
        out[i] = row_max(x[i])


@row_pass(into=1, folds=(np.add,))
def _exp_scaled(x, scale, shift, lowest):
    # The maximum keeps product and difference apart: fused, they would not leave 0 of the row's largest score.
    e = np.exp(np.maximum(lowest, x * scale) - shift)
    return e, e


@kernel
def tile_exp(x, scale, shift, sums):
    """x[i] = exp(x[i] * scale - shift[i]); sums[i] = sum(x[i])."""
    lowest = np.finfo(x.dtype).min
    for i in range(x.shape[0]):
        sums[i] = _exp_scaled(x[i], scale, shift[i], lowest, x[i])


def _tile_times_plain(x, factor):
    x *= factor


@kernel(plain=_tile_times_plain)
def tile_times(x, factor):
    """x *= factor."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] *= factor


@kernel
def rows_times(x, factors):
    """x[i] *= factors[i], rows with factor 1 left alone."""
    for i in range(x.shape[0]):
        if factors[i] != 1:
            row_times(x[i], factors[i], x[i])


def _softmax_pullback_plain(weights, x, mean, scale):
    x[...] = weights * (x - mean[:, None]) * scale


@kernel(plain=_softmax_pullback_plain)
def tile_softmax_pullback(weights, x, mean, scale):
    """x[i] = weights[i] * (x[i] - mean[i]) * scale."""
    for i in range(x.shape[0]):
        m = mean[i]
        for j in range(x.shape[1]):
            x[i, j] = weights[i, j] * (x[i, j] - m) * scale
