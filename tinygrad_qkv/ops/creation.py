"""New tensors: constants, ranges, random numbers. Floats are float32 unless `dtype` says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv.ops.operands import FLOAT32, Operand, plain, tensor
from tinygrad_qkv.random import init_generator
from tinygrad_qkv.tensor import Tensor

Shape = int | tuple[int, ...] | list[int]
Generator = np.random.Generator | None


def _made(array: np.ndarray, requires_grad: bool) -> Tensor:
    t = Tensor.wrap(array)
    if requires_grad:
        t.requires_grad = True
    return t


def zeros(shape: Shape, dtype: Any = FLOAT32, requires_grad: bool = False) -> Tensor:
    """Zeros."""
    return _made(np.zeros(shape, dtype), requires_grad)


def ones(shape: Shape, dtype: Any = FLOAT32, requires_grad: bool = False) -> Tensor:
    """Ones."""
    return _made(np.ones(shape, dtype), requires_grad)


def full(shape: Shape, value: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """`value` everywhere, in the dtype that Tensor(value) has."""
    return _made(np.full(shape, plain(value), tensor(value).dtype if dtype is None else dtype), requires_grad)


def zeros_like(x: Operand, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Zeros of the shape and dtype of x."""
    x = tensor(x)
    return zeros(x.shape, x.dtype if dtype is None else dtype, requires_grad)


def ones_like(x: Operand, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Ones of the shape and dtype of x."""
    x = tensor(x)
    return ones(x.shape, x.dtype if dtype is None else dtype, requires_grad)


def full_like(x: Operand, value: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """`value` in the shape and dtype of x."""
    x = tensor(x)
    return full(x.shape, value, x.dtype if dtype is None else dtype, requires_grad)


def arange(start: float, stop: float | None = None, step: float = 1, dtype: Any = None) -> Tensor:
    """Numbers from start (or 0) up to, without, stop: int64 for integers, else float32."""
    span = (0, start, step) if stop is None else (start, stop, step)
    if dtype is None:
        dtype = np.int64 if all(isinstance(n, (int, np.integer)) for n in span) else FLOAT32
    return Tensor.wrap(np.arange(*span).astype(dtype))


def linspace(start: float, stop: float, num: int = 50, dtype: Any = FLOAT32) -> Tensor:
    """`num` evenly spaced numbers from start to stop, both included."""
    return Tensor.wrap(np.linspace(start, stop, num).astype(dtype))


def eye(n: int, m: int | None = None, dtype: Any = FLOAT32, requires_grad: bool = False) -> Tensor:
    """Ones on the diagonal of an (n, m) matrix; m defaults to n."""
    return _made(np.eye(n, m, dtype=dtype), requires_grad)


def one_hot(ids: Operand, classes: int | None = None, dtype: Any = FLOAT32) -> Tensor:
    """(..., classes) with a 1 at each id of `ids` (...); classes defaults to the largest id + 1."""
    ids = np.asarray(plain(ids))
    if ids.dtype.kind not in "iu":
        raise TypeError(f"one_hot takes integers, got {ids.dtype}")
    classes = int(ids.max(initial=-1)) + 1 if classes is None else classes
    if classes < 0:
        raise ValueError(f"one_hot's classes is a number from 0 up, or None for the largest id + 1; got {classes}")
    if ids.size and (ids.min() < 0 or ids.max() >= classes):
        raise IndexError(f"one_hot of ids {ids.min()} to {ids.max()} needs ids from 0 to {classes - 1}")
    return Tensor.wrap((ids[..., None] == np.arange(classes)).astype(dtype))


def uniform(
    shape: Shape,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: Generator = None,
    dtype: Any = FLOAT32,
) -> Tensor:
    """Numbers drawn evenly from [low, high)."""
    return Tensor.wrap(init_generator(generator).uniform(low, high, shape).astype(dtype))


def normal(
    shape: Shape,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: Generator = None,
    dtype: Any = FLOAT32,
) -> Tensor:
    """Numbers drawn from the normal distribution."""
    return Tensor.wrap(init_generator(generator).normal(mean, std, shape).astype(dtype))


def integers(low: int, high: int, shape: Shape, *, generator: Generator = None) -> Tensor:
    """int64 numbers drawn evenly from low up to, without, high."""
    return Tensor.wrap(init_generator(generator).integers(low, high, shape))


def from_dlpack(source: Any) -> Tensor:
    """A Tensor that shares memory with any CPU array that speaks DLPack (PyTorch, JAX, NumPy)."""
    return Tensor.from_numpy(np.from_dlpack(source))
