"""Activation functions, element by element, and their pullbacks, each in one pass over memory.

Where y is enough for the slope it is what the pullback takes; else x, and the function is computed again.
"""

import numpy as np
from numba import prange

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.elementwise import binary, over_elements, piece, stretches, unary
from tinygrad_qkv.kernels.scalars import exp, log1p
from tinygrad_qkv.kernels.scalars import tanh as scalar_tanh
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def relu(x: np.ndarray) -> np.ndarray:
    """y = x where x > 0, else 0; NaN stays. On one thread NumPy is as fast as a kernel."""
    return np.maximum(x, 0) if x.size < PARALLEL_FROM["elementwise"] else over_elements(_relu, x)


def relu_pullback(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """dx = 0 where y <= 0, else g, for y = relu(x)."""
    return over_elements(_relu_pullback, y, g)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """y = 1 / (1 + exp(-x)), within three units in the last place; below the smallest normal number it is 0."""
    return over_elements(_sigmoid, x)


def sigmoid_pullback(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """dx = g * y * (1 - y), for y = sigmoid(x)."""
    return over_elements(_sigmoid_pullback, y, g)


def tanh(x: np.ndarray) -> np.ndarray:
    """y = tanh(x), within three units in the last place; of few elements by NumPy, which is within two."""
    return np.tanh(x) if x.size < PARALLEL_FROM["tanh"] else over_elements(_tanh, x)


def tanh_pullback(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """dx = g * (1 - y * y), for y = tanh(x); to the same bits either way."""
    if y.size < PARALLEL_FROM["tanh"]:
        return g * (1 - y * y)
    return over_elements(_tanh_pullback, y, g)


def silu(x: np.ndarray) -> np.ndarray:
    """y = x * sigmoid(x)."""
    return over_elements(_silu, x)


def silu_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * s * (1 + x * (1 - s)), with s = sigmoid(x)."""
    return over_elements(_silu_pullback, x, g)


def softplus(x: np.ndarray) -> np.ndarray:
    """y = log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), within five units in the last place."""
    return over_elements(_softplus, x)


def softplus_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * sigmoid(x)."""
    return over_elements(_softplus_pullback, x, g)


# Each kernel below hands its stretches, in parallel, to the loop under it.


@kernel(arguments=unary)
def _relu(x, y):
    for stretch in prange(stretches(x)):
        _relu_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@kernel(plain=lambda x, y: np.maximum(x, 0, out=y))
def _relu_stretch(x, y):
    zero = x.dtype.type(0)
    for i in range(x.shape[0]):
        y[i] = zero if x[i] <= zero else x[i]


@kernel(arguments=binary)
def _relu_pullback(y, g, dx):
    for stretch in prange(stretches(y)):
        n = y.shape[0]
        _relu_pullback_stretch(piece(y, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@kernel(plain=lambda y, g, dx: np.copyto(dx, np.where(y <= 0, 0, g)))
def _relu_pullback_stretch(y, g, dx):
    zero = y.dtype.type(0)
    for i in range(y.shape[0]):
        dx[i] = zero if y[i] <= zero else g[i]


@kernel(arguments=unary)
def _sigmoid(x, y):
    for stretch in prange(stretches(x)):
        _sigmoid_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@kernel(plain=lambda x, y: np.divide(1, 1 + np.exp(-x), out=y))
def _sigmoid_stretch(x, y):
    one = x.dtype.type(1)
    for i in range(x.shape[0]):
        y[i] = one / (one + exp(-x[i]))


@kernel(arguments=binary)
def _sigmoid_pullback(y, g, dx):
    for stretch in prange(stretches(y)):
        n = y.shape[0]
        _sigmoid_pullback_stretch(piece(y, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@kernel(plain=lambda y, g, dx: np.multiply(g * y, 1 - y, out=dx))
def _sigmoid_pullback_stretch(y, g, dx):
    one = y.dtype.type(1)
    for i in range(y.shape[0]):
        dx[i] = g[i] * y[i] * (one - y[i])


@kernel(arguments=unary)
def _tanh(x, y):
    for stretch in prange(stretches(x)):
        _tanh_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@kernel(plain=lambda x, y: np.tanh(x, out=y))
def _tanh_stretch(x, y):
    for i in range(x.shape[0]):
        y[i] = scalar_tanh(x[i])


@kernel(arguments=binary)
def _tanh_pullback(y, g, dx):
    for stretch in prange(stretches(y)):
        n = y.shape[0]
        _tanh_pullback_stretch(piece(y, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@kernel(plain=lambda y, g, dx: np.multiply(g, 1 - y * y, out=dx))
def _tanh_pullback_stretch(y, g, dx):
    one = y.dtype.type(1)
    for i in range(y.shape[0]):
        dx[i] = g[i] * (one - y[i] * y[i])


@kernel(arguments=unary)
def _silu(x, y):
    for stretch in prange(stretches(x)):
        _silu_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@kernel(plain=lambda x, y: np.divide(x, 1 + np.exp(-x), out=y))
def _silu_stretch(x, y):
    one = x.dtype.type(1)
    for i in range(x.shape[0]):
        y[i] = x[i] / (one + exp(-x[i]))


@kernel(arguments=binary)
def _silu_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _silu_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


def _silu_pullback_plain(x, g, dx):
    e = np.exp(-x)
    s = 1 / (1 + e)
    dx[:] = g * s * (1 + x * np.where(x < 0, 1 - s, e * s))


@kernel(plain=_silu_pullback_plain)
def _silu_pullback_stretch(x, g, dx):
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for i in range(x.shape[0]):
        e = exp(-x[i])
        s = one / (one + e)
        dx[i] = g[i] * s * (one + x[i] * (one - s if x[i] < zero else e * s))  # of large x, 1 - s would lose digits


@kernel(arguments=unary)
def _softplus(x, y):
    for stretch in prange(stretches(x)):
        _softplus_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@kernel(plain=lambda x, y: np.logaddexp(x, 0, out=y))
def _softplus_stretch(x, y):
    zero = x.dtype.type(0)
    for i in range(x.shape[0]):
        y[i] = (x[i] if x[i] > zero else zero) + log1p(exp(-abs(x[i])))


@kernel(arguments=binary)
def _softplus_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _softplus_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@kernel(plain=lambda x, g, dx: np.divide(g, 1 + np.exp(-x), out=dx))
def _softplus_pullback_stretch(x, g, dx):
    one = x.dtype.type(1)
    for i in range(x.shape[0]):
        dx[i] = g[i] / (one + exp(-x[i]))
