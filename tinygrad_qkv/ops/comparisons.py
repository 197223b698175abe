"""Comparisons, logic and tests of values: boolean tensors, through which no gradient flows."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv.ops.operands import Operand, pair, plain
from tinygrad_qkv.tensor import Tensor


def _constant(y: Any) -> Tensor:
    return Tensor.wrap(np.asarray(y))


def _compare(compare: np.ufunc, a: Operand, b: Operand) -> Tensor:
    _, _, x, y = pair(a, b)
    return _constant(compare(x, y))


def equal(a: Operand, b: Operand) -> Tensor:
    """a == b, element by element."""
    return _compare(np.equal, a, b)


def not_equal(a: Operand, b: Operand) -> Tensor:
    """a != b, element by element."""
    return _compare(np.not_equal, a, b)


def less(a: Operand, b: Operand) -> Tensor:
    """a < b, element by element."""
    return _compare(np.less, a, b)


def less_equal(a: Operand, b: Operand) -> Tensor:
    """a <= b, element by element."""
    return _compare(np.less_equal, a, b)


def greater(a: Operand, b: Operand) -> Tensor:
    """a > b, element by element."""
    return _compare(np.greater, a, b)


def greater_equal(a: Operand, b: Operand) -> Tensor:
    """a >= b, element by element."""
    return _compare(np.greater_equal, a, b)


def _bits(value: Operand, name: str) -> Any:
    array = np.asarray(plain(value))
    if array.dtype.kind not in "biu":
        raise TypeError(f"{name} works on booleans and integers, got {array.dtype}; compare first, e.g. t > 0")
    return array


def logical_and(a: Operand, b: Operand) -> Tensor:
    """a & b: logical for booleans, bit by bit for integers."""
    return _constant(_bits(a, "&") & _bits(b, "&"))


def logical_or(a: Operand, b: Operand) -> Tensor:
    """a | b: logical for booleans, bit by bit for integers."""
    return _constant(_bits(a, "|") | _bits(b, "|"))


def logical_xor(a: Operand, b: Operand) -> Tensor:
    """a ^ b: logical for booleans, bit by bit for integers."""
    return _constant(_bits(a, "^") ^ _bits(b, "^"))


def logical_not(a: Operand) -> Tensor:
    """~a: logical for booleans, bit by bit for integers."""
    return _constant(~_bits(a, "~"))


def isnan(x: Operand) -> Tensor:
    """Where x is not a number."""
    return _constant(np.isnan(plain(x)))


def isinf(x: Operand) -> Tensor:
    """Where x is inf or -inf."""
    return _constant(np.isinf(plain(x)))


def isfinite(x: Operand) -> Tensor:
    """Where x is neither infinite nor NaN."""
    return _constant(np.isfinite(plain(x)))


def allclose(a: Operand, b: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether |a - b| <= atol + rtol * |b| everywhere, as one Python bool."""
    return bool(np.allclose(plain(a), plain(b), rtol, atol, equal_nan))
