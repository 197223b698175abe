"""Softmax and log-softmax over one axis, with their pullbacks.

Over the last axis a task takes rows. Over another one, of arrays seen as (outer, n, inner), it takes a strip of columns
of a block (n, inner), which stays in the cache, and goes through it line by line, a column in each lane: nothing is
transposed. The formulas are the same; what is one number for a row is a line for a strip.
"""

import math
from collections.abc import Callable

import numpy as np
from numba import prange
from numba.core import types
from numpy.lib.array_utils import normalize_axis_index

from tinygrad_qkv.kernels.arrays import contiguous, one_dtype, shapes_fit
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.passes import SHORT, row_pass, short_blocks, short_rows
from tinygrad_qkv.kernels.rows import row_add, row_dot, row_exp_into, row_max, row_sum, row_sum_exp
from tinygrad_qkv.kernels.scalars import log
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

STRIP = 2**15  # elements of a strip, as far as its width allows: input and output stay in the second cache
WIDTHS = 64, 1024  # columns of a strip, at least and at most: whole cache lines, and sums that stay in the first


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) over `axis`.

    x of any shape and strides, float32 or float64; gives a new array of its shape. Entries of -inf become exactly 0. A
    row that holds NaN or +inf, or nothing but -inf, is NaN, and no other row is. A number alone has softmax 1.
    """
    return _over_axis("softmax", (_softmax_short_rows, _softmax_rows, _softmax_columns), axis, x)


def softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """dx = y * (g - sum(g * y)) over `axis`, for y = softmax(x)."""
    kernels = _softmax_pullback_short_rows, _softmax_pullback_rows, _softmax_pullback_columns
    return _over_axis("softmax_pullback", kernels, axis, y, g)


def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """y = x - max(x) - log(sum(exp(x - max(x)))) over `axis`; shapes, NaN and inf as in softmax."""
    return _over_axis("log_softmax", (_log_softmax_short_rows, _log_softmax_rows, _log_softmax_columns), axis, x)


def log_softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """dx = g - exp(y) * sum(g) over `axis`, for y = log_softmax(x)."""
    kernels = _log_softmax_pullback_short_rows, _log_softmax_pullback_rows, _log_softmax_pullback_columns
    return _over_axis("log_softmax_pullback", kernels, axis, y, g)


def _over_axis(name: str, kernels: tuple[Callable[..., None], ...], axis: int, *given: np.ndarray) -> np.ndarray:
    """Run one of three kernels over arrays of one shape: that for short rows, for rows or for columns."""
    shape = given[0].shape
    axis = normalize_axis_index(axis, len(shape) or 1)
    arrays = [contiguous(x, name) for x in given]
    if len(arrays) == 2 and (arrays[1].shape != shape or arrays[1].dtype != arrays[0].dtype):
        shapes_fit(name, g=(arrays[1], shape))
        one_dtype(name, *arrays)
    out = empty(shape, arrays[0].dtype)
    arrays.append(out)
    size = out.size
    if not size:
        return out
    n, inner = shape[axis] if shape else 1, math.prod(shape[axis + 1 :])
    short, rows, columns = kernels
    parallel = size >= PARALLEL_FROM["softmax"]
    if inner > 1:
        blocks = [x.reshape(-1, n, inner) for x in arrays]
        columns(*blocks, _strip_width(n, inner), parallel=parallel)
    else:
        if len(shape) != 2 or axis == 0:
            arrays = [x.reshape(-1, n) for x in arrays]
        run = short if n * out.itemsize <= SHORT else rows
        run(*arrays, parallel=parallel)
    return out


def _strip_width(n: int, inner: int) -> int:
    narrowest, widest = WIDTHS
    return min(inner, widest, max(narrowest, STRIP // n // narrowest * narrowest))


def _row_types(inputs: int) -> Callable[[types.Type], tuple[types.Type, ...]]:
    return lambda scalar: (*[array_in(scalar, 2)] * inputs, array_out(scalar, 2))


def _column_types(inputs: int) -> Callable[[types.Type], tuple[types.Type, ...]]:
    return lambda scalar: (*[array_in(scalar, 3)] * inputs, array_out(scalar, 3), types.intp)


@row_pass(into=1)
def _times(y, share):
    return y * share


@row_pass(into=1)
def _weigh(y, g, total):
    return y * (g - total)


@row_pass(into=1)
def _shift(x, top, log_total):
    return (x - top) - log_total


@row_pass(into=1)
def _less_share(y, g, total):
    return g - np.exp(y) * total


@row_pass(into=1)
def _larger(x, top):
    return np.maximum(x, top)


@row_pass(into=1)
def _add_product(x, y, total):
    return total + x * y


@row_pass(into=1)
def _add_exp(x, shift, total):
    return total + np.exp(x - shift)


@row_pass(into=2)
def _add_exp_into(x, shift, total):
    e = np.exp(x - shift)
    return e, total + e


@kernel(arguments=_row_types(1))
def _softmax_rows(x, y):
    """y[i] = softmax(x[i]), for x and y (rows, n)."""
    for i in prange(x.shape[0]):
        total = row_exp_into(x[i], row_max(x[i]), y[i])  # at least 1: its largest term is exp(0)
        _times(y[i], 1 / total, y[i])


@kernel(arguments=_row_types(2))
def _softmax_pullback_rows(y, g, dx):
    """dx[i] = y[i] * (g[i] - sum(g[i] * y[i])), for y, g and dx (rows, n)."""
    for i in prange(y.shape[0]):
        _weigh(y[i], g[i], row_dot(g[i], y[i]), dx[i])


@kernel(arguments=_row_types(1))
def _log_softmax_rows(x, y):
    """y[i] = log_softmax(x[i]), for x and y (rows, n)."""
    for i in prange(x.shape[0]):
        top = row_max(x[i])
        _shift(x[i], top, log(row_sum_exp(x[i], top)), y[i])


@kernel(arguments=_row_types(2))
def _log_softmax_pullback_rows(y, g, dx):
    """dx[i] = g[i] - exp(y[i]) * sum(g[i]), for y, g and dx (rows, n)."""
    for i in prange(y.shape[0]):
        _less_share(y[i], g[i], row_sum(g[i]), dx[i])


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
def _softmax_short_rows(x, y):
    """As _softmax_rows."""
    for block in prange(short_blocks(x)):
        _softmax_block(x, y, block)


@kernel(arguments=_row_types(2))
def _softmax_pullback_short_rows(y, g, dx):
    """As _softmax_pullback_rows."""
    for block in prange(short_blocks(y)):
        _softmax_pullback_block(y, g, dx, block)


@kernel(arguments=_row_types(1))
def _log_softmax_short_rows(x, y):
    """As _log_softmax_rows."""
    for block in prange(short_blocks(x)):
        _log_softmax_block(x, y, block)


@kernel(arguments=_row_types(2))
def _log_softmax_pullback_short_rows(y, g, dx):
    """As _log_softmax_pullback_rows."""
    for block in prange(short_blocks(y)):
        _log_softmax_pullback_block(y, g, dx, block)


@kernel
def _strips(x, width):
    """How many strips lie side by side in a block."""
    return (x.shape[2] + width - 1) // width


@kernel
def _strip(x, width, task):
    """The lines of a task's strip, (n, up to `width`)."""
    strips = _strips(x, width)
    first = task % strips * width
    return x[task // strips, :, first : min(first + width, x.shape[2])]


@kernel(arguments=_column_types(1))
def _softmax_columns(x, y, width):
    """y[o, :, i] = softmax(x[o, :, i]), for x and y (outer, n, inner)."""
    for task in prange(x.shape[0] * _strips(x, width)):
        x_strip, y_strip = _strip(x, width, task), _strip(y, width, task)
        top, total = _top(x_strip), np.zeros(x_strip.shape[1], x.dtype)
        for k in range(x.shape[1]):
            _add_exp_into(x_strip[k], top, total, y_strip[k], total)
        share = 1 / total
        for k in range(x.shape[1]):
            _times(y_strip[k], share, y_strip[k])


@kernel
def _top(x):
    """The maximum of each column of x (n, m)."""
    top = np.full(x.shape[1], -np.inf, x.dtype)
    for k in range(x.shape[0]):
        _larger(x[k], top, top)
    return top


@kernel(arguments=_column_types(2))
def _softmax_pullback_columns(y, g, dx, width):
    """dx[o, :, i] = y[o, :, i] * (g[o, :, i] - sum(g[o, :, i] * y[o, :, i])), for y, g and dx (outer, n, inner)."""
    for task in prange(y.shape[0] * _strips(y, width)):
        y_strip, g_strip, dx_strip = _strip(y, width, task), _strip(g, width, task), _strip(dx, width, task)
        total = np.zeros(y_strip.shape[1], y.dtype)
        for k in range(y.shape[1]):
            _add_product(y_strip[k], g_strip[k], total, total)
        for k in range(y.shape[1]):
            _weigh(y_strip[k], g_strip[k], total, dx_strip[k])


@kernel(arguments=_column_types(1))
def _log_softmax_columns(x, y, width):
    """y[o, :, i] = log_softmax(x[o, :, i]), for x and y (outer, n, inner)."""
    for task in prange(x.shape[0] * _strips(x, width)):
        x_strip, y_strip = _strip(x, width, task), _strip(y, width, task)
        top, total = _top(x_strip), np.zeros(x_strip.shape[1], x.dtype)
        for k in range(x.shape[1]):
            _add_exp(x_strip[k], top, total, total)
        log_total = np.log(total)
        for k in range(x.shape[1]):
            _shift(x_strip[k], top, log_total, y_strip[k])


@kernel(arguments=_column_types(2))
def _log_softmax_pullback_columns(y, g, dx, width):
    """dx[o, :, i] = g[o, :, i] - exp(y[o, :, i]) * sum(g[o, :, i]), for y, g and dx (outer, n, inner)."""
    for task in prange(y.shape[0] * _strips(y, width)):
        y_strip, g_strip, dx_strip = _strip(y, width, task), _strip(g, width, task), _strip(dx, width, task)
        total = np.zeros(y_strip.shape[1], y.dtype)
        for k in range(y.shape[1]):
            row_add(g_strip[k], total)
        for k in range(y.shape[1]):
            _less_share(y_strip[k], g_strip[k], total, dx_strip[k])
