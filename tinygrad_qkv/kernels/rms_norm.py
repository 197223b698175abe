"""RMS normalisation over the last axis, with its pullback."""

import math

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous, one_dtype, shapes_fit, two_axes
from tinygrad_qkv.kernels.buffers import empty, empty_lines, streamed
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.passes import end_of_stream, row_pass
from tinygrad_qkv.kernels.rows import MOST_BLOCKS, row_dot, rows_per_block
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """y = x * rrms * weight, with rrms = 1 / sqrt(mean of x^2 + eps) of each row.

    x (N, D) and weight (D,), both float32 or both float64. Gives y (N, D) and rrms (N,).
    """
    x, weight = contiguous(x, "rms_norm"), contiguous(weight, "rms_norm")
    one_dtype("rms_norm", x, weight)
    two_axes("rms_norm", "x", x)
    shapes_fit("rms_norm", weight=(weight, x.shape[1:]))
    y, rrms = empty(x.shape, x.dtype), np.empty(len(x), x.dtype)
    if len(x):
        step, parallel = -(-len(x) // MOST_BLOCKS), x.size >= PARALLEL_FROM["rms_norm"]
        _normalise(x, weight, eps, step, y, rrms, streamed(y), parallel=parallel)
    return y, rrms


def rms_norm_pullback(
    g: np.ndarray, x: np.ndarray, weight: np.ndarray, rrms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """dx = rrms * (h - xhat * mean of (h * xhat)), with xhat = x * rrms and h = g * weight.

    g and x (N, D), weight (D,), rrms (N,) as given by `rms_norm`. Gives dx (N, D) and dweight (D,) = sum over n of
    g * xhat. How that sum is split depends on N alone.
    """
    name = "rms_norm_pullback"
    g, x, weight, rrms = (contiguous(array, name) for array in (g, x, weight, rrms))
    one_dtype(name, x, g, weight, rrms)
    two_axes(name, "x", x)
    rows, width = x.shape
    shapes_fit(name, g=(g, x.shape), weight=(weight, (width,)), rrms=(rrms, (rows,)))
    step = rows_per_block(rows)
    dx, sums = empty(x.shape, x.dtype), empty_lines((-(-rows // step), width), x.dtype)
    sums[:] = 0
    if x.size:
        _gradients(x, g, weight, rrms, step, dx, sums, streamed(dx), parallel=x.size >= PARALLEL_FROM["rms_norm"])
    return dx, sums.sum(0)


def _normalise_types(scalar: types.Type) -> tuple[types.Type, ...]:
    vector, column = array_in(scalar, 1), array_out(scalar, 1)
    return array_in(scalar, 2), vector, scalar, types.intp, array_out(scalar, 2), column, types.boolean


@kernel(arguments=_normalise_types)
def _normalise(x, weight, eps, step, y, rrms, stream):
    """For each block of `step` rows, in parallel: two passes over a row while it is in the cache."""
    width, one = x.dtype.type(x.shape[1]), x.dtype.type(1)
    for block in prange((x.shape[0] + step - 1) // step):
        for n in range(block * step, min(block * step + step, x.shape[0])):
            rrms[n] = one / x.dtype.type(math.sqrt(row_dot(x[n], x[n]) / width + eps))
            _scale(x[n], rrms[n], weight, y[n], stream)
        end_of_stream(stream)


@row_pass(into=1, streams=True)
def _scale(x, rrms, weight):
    return x * rrms * weight


def _gradient_types(scalar: types.Type) -> tuple[types.Type, ...]:
    matrix, vector = array_in(scalar, 2), array_in(scalar, 1)
    return matrix, matrix, vector, vector, types.intp, array_out(scalar, 2), array_out(scalar, 2), types.boolean


@kernel(arguments=_gradient_types)
def _gradients(x, g, weight, rrms, step, dx, sums, stream):
    """For each block of `step` rows, in parallel: dx, and the block's part of dweight (sums)."""
    width = x.dtype.type(x.shape[1])
    for block in prange(sums.shape[0]):
        dweight = sums[block]
        for n in range(block * step, min(block * step + step, x.shape[0])):
            mean = _weighted_moment(x[n], g[n], weight, rrms[n]) / width
            _row_gradients(x[n], g[n], weight, rrms[n], mean, dweight, dx[n], dweight, stream)
        end_of_stream(stream)


@row_pass(folds=(np.add,))
def _weighted_moment(x, g, weight, rrms):
    """Sum of h * xhat."""
    return g * weight * (x * rrms)


@row_pass(into=2, streams=True)
def _row_gradients(x, g, weight, rrms, mean, dweight):
    """dx, and dweight with the row's part."""
    xhat = x * rrms
    return rrms * (g * weight - xhat * mean), dweight + g * xhat
