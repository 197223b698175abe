"""Layer normalisation over the last axis, with its pullback."""

import math

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous, one_dtype, shapes_fit, two_axes
from tinygrad_qkv.kernels.buffers import empty, empty_lines, streamed
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.passes import end_of_stream, row_pass
from tinygrad_qkv.kernels.rows import MOST_BLOCKS, row_sum, rows_per_block
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def layer_norm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(var + eps) and the biased variance of each row.

    x (N, D), weight (D,), bias (D,), all float32 or all float64. Gives y (N, D), mean (N,), rstd (N,). The variance is
    taken from differences to the mean; a constant row gives exactly bias.
    """
    x, weight, bias = (contiguous(array, "layer_norm") for array in (x, weight, bias))
    one_dtype("layer_norm", x, weight, bias)
    two_axes("layer_norm", "x", x)
    shapes_fit("layer_norm", weight=(weight, x.shape[1:]), bias=(bias, x.shape[1:]))
    y, mean, rstd = empty(x.shape, x.dtype), np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)
    if len(x):
        step, parallel = -(-len(x) // MOST_BLOCKS), x.size >= PARALLEL_FROM["layer_norm"]
        _normalise(x, weight, bias, eps, step, y, mean, rstd, streamed(y), parallel=parallel)
    return y, mean, rstd


def layer_norm_pullback(
    g: np.ndarray, x: np.ndarray, weight: np.ndarray, mean: np.ndarray, rstd: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dx = rstd * (h - mean of h - xhat * mean of (h * xhat)), with xhat = (x - mean) * rstd and h = g * weight.

    g and x (N, D), weight (D,), mean and rstd (N,) as given by `layer_norm`. Gives dx (N, D), dweight (D,) = sum over n
    of g * xhat and dbias (D,) = sum over n of g. How these sums are split depends on N alone.
    """
    name = "layer_norm_pullback"
    g, x, weight, mean, rstd = (contiguous(array, name) for array in (g, x, weight, mean, rstd))
    one_dtype(name, x, g, weight, mean, rstd)
    two_axes(name, "x", x)
    rows, width = x.shape
    shapes_fit(name, g=(g, x.shape), weight=(weight, (width,)), mean=(mean, (rows,)), rstd=(rstd, (rows,)))
    step = rows_per_block(rows)
    dx, sums = empty(x.shape, x.dtype), empty_lines((2, -(-rows // step), width), x.dtype)
    sums[:] = 0
    if x.size:
        _gradients(
            x, g, weight, mean, rstd, step, dx, sums, streamed(dx), parallel=x.size >= PARALLEL_FROM["layer_norm"]
        )
    dweight, dbias = sums.sum(1)
    return dx, dweight, dbias


def _normalise_types(scalar: types.Type) -> tuple[types.Type, ...]:
    vector, column = array_in(scalar, 1), array_out(scalar, 1)
    return array_in(scalar, 2), vector, vector, scalar, types.intp, array_out(scalar, 2), column, column, types.boolean


@kernel(arguments=_normalise_types)
def _normalise(x, weight, bias, eps, step, y, mean, rstd, stream):
    """For each block of `step` rows, in parallel: three passes over a row while it is in the cache."""
    for block in prange((x.shape[0] + step - 1) // step):
        for n in range(block * step, min(block * step + step, x.shape[0])):
            mean[n], rstd[n] = _statistics(x[n], eps)
            _affine(x[n], mean[n], rstd[n], weight, bias, y[n], stream)
        end_of_stream(stream)


@kernel
def _statistics(x, eps):
    """Mean of a row and 1 / sqrt(variance + eps)."""
    width, one = x.dtype.type(x.shape[0]), x.dtype.type(1)
    rough = row_sum(x) / width
    # The rounded mean is off by a little; what the differences to it sum to corrects mean and variance.
    first, second = _moments(x, rough)
    rest = first / width
    variance = max(second / width - rest * rest, x.dtype.type(0))
    return rough + rest, one / x.dtype.type(math.sqrt(variance + eps))


@row_pass(folds=(np.add, np.add))
def _moments(x, centre):
    """Sums of x - centre and of its square."""
    d = x - centre
    return d, d * d


@row_pass(into=1, streams=True)
def _affine(x, mean, rstd, weight, bias):
    return (x - mean) * rstd * weight + bias


def _gradient_types(scalar: types.Type) -> tuple[types.Type, ...]:
    matrix, vector = array_in(scalar, 2), array_in(scalar, 1)
    return matrix, matrix, vector, vector, vector, types.intp, array_out(scalar, 2), array_out(scalar, 3), types.boolean


@kernel(arguments=_gradient_types)
def _gradients(x, g, weight, mean, rstd, step, dx, sums, stream):
    """For each block of `step` rows, in parallel: dx, and the block's part of dweight (sums[0]) and dbias (sums[1])."""
    width = x.dtype.type(x.shape[1])
    for block in prange(sums.shape[1]):
        dweight, dbias = sums[0, block], sums[1, block]
        for n in range(block * step, min(block * step + step, x.shape[0])):
            first, second = _weighted_moments(x[n], g[n], weight, mean[n], rstd[n])
            first, second = first / width, second / width
            _row_gradients(
                x[n], g[n], weight, mean[n], rstd[n], first, second, dweight, dbias, dx[n], dweight, dbias, stream
            )
        end_of_stream(stream)


@row_pass(folds=(np.add, np.add))
def _weighted_moments(x, g, weight, mean, rstd):
    """Sums of h and of h * xhat."""
    h = g * weight
    return h, h * ((x - mean) * rstd)


@row_pass(into=3, streams=True)
def _row_gradients(x, g, weight, mean, rstd, first, second, dweight, dbias):
    """dx, dweight and dbias with the row's part."""
    xhat = (x - mean) * rstd
    return rstd * (g * weight - first - xhat * second), dweight + g * xhat, dbias + g
