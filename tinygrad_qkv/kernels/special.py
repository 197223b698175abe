"""Functions of mathematics that NumPy lacks."""

import math

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.scalars import erf as scalar_erf
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

STRETCH = 1024  # elements of one task


def erf(x: np.ndarray) -> np.ndarray:
    """y = 2 / sqrt(pi) * integral of exp(-t^2) for t from 0 to x, of every element; any shape, float32 or float64."""
    flat = contiguous(x, "erf").reshape(-1)
    y = np.empty(flat.shape, flat.dtype)
    if y.size:
        _erf(flat, y, parallel=y.size >= PARALLEL_FROM["erf"])
    return y.reshape(x.shape)


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 1), array_out(scalar, 1)


@kernel(arguments=_types)
def _erf(x, y):
    """for each stretch of elements, in parallel: y = erf(x)."""
    for stretch in prange((x.shape[0] + STRETCH - 1) // STRETCH):
        first, last = stretch * STRETCH, min(stretch * STRETCH + STRETCH, x.shape[0])
        _erf_into(x[first:last], y[first:last])


def _erf_plain(x, y):
    y[:] = np.frompyfunc(math.erf, 1, 1)(x)


@kernel(plain=_erf_plain)
def _erf_into(x, y):
    for i in range(x.shape[0]):
        y[i] = scalar_erf(x[i])
