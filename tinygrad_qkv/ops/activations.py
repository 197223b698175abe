"""Activation functions, element by element, stable for any input; integers give float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import OUTPUT, record
from tinygrad_qkv.ops.operands import Operand, floating
from tinygrad_qkv.ops.transcendental import erf
from tinygrad_qkv.tensor import Tensor

SQRT_HALF, SQRT_2_BY_PI, INV_SQRT_2PI = math.sqrt(0.5), math.sqrt(2 / math.pi), 1 / math.sqrt(2 * math.pi)


def relu(x: Operand) -> Tensor:
    """max(x, 0), NaN kept; the gradient at 0 is 0."""
    x, v = floating(x)
    rule = lambda g, x: np.where(np.less_equal(x, 0), 0, g)
    return record(np.maximum(v, 0), "relu", (x,), (x,), (rule,), ("dx = where(x <= 0, 0, g)",))


def leaky_relu(x: Operand, slope: float = 0.01) -> Tensor:
    """x where x > 0, else slope * x."""
    x, v = floating(x)
    slope = float(slope)
    rule = lambda g, x, slope: np.where(np.greater(x, 0), g, g * slope)
    y = np.where(v > 0, v, v * slope)
    return record(y, "leaky_relu", (x,), (x, slope), (rule,), ("dx = where(x > 0, g, g * slope)",))


def elu(x: Operand, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha * (exp(x) - 1)."""
    x, v = floating(x)
    alpha = float(alpha)
    rule = lambda g, x, alpha: np.where(np.greater(x, 0), g, g * alpha * np.exp(np.minimum(x, 0)))
    y = np.where(v > 0, v, alpha * np.expm1(np.minimum(v, 0)))
    return record(y, "elu", (x,), (x, alpha), (rule,), ("dx = where(x > 0, g, g * alpha * exp(minimum(x, 0)))",))


def sigmoid(x: Operand) -> Tensor:
    """1 / (1 + exp(-x)), without overflow."""
    x, v = floating(x)
    return record(_sigmoid(v), "sigmoid", (x,), (OUTPUT,), (lambda g, y: g * y * (1 - y),), ("dx = g * y * (1 - y)",))


def _sigmoid(x: Any) -> Any:
    """The sigmoid of an array or a Tensor; the exponent is never positive."""
    e = np.exp(-np.abs(x))
    return np.where(np.greater_equal(x, 0), 1, e) / (1 + e)


def silu(x: Operand) -> Tensor:
    """x * sigmoid(x), also called swish."""
    x, v = floating(x)

    def rule(g: Any, x: Any) -> Any:
        s = _sigmoid(x)
        return g * s * (1 + x * (1 - s))

    formula = "s = sigmoid(x); dx = g * s * (1 + x * (1 - s))"
    with np.errstate(invalid="ignore"):
        y = v * _sigmoid(v)
    return record(y, "silu", (x,), (x,), (rule,), (formula,))


def softplus(x: Operand) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    x, v = floating(x)
    rule = lambda g, x: g * _sigmoid(x)
    with np.errstate(invalid="ignore"):
        y = np.logaddexp(v, 0)
    return record(y, "softplus", (x,), (x,), (rule,), ("dx = g * sigmoid(x)",))


def gelu(x: Operand, approximate: str = "none") -> Tensor:
    """x * Phi(x), Phi the normal distribution function: by erf, or by tanh for approximate="tanh" (GPT-2's)."""
    x, v = floating(x)
    if approximate == "none":
        with np.errstate(over="ignore", invalid="ignore"):
            y = v * (0.5 * (1 + kernels.erf(v * SQRT_HALF)))
        formula = "dx = g * (0.5 * (1 + erf(x / sqrt(2))) + x * exp(-x * x / 2) / sqrt(2 * pi))"
        return record(y, "gelu", (x,), (x,), (_gelu_pullback,), (formula,))
    if approximate == "tanh":
        with np.errstate(over="ignore", invalid="ignore"):
            y = 0.5 * v * (1 + np.tanh(_gelu_tanh_argument(v)))
        formula = (
            "t = tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)); "
            "dx = g * 0.5 * (1 + t + x * (1 - t ** 2) * sqrt(2 / pi) * (1 + 0.134145 * x ** 2))"
        )
        return record(y, "gelu_tanh", (x,), (x,), (_gelu_tanh_pullback,), (formula,))
    raise ValueError(f"gelu's approximate is 'none' (erf) or 'tanh', got {approximate!r}")


def _gelu_pullback(g: Any, x: Any) -> Any:
    cdf = 0.5 * (1 + (kernels.erf if isinstance(x, np.ndarray) else erf)(x * SQRT_HALF))
    return g * (cdf + x * (np.exp(-0.5 * x * x) * INV_SQRT_2PI))


def _gelu_tanh_argument(x: Any) -> Any:
    return SQRT_2_BY_PI * (x + 0.044715 * (x * x * x))


def _gelu_tanh_pullback(g: Any, x: Any) -> Any:
    x = np.clip(x, -10, 10)  # beyond, the slope is 0 or 1 to the last bit, and x * x could overflow to 0 * inf
    t = np.tanh(_gelu_tanh_argument(x))
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (SQRT_2_BY_PI * (1 + 0.134145 * (x * x))))
