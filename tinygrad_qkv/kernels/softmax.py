"""Softmax and log-softmax over one axis, with their pullbacks."""

import math
from collections.abc import Callable

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from tinygrad_qkv.kernels import softmax_columns as columns
from tinygrad_qkv.kernels import softmax_rows as rows
from tinygrad_qkv.kernels.arrays import contiguous, one_dtype, shapes_fit
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.passes import SHORT
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) over `axis`.

    x of any shape and strides, float32 or float64; gives a new array of its shape. Entries of -inf become exactly 0. A
    row that holds NaN or +inf, or nothing but -inf, is NaN, and no other row is. A number alone has softmax 1.
    """
    kernels = rows.softmax_short_rows, rows.softmax_rows, columns.softmax_columns
    return _over_axis("softmax", kernels, axis, x)


def softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """dx = y * (g - sum(g * y)) over `axis`, for y = softmax(x)."""
    kernels = rows.softmax_pullback_short_rows, rows.softmax_pullback_rows, columns.softmax_pullback_columns
    return _over_axis("softmax_pullback", kernels, axis, y, g)


def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """y = x - max(x) - log(sum(exp(x - max(x)))) over `axis`; shapes, NaN and inf as in softmax."""
    kernels = rows.log_softmax_short_rows, rows.log_softmax_rows, columns.log_softmax_columns
    return _over_axis("log_softmax", kernels, axis, x)


def log_softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """dx = g - exp(y) * sum(g) over `axis`, for y = log_softmax(x)."""
    kernels = (
        rows.log_softmax_pullback_short_rows,
        rows.log_softmax_pullback_rows,
        columns.log_softmax_pullback_columns,
    )
    return _over_axis("log_softmax_pullback", kernels, axis, y, g)


def _over_axis(name: str, kernels: tuple[Callable[..., None], ...], axis: int, *given: np.ndarray) -> np.ndarray:
    """Run one of three kernels over arrays of one shape: that for short rows, for rows or for columns."""
    arrays = [contiguous(x, name) for x in given]
    shape = arrays[0].shape
    axis = normalize_axis_index(axis, len(shape) or 1)
    if len(arrays) == 2 and (arrays[1].shape != shape or arrays[1].dtype != arrays[0].dtype):
        shapes_fit(name, g=(arrays[1], shape))
        one_dtype(name, *arrays)
    out = empty(shape, arrays[0].dtype)
    arrays.append(out)
    size = out.size
    if not size:
        return out
    n, inner = shape[axis] if shape else 1, math.prod(shape[axis + 1 :])
    of_short_rows, of_rows, of_columns = kernels
    parallel = size >= PARALLEL_FROM["softmax"]
    if inner > 1:
        blocks = [x.reshape(-1, n, inner) for x in arrays]
        of_columns(*blocks, *columns.strip_sizes(n, inner), parallel=parallel)
    else:
        if len(shape) != 2 or axis == 0:
            arrays = [x.reshape(-1, n) for x in arrays]
        run = of_short_rows if n * out.itemsize <= SHORT else of_rows
        run(*arrays, parallel=parallel)
    return out
