"""GELU, exact and by tanh, and its pullbacks, each in one pass over memory.

The pullbacks take x and compute the function again: at (4096, 1024) in float32 that takes as long in backward as to
read a stored slope does (0.8 ms on two cores), and forward need not write one.
"""

import math

import numpy as np
from numba import prange

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.elementwise import binary, over_elements, piece, stretches, unary
from tinygrad_qkv.kernels.passes import row_pass
from tinygrad_qkv.kernels.vectors import density, mills

SQRT_8_BY_PI = math.sqrt(8 / math.pi)
CUBE = SQRT_8_BY_PI * 0.044715


def gelu(x: np.ndarray) -> np.ndarray:
    """y = x * Phi(x), Phi the normal distribution's function.

    Relative error below 3 + 1.5 * x^2 units in the last place, also far to the left, where 1 + erf would cancel. Of
    -inf it is NaN.
    """
    return over_elements(_gelu, x, rule="transcendental")


def gelu_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * (Phi(x) + x * phi(x)), phi the normal density; the slope is 0 at -inf and 1 at inf."""
    return over_elements(_gelu_pullback, x, g, rule="transcendental")


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """y = x / 2 * (1 + tanh(u)) = x * sigmoid(2u), with 2u = sqrt(8 / pi) * (x + 0.044715 * x^3). Of -inf it is NaN."""
    return over_elements(_gelu_tanh, x, rule="transcendental")


def gelu_tanh_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * (s + x * s * (1 - s) * d(2u)/dx), s = sigmoid(2u); the slope is 0 at -inf and 1 at inf."""
    return over_elements(_gelu_tanh_pullback, x, g, rule="transcendental")


def _normal(x):
    """Phi(x) and phi(x)."""
    height = density(x)
    tail = height * mills(x)
    return np.where(x < 0, tail, 1 - tail), height


@kernel(arguments=unary)
def _gelu(x, y):
    for stretch in prange(stretches(x)):
        _gelu_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _gelu_stretch(x):
    return x * _normal(x)[0]


@kernel(arguments=binary)
def _gelu_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _gelu_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@row_pass(into=1)
def _gelu_pullback_stretch(x, g):
    cdf, height = _normal(x)
    return g * (cdf + np.where(height <= 0, 0, x * height))  # where the density is 0, x may be infinite


@kernel(arguments=unary)
def _gelu_tanh(x, y):
    for stretch in prange(stretches(x)):
        _gelu_tanh_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _gelu_tanh_stretch(x):
    return x / (1 + np.exp(-x * (SQRT_8_BY_PI + CUBE * (x * x))))


@kernel(arguments=binary)
def _gelu_tanh_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _gelu_tanh_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@row_pass(into=1)
def _gelu_tanh_pullback_stretch(x, g):
    x = np.maximum(-30, np.minimum(30, x))  # beyond, the slope is 0 or 1, and x * x could overflow to 0 * inf
    e = np.exp(-x * (SQRT_8_BY_PI + CUBE * (x * x)))
    s = 1 / (1 + e)
    rest = np.where(x < 0, 1 - s, e * s)  # 1 - s, which of large x would lose digits
    return g * (s + x * s * rest * (SQRT_8_BY_PI + 3 * CUBE * (x * x)))
