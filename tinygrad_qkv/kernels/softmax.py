"""Softmax and log-softmax over one axis, with their pullbacks."""

import math
from collections.abc import Callable

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous, one_dtype, shapes_fit
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.rows import row_dot, row_exp_into, row_max, row_sum, row_sum_exp
from tinygrad_qkv.kernels.scalars import exp
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) over `axis`.

    x of any shape and strides, float32 or float64; gives a new array of its shape. Entries of -inf become exactly 0. A
    row that holds NaN or +inf, or nothing but -inf, is NaN, and no other row is. A number alone has softmax 1.
    """
    return _over_rows("softmax", _softmax_rows, axis, x)


def softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """dx = y * (g - sum(g * y)) over `axis`, for y = softmax(x)."""
    return _over_rows("softmax_pullback", _softmax_pullback_rows, axis, y, g)


def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """y = x - max(x) - log(sum(exp(x - max(x)))) over `axis`; shapes, NaN and inf as in softmax."""
    return _over_rows("log_softmax", _log_softmax_rows, axis, x)


def log_softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """dx = g - exp(y) * sum(g) over `axis`, for y = log_softmax(x)."""
    return _over_rows("log_softmax_pullback", _log_softmax_pullback_rows, axis, y, g)


def _over_rows(name: str, rows: Callable[..., None], axis: int, *arrays: np.ndarray) -> np.ndarray:
    """Run a kernel over arrays of one shape, seen as rows along `axis`: copies where that is not the last one."""
    shape = arrays[0].shape
    shapes_fit(name, g=(arrays[-1], shape))
    if not shape:
        return _over_rows(name, rows, 0, *(x.reshape(1) for x in arrays)).reshape(())
    if axis not in (-1, len(shape) - 1):
        out = _over_rows(name, rows, -1, *(np.moveaxis(x, axis, -1) for x in arrays))
        return np.ascontiguousarray(np.moveaxis(out, -1, axis))
    arrays = tuple(contiguous(x, name) for x in arrays)
    one_dtype(name, *arrays)
    out = empty(shape, arrays[0].dtype)
    if out.size:
        flat = (-1, shape[-1])
        parallel = out.size >= PARALLEL_FROM["softmax"]
        rows(*(x.reshape(flat) for x in arrays), out.reshape(flat), parallel=parallel)
    return out


def _types(inputs: int) -> Callable[[types.Type], tuple[types.Type, ...]]:
    return lambda scalar: (*[array_in(scalar, 2)] * inputs, array_out(scalar, 2))


@kernel(arguments=_types(1))
def _softmax_rows(x, y):
    """y[i] = softmax(x[i]), for x and y (rows, n)."""
    for i in prange(x.shape[0]):
        total = row_exp_into(x[i], row_max(x[i]), y[i])
        _scale(y[i], total)


@kernel(arguments=_types(2))
def _softmax_pullback_rows(y, g, dx):
    """dx[i] = y[i] * (g[i] - sum(g[i] * y[i])), for y, g and dx (rows, n)."""
    for i in prange(y.shape[0]):
        _weigh(y[i], g[i], row_dot(g[i], y[i]), dx[i])


@kernel(arguments=_types(1))
def _log_softmax_rows(x, y):
    """y[i] = log_softmax(x[i]), for x and y (rows, n)."""
    for i in prange(x.shape[0]):
        top = row_max(x[i])
        _shift(x[i], top, x.dtype.type(math.log(row_sum_exp(x[i], top))), y[i])


@kernel(arguments=_types(2))
def _log_softmax_pullback_rows(y, g, dx):
    """dx[i] = g[i] - exp(y[i]) * sum(g[i]), for y, g and dx (rows, n)."""
    for i in prange(y.shape[0]):
        _less_share(y[i], g[i], row_sum(g[i]), dx[i])


@kernel(plain=lambda y, total: np.divide(y, total, out=y))
def _scale(y, total):
    share = y.dtype.type(1) / total  # total >= 1: its largest term is exp(0)
    for i in range(y.shape[0]):
        y[i] *= share


@kernel(plain=lambda y, g, total, dx: np.multiply(y, g - total, out=dx))
def _weigh(y, g, total, dx):
    for i in range(y.shape[0]):
        dx[i] = y[i] * (g[i] - total)


@kernel(plain=lambda x, top, log_total, y: np.subtract(x - top, log_total, out=y))
def _shift(x, top, log_total, y):
    for i in range(x.shape[0]):
        y[i] = (x[i] - top) - log_total


@kernel(plain=lambda y, g, total, dx: np.subtract(g, exp(y) * total, out=dx))
def _less_share(y, g, total, dx):
    for i in range(y.shape[0]):
        dx[i] = g[i] - exp(y[i]) * total
