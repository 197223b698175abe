"""Gather: a row lookup."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import is_ready, plain, row_numbers
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.rows import row_copy
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

ROWS = 8  # that one task copies
WIDTH = 128  # elements of a row from which two threads are faster


def gather(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """out[n] = x[ids[n]] for x (rows, D) and integer ids (...); IndexError unless each is in [0, rows).

    Little work, narrow rows, dtypes other than float32 and float64, and tables that are not contiguous go to NumPy.
    """
    x = plain(x, "gather")
    if x.ndim != 2:
        raise ValueError(f"gather needs a table of shape (rows, D), got {x.shape}")
    ids = row_numbers(ids, "gather", x.shape[0])
    if not is_ready(x) or x.shape[1] < WIDTH or ids.size * x.shape[1] < PARALLEL_FROM["gather"]:
        return np.take(x, ids, axis=0)
    out = empty((*ids.shape, x.shape[1]), x.dtype)
    _gather_rows(x, ids.reshape(-1), out.reshape(-1, x.shape[1]), parallel=True)
    return out


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 2), array_in(types.int64, 1), array_out(scalar, 2)


@kernel(arguments=_types)
def _gather_rows(x, ids, out):
    """for each group of rows, in parallel: out[n] = x[ids[n]]."""
    for group in prange((ids.shape[0] + ROWS - 1) // ROWS):
        for n in range(group * ROWS, min(group * ROWS + ROWS, ids.shape[0])):
            row_copy(x[ids[n]], out[n])
