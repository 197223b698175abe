"""Scatter-add: the pullback of a row lookup."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous, row_numbers
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.rows import row_add
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

STRIP = 128  # columns that one task adds up: whole cache lines, so that threads do not write into the same ones


def scatter_add(g: np.ndarray, ids: np.ndarray, rows: int) -> np.ndarray:
    """out = zeros (rows, D); for n in order: out[ids[n]] += g[n].

    g (N, D), float32 or float64; ids (N,), integers; IndexError unless each is in [0, rows).
    """
    g, ids = contiguous(g, "scatter_add"), row_numbers(ids, "scatter_add", rows)
    if g.ndim != 2 or ids.shape != (len(g),):
        raise ValueError(f"scatter_add needs g of shape (N, D) and ids of shape (N,), got {g.shape} and {ids.shape}")
    out = np.zeros((rows, g.shape[1]), g.dtype)
    if g.size:
        _add_rows(g, ids, out, parallel=g.size >= PARALLEL_FROM["scatter"])
    return out


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 2), array_in(types.int64, 1), array_out(scalar, 2)


@kernel(arguments=_types)
def _add_rows(g, ids, out):
    """for each strip of columns, in parallel: for n in order: out[ids[n], strip] += g[n, strip].

    No two tasks share an element, and each element is added up in the order of n.
    """
    width = g.shape[1]
    for strip in prange((width + STRIP - 1) // STRIP):
        first, last = strip * STRIP, min(strip * STRIP + STRIP, width)
        for n in range(ids.shape[0]):
            row_add(g[n, first:last], out[ids[n], first:last])
