"""GELU, exact and by tanh, and its pullbacks, each in one pass over memory.

The pullbacks take x and compute the function again: at (4096, 1024) in float32 that takes as long in backward as to
read a stored slope does (0.8 ms on two cores), and forward need not write one.
"""

import math

import numpy as np
from numba import prange

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.elementwise import binary, over_elements, piece, stretches, unary
from tinygrad_qkv.kernels.scalars import exp, mills

CONTRACT = frozenset({"contract"})  # multiply-adds in one instruction where the host has it
SQRT_8_BY_PI = math.sqrt(8 / math.pi)
CUBE = SQRT_8_BY_PI * 0.044715


def gelu(x: np.ndarray) -> np.ndarray:
    """y = x * Phi(x), Phi the normal distribution's function.

    Relative error below 3 + 1.5 * x^2 units in the last place, also far to the left, where 1 + erf would cancel. Of
    -inf it is NaN.
    """
    return over_elements(_gelu, x)


def gelu_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * (Phi(x) + x * phi(x)), phi the normal density; the slope is 0 at -inf and 1 at inf."""
    return over_elements(_gelu_pullback, x, g)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """y = x / 2 * (1 + tanh(u)) = x * sigmoid(2u), with 2u = sqrt(8 / pi) * (x + 0.044715 * x^3). Of -inf it is NaN."""
    return over_elements(_gelu_tanh, x)


def gelu_tanh_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * (s + x * s * (1 - s) * d(2u)/dx), s = sigmoid(2u); the slope is 0 at -inf and 1 at inf."""
    return over_elements(_gelu_tanh_pullback, x, g)


@kernel(arguments=unary)
def _gelu(x, y):
    for stretch in prange(stretches(x)):
        _gelu_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@kernel(arguments=binary)
def _gelu_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _gelu_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@kernel(arguments=unary)
def _gelu_tanh(x, y):
    for stretch in prange(stretches(x)):
        _gelu_tanh_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@kernel(arguments=binary)
def _gelu_tanh_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _gelu_tanh_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


def _normal_plain(x):
    """Phi(x) and phi(x)."""
    erfc = np.frompyfunc(math.erfc, 1, 1)
    cdf = np.asarray(0.5 * erfc(-x * math.sqrt(0.5))).astype(x.dtype)
    return cdf, np.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _gelu_plain(x, y):
    y[:] = x * _normal_plain(x)[0]


@kernel(plain=_gelu_plain, fastmath=CONTRACT)
def _gelu_stretch(x, y):
    zero, one, minus_half = x.dtype.type(0), x.dtype.type(1), x.dtype.type(-0.5)
    top_density = x.dtype.type(1 / math.sqrt(2 * math.pi))
    for i in range(x.shape[0]):
        tail = exp(minus_half * x[i] * x[i]) * top_density * mills(x[i])
        y[i] = x[i] * (tail if x[i] < zero else one - tail)


def _gelu_pullback_plain(x, g, dx):
    cdf, density = _normal_plain(x)
    dx[:] = g * (cdf + np.clip(x, -40, 40) * density)


@kernel(plain=_gelu_pullback_plain, fastmath=CONTRACT)
def _gelu_pullback_stretch(x, g, dx):
    zero, one, minus_half = x.dtype.type(0), x.dtype.type(1), x.dtype.type(-0.5)
    top_density = x.dtype.type(1 / math.sqrt(2 * math.pi))
    for i in range(x.shape[0]):
        density = exp(minus_half * x[i] * x[i]) * top_density
        tail = density * mills(x[i])
        # Where the density is 0, x may be infinite.
        far = density * x[i] if density > zero or x[i] != x[i] else zero
        dx[i] = g[i] * ((tail if x[i] < zero else one - tail) + far)


def _gelu_tanh_plain(x, y):
    y[:] = x / (1 + np.exp(-x * (SQRT_8_BY_PI + CUBE * (x * x))))


@kernel(plain=_gelu_tanh_plain, fastmath=CONTRACT)
def _gelu_tanh_stretch(x, y):
    one, linear, cube = x.dtype.type(1), x.dtype.type(SQRT_8_BY_PI), x.dtype.type(CUBE)
    for i in range(x.shape[0]):
        y[i] = x[i] / (one + exp(-x[i] * (linear + cube * (x[i] * x[i]))))


def _gelu_tanh_pullback_plain(x, g, dx):
    v = np.clip(x, -30, 30)
    e = np.exp(-v * (SQRT_8_BY_PI + CUBE * (v * v)))
    s = 1 / (1 + e)
    dx[:] = g * (s + v * s * np.where(v < 0, 1 - s, e * s) * (SQRT_8_BY_PI + 3 * CUBE * (v * v)))


@kernel(plain=_gelu_tanh_pullback_plain, fastmath=CONTRACT)
def _gelu_tanh_pullback_stretch(x, g, dx):
    zero, one, top = x.dtype.type(0), x.dtype.type(1), x.dtype.type(30)
    linear, cube, cube_3 = x.dtype.type(SQRT_8_BY_PI), x.dtype.type(CUBE), x.dtype.type(3 * CUBE)
    for i in range(x.shape[0]):
        v = x[i]  # beyond 30 the slope is 0 or 1, and v * v could overflow to 0 * inf
        v = top if v > top else (-top if v < -top else v)
        e = exp(-v * (linear + cube * (v * v)))
        s = one / (one + e)
        rest = one - s if v < zero else e * s  # 1 - s, which of large x would lose digits
        dx[i] = g[i] * (s + v * s * rest * (linear + cube_3 * (v * v)))
