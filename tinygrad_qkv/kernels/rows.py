"""Passes over one contiguous row, from which the row kernels are made.

A sum runs in lanes and ends in a tree: its order depends on the length alone.
"""

import numpy as np

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.passes import row_pass

LEAST_ROWS = 32  # of a block whose sums over rows are added up by one task
MOST_BLOCKS = 64


def rows_per_block(rows: int) -> int:
    """How many rows make a block, by which a sum over rows is split."""
    return max(LEAST_ROWS, -(-rows // MOST_BLOCKS))


@row_pass(folds=(np.maximum,))
def row_max(x):
    """max(x), x (n,) with n >= 1. NaN counts for nothing: whoever uses x next meets it again."""
    return x


@row_pass(folds=(np.add,))
def row_sum(x):
    """sum(x)."""
    return x


@row_pass(folds=(np.add,))
def row_sum_above(x, shift):
    """sum(x - shift)."""
    return x - shift


@row_pass(folds=(np.add,))
def row_dot(x, y):
    """sum(x * y)."""
    return x * y


@row_pass(folds=(np.add,))
def row_sum_exp(x, shift):
    """sum(exp(x - shift))."""
    return np.exp(x - shift)


@row_pass(into=1, folds=(np.add,))
def row_exp_into(x, shift):
    """out = exp(x - shift); returns its sum."""
    e = np.exp(x - shift)
    return e, e


@row_pass(into=1)
def row_times(x, factor):
    """out = x * factor."""
    return x * factor


@kernel(plain=lambda x, out: np.copyto(out, x))
def row_copy(x, out):
    """out = x."""
    for i in range(x.shape[0]):
        out[i] = x[i]


@row_pass(into=1)
def _sum_into(x, y):
    return y + x


@kernel
def row_add(x, out):
    """out += x."""
    _sum_into(x, out, out)
