"""Softmax and log-softmax over an axis that is not the last one, with their pullbacks: nothing is transposed.

Arrays are seen as (outer, n, inner), and the axis is the middle one. A strip of columns of a block (n, inner) is gone
through line by line, a column in each lane, several times while it is in the cache. The passes are those over rows;
what is one number for a row is a line for a strip.
"""

from collections.abc import Callable

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.passes import row_pass
from tinygrad_qkv.kernels.rows import row_add, row_times
from tinygrad_qkv.kernels.softmax_rows import less_share, shift, weigh

TASK = 2**16  # elements of a task, as far as widths allow: with its result it stays in the second cache, or nearly
GROUP = 32  # lines that are added up by themselves, so that no number goes through many sums
WIDTHS = 256, 1024  # columns of a strip, at least and at most: a pass over less costs more than its work


def strip_sizes(n: int, inner: int) -> tuple[int, int]:
    """Columns of a strip, and strips of a task."""
    narrowest, widest = WIDTHS
    width = min(inner, widest, max(narrowest, TASK // n // narrowest * narrowest))
    return width, max(1, TASK // (n * width))


def _column_types(inputs: int) -> Callable[[types.Type], tuple[types.Type, ...]]:
    return lambda scalar: (*[array_in(scalar, 3)] * inputs, array_out(scalar, 3), types.intp, types.intp)


@row_pass(into=1)
def _inverse(total):
    return 1 / total


@row_pass(into=1)
def _log(total):
    return np.log(total)


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


@kernel
def _strips(x, width):
    """How many strips of `width` columns there are, over all blocks."""
    return x.shape[0] * ((x.shape[2] + width - 1) // width)


@kernel
def _strip(x, width, i):
    """The lines of strip i, (n, up to `width`)."""
    beside = (x.shape[2] + width - 1) // width
    first = i % beside * width
    return x[i // beside, :, first : min(first + width, x.shape[2])]


@kernel
def _tasks(x, width, strips):
    """How many tasks of so many strips there are."""
    return (_strips(x, width) + strips - 1) // strips


@kernel
def _of_task(x, width, strips, task):
    """The numbers of a task's strips."""
    return range(task * strips, min(task * strips + strips, _strips(x, width)))


@kernel
def _lines(lines, strip):
    """Three lines, as wide as the strip, for its maxima, for the sums of a group of lines and for those of all."""
    m = strip.shape[1]
    return lines[0, :m], lines[1, :m], lines[2, :m]


@kernel
def _top(x, top):
    """top = the maximum of each column of x (n, m)."""
    top[:] = -np.inf
    for k in range(x.shape[0]):
        _larger(x[k], top, top)


@kernel(arguments=_column_types(1))
def softmax_columns(x, y, width, strips):
    """y[o, :, i] = softmax(x[o, :, i]), for x and y (outer, n, inner)."""
    for task in prange(_tasks(x, width, strips)):
        lines = np.empty((3, width), x.dtype)
        for i in _of_task(x, width, strips, task):
            x_strip, y_strip = _strip(x, width, i), _strip(y, width, i)
            top, part, total = _lines(lines, x_strip)
            _top(x_strip, top)
            total[:] = 0
            for first in range(0, x.shape[1], GROUP):
                part[:] = 0
                for k in range(first, min(first + GROUP, x.shape[1])):
                    _add_exp_into(x_strip[k], top, part, y_strip[k], part)
                row_add(part, total)
            _inverse(total, total)
            for k in range(x.shape[1]):
                row_times(y_strip[k], total, y_strip[k])


@kernel(arguments=_column_types(2))
def softmax_pullback_columns(y, g, dx, width, strips):
    """dx[o, :, i] = y[o, :, i] * (g[o, :, i] - sum(g[o, :, i] * y[o, :, i])), for y, g and dx (outer, n, inner)."""
    for task in prange(_tasks(y, width, strips)):
        lines = np.empty((3, width), y.dtype)
        for i in _of_task(y, width, strips, task):
            y_strip, g_strip, dx_strip = _strip(y, width, i), _strip(g, width, i), _strip(dx, width, i)
            _, part, total = _lines(lines, y_strip)
            total[:] = 0
            for first in range(0, y.shape[1], GROUP):
                part[:] = 0
                for k in range(first, min(first + GROUP, y.shape[1])):
                    _add_product(y_strip[k], g_strip[k], part, part)
                row_add(part, total)
            for k in range(y.shape[1]):
                weigh(y_strip[k], g_strip[k], total, dx_strip[k])


@kernel(arguments=_column_types(1))
def log_softmax_columns(x, y, width, strips):
    """y[o, :, i] = log_softmax(x[o, :, i]), for x and y (outer, n, inner)."""
    for task in prange(_tasks(x, width, strips)):
        lines = np.empty((3, width), x.dtype)
        for i in _of_task(x, width, strips, task):
            x_strip, y_strip = _strip(x, width, i), _strip(y, width, i)
            top, part, total = _lines(lines, x_strip)
            _top(x_strip, top)
            total[:] = 0
            for first in range(0, x.shape[1], GROUP):
                part[:] = 0
                for k in range(first, min(first + GROUP, x.shape[1])):
                    _add_exp(x_strip[k], top, part, part)
                row_add(part, total)
            _log(total, total)
            for k in range(x.shape[1]):
                shift(x_strip[k], top, total, y_strip[k])


@kernel(arguments=_column_types(2))
def log_softmax_pullback_columns(y, g, dx, width, strips):
    """dx[o, :, i] = g[o, :, i] - exp(y[o, :, i]) * sum(g[o, :, i]), for y, g and dx (outer, n, inner)."""
    for task in prange(_tasks(y, width, strips)):
        lines = np.empty((3, width), y.dtype)
        for i in _of_task(y, width, strips, task):
            y_strip, g_strip, dx_strip = _strip(y, width, i), _strip(g, width, i), _strip(dx, width, i)
            _, part, total = _lines(lines, y_strip)
            total[:] = 0
            for first in range(0, y.shape[1], GROUP):
                part[:] = 0
                for k in range(first, min(first + GROUP, y.shape[1])):
                    row_add(g_strip[k], part)
                row_add(part, total)
            for k in range(y.shape[1]):
                less_share(y_strip[k], g_strip[k], total, dx_strip[k])
