"""Arithmetic, element by element, with broadcasting. The engine sums a gradient over the axes that were stretched.

The rules of +, -, * and / stand below their ops and are made once: new functions at each call, and what the garbage
collector does about them, were an eighth of a small op's time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv.autograd import OUTPUT, record
from tinygrad_qkv.ops.operands import Operand, floating, numeric, pair, tensor
from tinygrad_qkv.tensor import Tensor


def add(a: Operand, b: Operand) -> Tensor:
    """a + b."""
    a, b, x, y = pair(a, b)
    return record(x + y, "add", (a, b), (), ADD_RULES, ("da = g", "db = g"))


ADD_RULES = (lambda g: g, lambda g: g)


def sub(a: Operand, b: Operand) -> Tensor:
    """a - b."""
    a, b, x, y = pair(a, b)
    return record(x - y, "sub", (a, b), (), SUB_RULES, ("da = g", "db = -g"))


SUB_RULES = (lambda g: g, lambda g: -g)


def mul(a: Operand, b: Operand) -> Tensor:
    """a * b."""
    a, b, x, y = pair(a, b)
    return record(x * y, "mul", (a, b), (a, b), MUL_RULES, ("da = g * b", "db = g * a"))


MUL_RULES = (lambda g, a, b: g * b, lambda g, a, b: g * a)


def div(a: Operand, b: Operand) -> Tensor:
    """a / b; integers give float32."""
    a, b, x, y = pair(a, b, to_float=True)
    return record(np.true_divide(x, y), "div", (a, b), (OUTPUT, b), DIV_RULES, ("da = g / b", "db = -g * y / b"))


DIV_RULES = (lambda g, y, b: g / b, lambda g, y, b: -g * y / b)


def floordiv(a: Operand, b: Operand) -> Tensor:
    """The floor of a / b; a step function, so no gradient flows."""
    _, _, x, y = pair(a, b)
    return Tensor.wrap(np.asarray(np.floor_divide(x, y)))


def mod(a: Operand, b: Operand) -> Tensor:
    """a - b * floor(a / b), with the sign of b."""
    a, b, x, y = pair(a, b)
    rules = (lambda g, a, b: g, lambda g, a, b: -g * np.floor_divide(a, b))
    return record(np.mod(x, y), "mod", (a, b), (a, b), rules, ("da = g", "db = -g * floor(a / b)"))


def pow(a: Operand, b: Operand) -> Tensor:
    """a ** b; a negative power of integers is a float.

    a ** 0 has gradient 0, also at a = 0, and so has 0 ** b (b >= 0) with respect to b: limits, where the plain
    formulas give 0 * inf.
    """
    a, b, x, y = pair(a, b)
    if _is_integer(x) and _is_integer(y) and np.any(np.less(y, 0)):
        a, b, x, y = pair(a, b, to_float=True)
    return record(
        x ** (y if isinstance(b, Tensor) else b),  # of a number NumPy knows square and root
        "pow",
        (a, b),
        (OUTPUT, a, b),
        (_pow_base, _pow_exponent),
        ("da = where(b == 0, 0, g * b * a ** (b - 1))", "db = where((a == 0) & (b >= 0), 0, g * y * log(a))"),
    )


def _is_integer(value: Any) -> bool:
    return value.dtype.kind in "biu" if isinstance(value, np.ndarray) else isinstance(value, int)


def _pow_base(g: Any, y: Any, a: Any, b: Any) -> Any:
    if not np.any(np.equal(b, 0)):
        return g * b * a ** (b - 1)
    return np.where(np.equal(b, 0), 0, g * b * np.where(np.equal(b, 0), 1, a) ** (b - 1))


def _pow_exponent(g: Any, y: Any, a: Any, b: Any) -> Any:
    flat = np.equal(a, 0) & np.greater_equal(b, 0)
    return np.where(flat, 0, g * y * np.log(np.where(flat, np.ones_like(y), a)))


def neg(a: Operand) -> Tensor:
    """-a."""
    a, x = numeric(a)
    return record(-x, "neg", (a,), (), (lambda g: -g,), ("da = -g",))


def abs(a: Operand) -> Tensor:
    """|a|; the gradient at 0 is 0."""
    a, x = numeric(a)
    return record(np.abs(x), "abs", (a,), (a,), (lambda g, a: g * np.sign(a),), ("da = g * sign(a)",))


def sign(a: Operand) -> Tensor:
    """-1, 0 or 1; its gradient is 0."""
    a, x = numeric(a)
    return record(np.sign(x), "sign", (a,), (), (lambda g: np.zeros_like(g),), ("da = zeros_like(g)",))


def reciprocal(a: Operand) -> Tensor:
    """1 / a; integers give float32."""
    a, x = floating(a)
    return record(1 / x, "reciprocal", (a,), (OUTPUT,), (lambda g, y: -g * y * y,), ("da = -g * y * y",))


def square(a: Operand) -> Tensor:
    """a * a."""
    a, x = numeric(a)
    return record(np.square(x), "square", (a,), (a,), (lambda g, a: 2 * g * a,), ("da = 2 * g * a",))


def clone(a: Operand) -> Tensor:
    """A copy that gradients flow through."""
    a = tensor(a)
    return record(a._data.copy(), "clone", (a,), (), (lambda g: g,), ("da = g",))


def astype(a: Operand, dtype: Any) -> Tensor:
    """A copy of another dtype; gradients flow between float dtypes, and are cast back by the engine."""
    a, dtype = tensor(a), np.dtype(dtype)
    if dtype.char not in "fd" or a.dtype.char not in "fd":
        return Tensor(a._data, dtype)
    return record(a._data.astype(dtype), "astype", (a,), (), (lambda g: g,), ("da = g",))
