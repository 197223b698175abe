"""Softmax and log-softmax over rows, and over rows so short that they stay in registers, with their pullbacks."""

from collections.abc import Callable

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.passes import row_pass, short_blocks, short_rows
from tinygrad_qkv.kernels.rows import row_dot, row_exp_into, row_max, row_sum, row_sum_exp, row_times
from tinygrad_qkv.kernels.scalars import log


def _row_types(inputs: int) -> Callable[[types.Type], tuple[types.Type, ...]]:
    return lambda scalar: (*[array_in(scalar, 2)] * inputs, array_out(scalar, 2))


@row_pass(into=1)
def weigh(y, g, total):
    """y * (g - total)."""
    return y * (g - total)


@row_pass(into=1)
def shift(x, top, log_total):
    """x - top - log_total."""
    return (x - top) - log_total


@row_pass(into=1)
def less_share(y, g, total):
    """g - exp(y) * total."""
    return g - np.exp(y) * total


@kernel(arguments=_row_types(1))
def softmax_rows(x, y):
    """y[i] = softmax(x[i]), for x and y (rows, n)."""
    for i in prange(x.shape[0]):
        total = row_exp_into(x[i], row_max(x[i]), y[i])  # at least 1: its largest term is exp(0)
        row_times(y[i], 1 / total, y[i])


@kernel(arguments=_row_types(2))
def softmax_pullback_rows(y, g, dx):
    """dx[i] = y[i] * (g[i] - sum(g[i] * y[i])), for y, g and dx (rows, n)."""
    for i in prange(y.shape[0]):
        weigh(y[i], g[i], row_dot(g[i], y[i]), dx[i])


@kernel(arguments=_row_types(1))
def log_softmax_rows(x, y):
    """y[i] = log_softmax(x[i]), for x and y (rows, n)."""
    for i in prange(x.shape[0]):
        top = row_max(x[i])
        shift(x[i], top, log(row_sum_exp(x[i], top)), y[i])


@kernel(arguments=_row_types(2))
def log_softmax_pullback_rows(y, g, dx):
    """dx[i] = g[i] - exp(y[i]) * sum(g[i]), for y, g and dx (rows, n)."""
    for i in prange(y.shape[0]):
        less_share(y[i], g[i], row_sum(g[i]), dx[i])


@short_rows()
def _softmax_block(x):
    e = np.exp(x - np.maximum.reduce(x, -1, keepdims=True))
    return e * (1 / np.add.reduce(e, -1, keepdims=True))


@short_rows()
def _softmax_pullback_block(y, g):
    return y * (g - np.add.reduce(g * y, -1, keepdims=True))


@short_rows()
def _log_softmax_block(x):
    below = x - np.maximum.reduce(x, -1, keepdims=True)
    return below - np.log(np.add.reduce(np.exp(below), -1, keepdims=True))


@short_rows()
def _log_softmax_pullback_block(y, g):
    return g - np.exp(y) * np.add.reduce(g, -1, keepdims=True)


@kernel(arguments=_row_types(1))
def softmax_short_rows(x, y):
    """As softmax_rows."""
    for block in prange(short_blocks(x)):
        _softmax_block(x, y, block)


@kernel(arguments=_row_types(2))
def softmax_pullback_short_rows(y, g, dx):
    """As softmax_pullback_rows."""
    for block in prange(short_blocks(y)):
        _softmax_pullback_block(y, g, dx, block)


@kernel(arguments=_row_types(1))
def log_softmax_short_rows(x, y):
    """As log_softmax_rows."""
    for block in prange(short_blocks(x)):
        _log_softmax_block(x, y, block)


@kernel(arguments=_row_types(2))
def log_softmax_pullback_short_rows(y, g, dx):
    """As log_softmax_pullback_rows."""
    for block in prange(short_blocks(y)):
        _log_softmax_pullback_block(y, g, dx, block)
