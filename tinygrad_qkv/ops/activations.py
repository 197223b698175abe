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
    return record(kernels.relu(v), "relu", (x,), (OUTPUT,), (_relu_pullback,), ("dx = where(y <= 0, 0, g)",))


def _relu_pullback(g: Any, y: Any) -> Any:
    return kernels.relu_pullback(g, y) if isinstance(y, np.ndarray) else np.where(np.less_equal(y, 0), 0, g)


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
    return record(kernels.sigmoid(v), "sigmoid", (x,), (OUTPUT,), (_sigmoid_pullback,), ("dx = g * y * (1 - y)",))


def _sigmoid_pullback(g: Any, y: Any) -> Any:
    return kernels.sigmoid_pullback(g, y) if isinstance(y, np.ndarray) else g * y * (1 - y)


def silu(x: Operand) -> Tensor:
    """x * sigmoid(x), also called swish."""
    x, v = floating(x)
    formula = "s = sigmoid(x); dx = g * s * (1 + x * (1 - s))"
    return record(kernels.silu(v), "silu", (x,), (x,), (_silu_pullback,), (formula,))


def _silu_pullback(g: Any, x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return kernels.silu_pullback(g, x)
    s = sigmoid(x)
    return g * s * (1 + x * (1 - s))


def softplus(x: Operand) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    x, v = floating(x)
    return record(kernels.softplus(v), "softplus", (x,), (x,), (_softplus_pullback,), ("dx = g * sigmoid(x)",))


def _softplus_pullback(g: Any, x: Any) -> Any:
    return kernels.softplus_pullback(g, x) if isinstance(x, np.ndarray) else g * sigmoid(x)


def gelu(x: Operand, approximate: str = "none") -> Tensor:
    """x * Phi(x), Phi the normal distribution function: by erf, or by tanh for approximate="tanh" (GPT-2's)."""
    x, v = floating(x)
    if approximate == "none":
        formula = "dx = g * (0.5 * (1 + erf(x / sqrt(2))) + x * exp(-x * x / 2) / sqrt(2 * pi))"
        return record(kernels.gelu(v), "gelu", (x,), (x,), (_gelu_pullback,), (formula,))
    if approximate == "tanh":
        formula = (
            "t = tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)); "
            "dx = g * 0.5 * (1 + t + x * (1 - t ** 2) * sqrt(2 / pi) * (1 + 0.134145 * x ** 2))"
        )
        return record(kernels.gelu_tanh(v), "gelu_tanh", (x,), (x,), (_gelu_tanh_pullback,), (formula,))
    raise ValueError(f"gelu's approximate is 'none' (erf) or 'tanh', got {approximate!r}")


def _gelu_pullback(g: Any, x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return kernels.gelu_pullback(g, x)
    return g * (0.5 * (1 + erf(x * SQRT_HALF)) + x * (np.exp(-0.5 * x * x) * INV_SQRT_2PI))


def _gelu_tanh_pullback(g: Any, x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return kernels.gelu_tanh_pullback(g, x)
    x = np.clip(x, -10, 10)  # beyond, the slope is 0 or 1 to the last bit, and x * x could overflow to 0 * inf
    t = np.tanh(SQRT_2_BY_PI * (x + 0.044715 * (x * x * x)))
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (SQRT_2_BY_PI * (1 + 0.134145 * (x * x))))
