"""Dropout by number: which elements are dropped follows from the seed and from their places alone."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.elementwise import STRETCH, piece, stretches
from tinygrad_qkv.kernels.random_bits import fill_bits, keep_above, keep_scaled
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def dropout(x: np.ndarray, p: float, seed: int) -> np.ndarray:
    """y[i] = x[i] / (1 - p) where bits[i] > keep_above(p), else 0; for p = 1 all 0.

    x of any shape, float32 or float64; 0 < p <= 1; 0 <= seed < 2^64. i counts the elements in C order, and bits[i] are
    the 32 bits of element i under the seed (`random_bits.fill_bits`). It is its own pullback: dx = dropout(g, p, seed).

    NOTE: fused attention promises to drop the same weights as this function does of an array (B, H, T, S): there i is
    ((b * H + h) * T + t) * S + s. A change of the numbering here is one there.
    """
    if not 0 < p <= 1:
        raise ValueError(f"dropout's p is a probability above 0, at most 1, got {p}")
    x = contiguous(x, "dropout")
    line, y = x.ravel(), empty(x.shape, x.dtype)
    if y.size:
        scale = 1 / (1 - p) if p < 1 else 1.0
        _drop(line, keep_above(p), scale, np.uint64(seed), y.ravel(), parallel=y.size >= PARALLEL_FROM["dropout"])
    return y


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 1), types.uint32, scalar, types.uint64, array_out(scalar, 1)


@kernel(arguments=_types)
def _drop(x, limit, scale, seed, y):
    """for each stretch of elements, in parallel: the formula of `dropout`."""
    n = x.shape[0]
    for stretch in prange(stretches(x)):
        _drop_stretch(piece(x, stretch, n), limit, scale, seed, stretch * STRETCH, piece(y, stretch, n))


@kernel
def _drop_stretch(x, limit, scale, seed, first, y):
    bits = np.empty(x.shape[0], np.uint32)  # 16 KB at most: a second pass over the cache is faster than one that
    fill_bits(seed, first, bits)  # takes pairs of words apart
    keep_scaled(x, bits, limit, scale, y)
