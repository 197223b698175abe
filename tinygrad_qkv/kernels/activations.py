"""Activation functions, element by element, and their pullbacks, each in one pass over memory.

Where y is enough for the slope it is what the pullback takes; else x, and the function is computed again.
"""

import numpy as np
from numba import prange

from tinygrad_qkv.kernels.arrays import floats
from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.elementwise import binary, over_elements, piece, stretches, unary
from tinygrad_qkv.kernels.passes import row_pass
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

ONE = np.array(1, np.float32)  # NumPy takes longer with the number itself; float64 stays float64 beside it


def relu(x: np.ndarray) -> np.ndarray:
    """y = x where x > 0, else 0; NaN stays."""
    x = floats(x, "relu")
    return np.maximum(x, 0) if x.size < PARALLEL_FROM["relu"] else over_elements(_relu, x)


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
    x = floats(x, "tanh")
    return np.tanh(x) if x.size < PARALLEL_FROM["tanh"] else over_elements(_tanh, x)


def tanh_pullback(g: np.ndarray, y: np.ndarray) -> np.ndarray:
    """dx = g * (1 - y * y), for y = tanh(x)."""
    y = floats(y, "tanh_pullback")
    if y.size < PARALLEL_FROM["tanh"] and type(g) is np.ndarray and g.dtype is y.dtype and g.shape == y.shape:
        return g * (ONE - y * y)
    return over_elements(_tanh_pullback, y, g)


def silu(x: np.ndarray) -> np.ndarray:
    """y = x * sigmoid(x)."""
    return over_elements(_silu, x)


def silu_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * s * (1 + x * (1 - s)), with s = sigmoid(x)."""
    return over_elements(_silu_pullback, x, g, rule="transcendental")


def softplus(x: np.ndarray) -> np.ndarray:
    """y = log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), within five units in the last place."""
    return over_elements(_softplus, x, rule="transcendental")


def softplus_pullback(g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx = g * sigmoid(x)."""
    return over_elements(_softplus_pullback, x, g)


# Each kernel below hands its stretches, in parallel, to the formula under it.


@kernel(arguments=unary)
def _relu(x, y):
    for stretch in prange(stretches(x)):
        _relu_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _relu_stretch(x):
    return np.where(x <= 0, 0, x)


@kernel(arguments=binary)
def _relu_pullback(y, g, dx):
    for stretch in prange(stretches(y)):
        n = y.shape[0]
        _relu_pullback_stretch(piece(y, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@row_pass(into=1)
def _relu_pullback_stretch(y, g):
    return np.where(y <= 0, 0, g)


@kernel(arguments=unary)
def _sigmoid(x, y):
    for stretch in prange(stretches(x)):
        _sigmoid_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _sigmoid_stretch(x):
    return 1 / (1 + np.exp(-x))


@kernel(arguments=binary)
def _sigmoid_pullback(y, g, dx):
    for stretch in prange(stretches(y)):
        n = y.shape[0]
        _sigmoid_pullback_stretch(piece(y, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@row_pass(into=1)
def _sigmoid_pullback_stretch(y, g):
    return g * y * (1 - y)


@kernel(arguments=unary)
def _tanh(x, y):
    for stretch in prange(stretches(x)):
        _tanh_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _tanh_stretch(x):
    return np.tanh(x)


@kernel(arguments=binary)
def _tanh_pullback(y, g, dx):
    for stretch in prange(stretches(y)):
        n = y.shape[0]
        _tanh_pullback_stretch(piece(y, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@row_pass(into=1)
def _tanh_pullback_stretch(y, g):
    return g * (1 - y * y)


@kernel(arguments=unary)
def _silu(x, y):
    for stretch in prange(stretches(x)):
        _silu_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _silu_stretch(x):
    return x / (1 + np.exp(-x))


@kernel(arguments=binary)
def _silu_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _silu_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@row_pass(into=1)
def _silu_pullback_stretch(x, g):
    e = np.exp(-x)
    s = 1 / (1 + e)
    return g * s * (1 + x * np.where(x < 0, 1 - s, e * s))  # of large x, 1 - s would lose digits


@kernel(arguments=unary)
def _softplus(x, y):
    for stretch in prange(stretches(x)):
        _softplus_stretch(piece(x, stretch, x.shape[0]), piece(y, stretch, x.shape[0]))


@row_pass(into=1)
def _softplus_stretch(x):
    return np.maximum(0, x) + np.log1p(np.exp(-np.abs(x)))


@kernel(arguments=binary)
def _softplus_pullback(x, g, dx):
    for stretch in prange(stretches(x)):
        n = x.shape[0]
        _softplus_pullback_stretch(piece(x, stretch, n), piece(g, stretch, n), piece(dx, stretch, n))


@row_pass(into=1)
def _softplus_pullback_stretch(x, g):
    return g / (1 + np.exp(-x))
