"""Ops that select: the branch that is not taken never reaches the result or a gradient, not even as 0 * inf."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.operands import Operand, broadcast_together, floating, numeric, pair, plain
from tinygrad_qkv.random import dropout_seed
from tinygrad_qkv.tensor import Tensor


def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
    """a where the boolean condition holds, else b; all three broadcast.

    NOTE: the branch that is not taken gets gradient 0, which an infinite slope before it turns into NaN: choose its
    input too, sqrt(where(x > 0, x, 1)).
    """
    keep = _mask(condition, "where's condition")
    a, b, x, y = pair(a, b)
    for v in (x, y):
        broadcast_together(keep.shape, np.shape(v))
    formulas = ("da = where(keep, g, 0)", "db = where(keep, 0, g)")
    return record(kernels.select(keep, x, y), "where", (a, b), (keep,), WHERE_RULES, formulas)


def _select(keep: np.ndarray, a: Any, b: Any) -> Any:
    """np.where, by the kernel unless it is to be recorded."""
    return np.where(keep, a, b) if isinstance(a, Tensor) or isinstance(b, Tensor) else kernels.select(keep, a, b)


WHERE_RULES = (lambda g, keep: _select(keep, g, 0), lambda g, keep: _select(keep, 0, g))


def masked_fill(x: Operand, mask: Operand, value: Operand) -> Tensor:
    """x with `value` where the boolean mask is True."""
    return where(np.logical_not(_mask(mask, "masked_fill's mask")), x, value)


def _mask(condition: Operand, what: str) -> np.ndarray:
    mask = np.array(plain(condition))
    if mask.dtype != np.bool_:
        raise TypeError(f"{what} is boolean, got {mask.dtype}; compare first, e.g. mask != 0")
    return mask


def maximum(a: Operand, b: Operand) -> Tensor:
    """The larger one, NaN if either is; equal operands share the gradient."""
    a, b, x, y = pair(a, b)
    rules = (_larger, lambda g, a, b: _larger(g, b, a))
    formulas = ("da = where(a == b, g / 2, where(a < b, 0, g))", "db = where(a == b, g / 2, where(b < a, 0, g))")
    return record(np.maximum(x, y), "maximum", (a, b), (a, b), rules, formulas)


def minimum(a: Operand, b: Operand) -> Tensor:
    """The smaller one, NaN if either is; equal operands share the gradient."""
    a, b, x, y = pair(a, b)
    rules = (lambda g, a, b: _larger(g, -a, -b), lambda g, a, b: _larger(g, -b, -a))
    formulas = ("da = where(a == b, g / 2, where(a > b, 0, g))", "db = where(a == b, g / 2, where(b > a, 0, g))")
    return record(np.minimum(x, y), "minimum", (a, b), (a, b), rules, formulas)


def _larger(g: Any, a: Any, b: Any) -> Any:
    """The part of g that goes to a, where a is larger than b (half of it where they are equal)."""
    return np.where(np.equal(a, b), g / 2, np.where(np.less(a, b), 0, g))


def clip(x: Operand, low: Operand = None, high: Operand = None) -> Tensor:
    """x, limited to [low, high]; None is no limit. Inside and on the limits the gradient passes, outside it is 0.

    Limits that are tensors get gradients too: clip is then minimum(maximum(x, low), high).
    """
    if low is None and high is None:
        raise ValueError("clip needs low, high or both")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        x = x if low is None else maximum(x, low)
        return x if high is None else minimum(x, high)
    x, v = floating(x) if isinstance(low, float) or isinstance(high, float) else numeric(x)
    inside = (v >= (-np.inf if low is None else low)) & (v <= (np.inf if high is None else high)) | np.isnan(v)
    y = np.clip(v, low, high).astype(v.dtype, copy=False)
    rule = lambda g, inside: _select(inside, g, 0)
    return record(y, "clip", (x,), (inside,), (rule,), ("dx = where(inside, g, 0)",))


def dropout(x: Operand, p: float, generator: np.random.Generator | None = None) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p); p = 1 gives zeros.

    One 64-bit seed per call says by a counter-based generator which elements are kept, whatever the number of threads;
    the pullback makes the same choice again, so no mask is stored.
    Source: Srivastava et al. 2014, in the scaled form that needs nothing at inference.
    """
    p = probability(p)
    return dropout_by_seed(x, p, dropout_seed(generator) if p else 0)


def dropout_by_seed(x: Operand, p: float, seed: int) -> Tensor:
    """Dropout of which the seed is known: the same elements for the same seed and shape."""
    x, v = floating(x)
    return x if p == 0 else _dropped(x, v, p, seed)


def _dropped(x: Tensor, v: np.ndarray, p: float, seed: int) -> Tensor:
    formula = "dx = where(kept(g, p, seed), g / (1 - p), 0)"
    return record(kernels.dropout(v, p, seed), "dropout", (x,), (p, seed), (_dropout_pullback,), (formula,))


def _dropout_pullback(g: Any, p: float, seed: int) -> Any:
    return _dropped(g, g._data, p, seed) if isinstance(g, Tensor) else kernels.dropout(g, p, seed)


def probability(p: float) -> float:
    """p as a Python number, if it is a probability; dropout checks it, and so do the layers when they are made."""
    if not isinstance(p, numbers.Real) or not 0 <= p <= 1:
        raise ValueError(f"dropout's p is a probability from 0 to 1, got {p!r}")
    return float(p)  # a NumPy scalar would make float64 of float32
