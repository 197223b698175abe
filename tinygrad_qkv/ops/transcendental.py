"""Exponentials, logarithms, roots, trigonometry and erf, element by element; integers give float32.

Values at the edge of a domain are IEEE's, without an exception: sqrt'(0) is inf, log(0) is -inf.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import OUTPUT, record
from tinygrad_qkv.ops.operands import Operand, floating, pair
from tinygrad_qkv.tensor import Tensor

LN2, LN10 = math.log(2), math.log(10)


def exp(x: Operand) -> Tensor:
    """e to the power of x."""
    x, v = floating(x)
    return record(np.exp(v), "exp", (x,), (OUTPUT,), (lambda g, y: g * y,), ("dx = g * y",))


def expm1(x: Operand) -> Tensor:
    """exp(x) - 1, exact for small x."""
    x, v = floating(x)
    return record(np.expm1(v), "expm1", (x,), (OUTPUT,), (lambda g, y: g * (y + 1),), ("dx = g * (y + 1)",))


def log(x: Operand) -> Tensor:
    """The natural logarithm."""
    x, v = floating(x)
    return record(np.log(v), "log", (x,), (x,), (lambda g, x: g / x,), ("dx = g / x",))


def log1p(x: Operand) -> Tensor:
    """log(1 + x), exact for small x."""
    x, v = floating(x)
    return record(np.log1p(v), "log1p", (x,), (x,), (lambda g, x: g / (1 + x),), ("dx = g / (1 + x)",))


def log2(x: Operand) -> Tensor:
    """The logarithm to base 2."""
    x, v = floating(x)
    return record(np.log2(v), "log2", (x,), (x,), (lambda g, x: g / (x * LN2),), ("dx = g / (x * log(2))",))


def log10(x: Operand) -> Tensor:
    """The logarithm to base 10."""
    x, v = floating(x)
    return record(np.log10(v), "log10", (x,), (x,), (lambda g, x: g / (x * LN10),), ("dx = g / (x * log(10))",))


def sqrt(x: Operand) -> Tensor:
    """The square root."""
    x, v = floating(x)
    return record(np.sqrt(v), "sqrt", (x,), (OUTPUT,), (lambda g, y: g / (2 * y),), ("dx = g / (2 * y)",))


def rsqrt(x: Operand) -> Tensor:
    """1 / sqrt(x)."""
    x, v = floating(x)
    rule = lambda g, y: -0.5 * g * y * y * y
    return record(1 / np.sqrt(v), "rsqrt", (x,), (OUTPUT,), (rule,), ("dx = -g * y ** 3 / 2",))


def logaddexp(a: Operand, b: Operand) -> Tensor:
    """log(exp(a) + exp(b)), without overflow."""
    a, b, x, y = pair(a, b, to_float=True)
    rules = (lambda g, y, a, b: g * _share(a, y), lambda g, y, a, b: g * _share(b, y))
    formulas = ("da = g * exp(a - where(y == -inf, 0, y))", "db = g * exp(b - where(y == -inf, 0, y))")
    with np.errstate(invalid="ignore"):
        total = np.logaddexp(x, y)
    return record(total, "logaddexp", (a, b), (OUTPUT, a, b), rules, formulas)


def _share(a: Any, y: Any) -> Any:
    """exp(a - y), and 0 where both are -inf, where the difference is not a number."""
    return np.exp(a - np.where(np.equal(y, -np.inf), 0, y))


def sin(x: Operand) -> Tensor:
    """The sine, of radians."""
    x, v = floating(x)
    return record(np.sin(v), "sin", (x,), (x,), (lambda g, x: g * np.cos(x),), ("dx = g * cos(x)",))


def cos(x: Operand) -> Tensor:
    """The cosine, of radians."""
    x, v = floating(x)
    return record(np.cos(v), "cos", (x,), (x,), (lambda g, x: -g * np.sin(x),), ("dx = -g * sin(x)",))


def tan(x: Operand) -> Tensor:
    """The tangent, of radians."""
    x, v = floating(x)
    return record(np.tan(v), "tan", (x,), (OUTPUT,), (lambda g, y: g * (1 + y * y),), ("dx = g * (1 + y * y)",))


def sinh(x: Operand) -> Tensor:
    """The hyperbolic sine."""
    x, v = floating(x)
    return record(np.sinh(v), "sinh", (x,), (x,), (lambda g, x: g * np.cosh(x),), ("dx = g * cosh(x)",))


def cosh(x: Operand) -> Tensor:
    """The hyperbolic cosine."""
    x, v = floating(x)
    return record(np.cosh(v), "cosh", (x,), (x,), (lambda g, x: g * np.sinh(x),), ("dx = g * sinh(x)",))


def tanh(x: Operand) -> Tensor:
    """The hyperbolic tangent."""
    x, v = floating(x)
    return record(kernels.tanh(v), "tanh", (x,), (OUTPUT,), (_tanh_pullback,), ("dx = g * (1 - y * y)",))


def _tanh_pullback(g: Any, y: Any) -> Any:
    return kernels.tanh_pullback(g, y) if isinstance(y, np.ndarray) else g * (1 - y * y)


def arcsin(x: Operand) -> Tensor:
    """The inverse sine, in radians."""
    x, v = floating(x)
    rule = lambda g, x: g / np.sqrt(1 - x * x)
    return record(np.arcsin(v), "arcsin", (x,), (x,), (rule,), ("dx = g / sqrt(1 - x * x)",))


def arccos(x: Operand) -> Tensor:
    """The inverse cosine, in radians."""
    x, v = floating(x)
    rule = lambda g, x: -g / np.sqrt(1 - x * x)
    return record(np.arccos(v), "arccos", (x,), (x,), (rule,), ("dx = -g / sqrt(1 - x * x)",))


def arctan(x: Operand) -> Tensor:
    """The inverse tangent, in radians."""
    x, v = floating(x)
    return record(np.arctan(v), "arctan", (x,), (x,), (lambda g, x: g / (1 + x * x),), ("dx = g / (1 + x * x)",))


def erf(x: Operand) -> Tensor:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x."""
    x, v = floating(x)
    rule = lambda g, x: g * (2 / math.sqrt(math.pi)) * np.exp(-x * x)
    return record(kernels.erf(v), "erf", (x,), (x,), (rule,), ("dx = g * 2 / sqrt(pi) * exp(-x * x)",))
