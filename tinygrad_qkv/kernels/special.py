"""Functions of mathematics that NumPy lacks."""

import math

import numpy as np
from numba import prange

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.elementwise import over_elements, piece, stretches, unary
from tinygrad_qkv.kernels.scalars import erf as scalar_erf


def erf(x: np.ndarray) -> np.ndarray:
    """y = 2 / sqrt(pi) * integral of exp(-t^2) for t from 0 to x, of every element; any shape, float32 or float64."""
    return over_elements(_erf, x)


@kernel(arguments=unary)
def _erf(x, y):
    for stretch in prange(stretches(x)):
        _erf_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


def _erf_plain(x, y):
    y[:] = np.frompyfunc(math.erf, 1, 1)(x)


@kernel(plain=_erf_plain)
def _erf_stretch(x, y):
    for i in range(x.shape[0]):
        y[i] = scalar_erf(x[i])
