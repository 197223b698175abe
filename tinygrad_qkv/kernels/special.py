"""Special functions: erf, which NumPy lacks."""

import numpy as np
from numba import prange

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.elementwise import over_elements, piece, stretches, unary
from tinygrad_qkv.kernels.passes import row_pass
from tinygrad_qkv.kernels.vectors import erf as scalar_erf


def erf(x: np.ndarray) -> np.ndarray:
    """y = 2 / sqrt(pi) * integral of exp(-t^2) for t from 0 to x, of every element; any shape, float32 or float64."""
    return over_elements(_erf, x, rule="transcendental")


@kernel(arguments=unary)
def _erf(x, y):
    for stretch in prange(stretches(x)):
        _erf_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _erf_stretch(x):
    return scalar_erf(x)
