"""Starting values: each function makes a new float32 Tensor of a shape, drawn from `generator` or the default stream.

To start a parameter anew: `p.data = init.normal(p.shape, std=0.02)`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.ops.creation import Generator, Shape
from tinygrad_qkv.ops.operands import FLOAT32
from tinygrad_qkv.random import init_generator
from tinygrad_qkv.tensor import Tensor


def zeros(shape: Shape, *, dtype: Any = FLOAT32) -> Tensor:
    """Zeros."""
    return ops.zeros(shape, dtype)


def ones(shape: Shape, *, dtype: Any = FLOAT32) -> Tensor:
    """Ones."""
    return ops.ones(shape, dtype)


def constant(shape: Shape, value: float, *, dtype: Any = FLOAT32) -> Tensor:
    """`value` everywhere."""
    return ops.full(shape, value, dtype)


def identity(shape: tuple[int, int] | int, *, gain: float = 1.0, dtype: Any = FLOAT32) -> Tensor:
    """`gain` on the diagonal of a matrix, 0 elsewhere; one number n is (n, n)."""
    rows, columns = (shape, shape) if isinstance(shape, int) else _matrix("identity", shape)
    return ops.eye(rows, columns, dtype) * gain


def uniform(
    shape: Shape, low: float = 0.0, high: float = 1.0, *, generator: Generator = None, dtype: Any = FLOAT32
) -> Tensor:
    """Drawn evenly from [low, high)."""
    if not low <= high:
        raise ValueError(f"uniform draws from low to high, got low={low} above high={high}")
    return ops.uniform(shape, low, high, generator=generator, dtype=dtype)


def normal(
    shape: Shape, mean: float = 0.0, std: float = 1.0, *, generator: Generator = None, dtype: Any = FLOAT32
) -> Tensor:
    """Drawn from the normal distribution."""
    if not std >= 0:
        raise ValueError(f"a standard deviation is not negative, got std={std}")
    return ops.normal(shape, mean, std, generator=generator, dtype=dtype)


def trunc_normal(
    shape: Shape,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    low: float = -2.0,
    high: float = 2.0,
    generator: Generator = None,
    dtype: Any = FLOAT32,
) -> Tensor:
    """Normal, with draws outside mean + [low, high] * std drawn again.

    NOTE: the limits are in standard deviations, where PyTorch's `a` and `b` are absolute.
    """
    share = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    if not share > 0.01:
        raise ValueError(f"trunc_normal needs limits around at least 1% of the distribution, got [{low}, {high}] std")
    random = init_generator(generator)
    z = random.normal(size=shape)
    outside = (z < low) | (z > high)
    while outside.any():
        z[outside] = random.normal(size=int(outside.sum()))
        outside = (z < low) | (z > high)
    return Tensor(mean + std * z, dtype)


def xavier_uniform(shape: Shape, *, gain: float = 1.0, generator: Generator = None, dtype: Any = FLOAT32) -> Tensor:
    """Uniform within gain * sqrt(6 / (in + out)) of 0: keeps the variance, forward and backward.

    Source: Glorot and Bengio 2010.
    """
    bound = gain * math.sqrt(6 / max(sum(_matrix("xavier_uniform", shape)), 1))
    return ops.uniform(shape, -bound, bound, generator=generator, dtype=dtype)


def xavier_normal(shape: Shape, *, gain: float = 1.0, generator: Generator = None, dtype: Any = FLOAT32) -> Tensor:
    """Normal with standard deviation gain * sqrt(2 / (in + out)). Source: Glorot and Bengio 2010."""
    std = gain * math.sqrt(2 / max(sum(_matrix("xavier_normal", shape)), 1))
    return ops.normal(shape, 0.0, std, generator=generator, dtype=dtype)


def kaiming_uniform(
    shape: Shape, *, slope: float = 0.0, in_axis: int = -1, generator: Generator = None, dtype: Any = FLOAT32
) -> Tensor:
    """Uniform within sqrt(6 / ((1 + slope^2) * in)) of 0: keeps the variance through (leaky) relu layers.

    `in_axis` is the axis that the product sums over: -1 for (out, in) as in Linear, 0 for (in, out) as in W_Q.
    Source: He et al. 2015.
    """
    bound = math.sqrt(3) * _kaiming_std("kaiming_uniform", shape, slope, in_axis)
    return ops.uniform(shape, -bound, bound, generator=generator, dtype=dtype)


def kaiming_normal(
    shape: Shape, *, slope: float = 0.0, in_axis: int = -1, generator: Generator = None, dtype: Any = FLOAT32
) -> Tensor:
    """Normal with standard deviation sqrt(2 / ((1 + slope^2) * in)); `in_axis` as in `kaiming_uniform`."""
    std = _kaiming_std("kaiming_normal", shape, slope, in_axis)
    return ops.normal(shape, 0.0, std, generator=generator, dtype=dtype)


def orthogonal(
    shape: tuple[int, int], *, gain: float = 1.0, generator: Generator = None, dtype: Any = FLOAT32
) -> Tensor:
    """A random matrix whose rows or columns, whichever are fewer, are orthonormal, times gain.

    Drawn evenly: the Q of a normal matrix, signs fixed by the diagonal of R. Source: Saxe et al. 2014; Mezzadri 2007.
    """
    rows, columns = _matrix("orthogonal", shape)
    tall = init_generator(generator).normal(size=(max(rows, columns), min(rows, columns)))
    Q, R = np.linalg.qr(tall)
    Q = Q * np.where(np.diagonal(R) < 0, -1.0, 1.0)
    return Tensor(gain * (Q if rows >= columns else Q.T), dtype)


def _matrix(name: str, shape: Any) -> tuple[int, int]:
    if isinstance(shape, int) or len(shape) != 2:
        raise ValueError(f"{name} fills matrices, got shape {shape}")
    return int(shape[0]), int(shape[1])


def _kaiming_std(name: str, shape: Any, slope: float, in_axis: int) -> float:
    if in_axis not in (-2, -1, 0, 1):
        raise ValueError(f"{name}'s in_axis is one of the two axes of a matrix, got {in_axis}")
    return math.sqrt(2 / ((1 + slope * slope) * max(_matrix(name, shape)[in_axis], 1)))
