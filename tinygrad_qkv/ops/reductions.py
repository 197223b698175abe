"""Reductions over one axis, several axes (a tuple) or all (None); `axis=()` reduces nothing.

In a rule `g` has the result's shape; `_spread` puts the reduced axes back with size 1, so that it broadcasts.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import OUTPUT, record
from tinygrad_qkv.ops.arithmetic import abs
from tinygrad_qkv.ops.operands import Operand, floating, numeric, plain, refuse_names
from tinygrad_qkv.tensor import Tensor

Axes = int | tuple[int, ...] | list[int] | None


def _axes(axis: Axes, ndim: int) -> tuple[int, ...]:
    """The axes as a sorted tuple of non-negative numbers; a wrong or repeated one raises."""
    return tuple(range(ndim)) if axis is None else tuple(sorted(normalize_axis_tuple(axis, ndim, "axis")))


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with the reduced axes kept as size 1."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _count(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod([shape[i] for i in axes])


def _spread(g: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    return np.broadcast_to(np.reshape(g, _kept(shape, axes)), shape)


def _sum(x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """The sum of an array by the kernel, or of a Tensor by the op, recorded."""
    if not isinstance(x, np.ndarray):
        return np.sum(x, axis=axes, keepdims=keepdims)
    y = kernels.total(x, axes)
    return np.reshape(y, _kept(x.shape, axes)) if keepdims else y


def sum(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The sum; of nothing it is 0, of booleans the count."""
    refuse_names(unknown)
    x, v = numeric(x)
    axes = _axes(axis, v.ndim)
    return record(_sum(v, axes, keepdims), "sum", (x,), (x.shape, axes), (_spread,), ("dx = g",))


def mean(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The arithmetic mean; of nothing it is NaN."""
    refuse_names(unknown)
    x, v = floating(x)
    axes = _axes(axis, v.ndim)
    n = _count(v.shape, axes)
    total = _sum(v, axes, keepdims)
    y = total / n if n else np.full_like(total, np.nan)
    rule = lambda g, shape, axes, n: _spread(g / n, shape, axes)
    return record(y, "mean", (x,), (x.shape, axes, n), (rule,), ("dx = g / n",))


def max(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The largest element (NaN if one is); ties share the gradient equally. Of nothing it raises ValueError."""
    refuse_names(unknown)
    return _extreme(x, "max", kernels.largest, axis, keepdims)


def min(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The smallest element (NaN if one is); ties share the gradient equally. Of nothing it raises ValueError."""
    refuse_names(unknown)
    return _extreme(x, "min", kernels.smallest, axis, keepdims)


def _extreme(x: Operand, name: str, reduce: Any, axis: Axes, keepdims: bool) -> Tensor:
    x, v = numeric(x)
    axes = _axes(axis, v.ndim)
    if _count(v.shape, axes) == 0 and 0 not in _kept(v.shape, axes):
        raise ValueError(f"{name} of nothing has no value: shape {v.shape}, axis {axis}")
    y = reduce(v, axes)
    y = np.reshape(y, _kept(v.shape, axes)) if keepdims else y
    formula = "dx = where(same(x, y), g / sum(same(x, y), axes), 0)"  # same: equal, or both NaN
    return record(y, name, (x,), (OUTPUT, x, axes), (_extreme_pullback,), (formula,))


def _extreme_pullback(g: Any, y: Any, x: Any, axes: tuple[int, ...]) -> Any:
    kept = _kept(x.shape, axes)
    hit = np.equal(x, np.reshape(y, kept))
    if np.any(np.isnan(y)):
        hit = hit | np.isnan(x)
    if isinstance(x, np.ndarray):
        return kernels.select(hit, np.reshape(g, kept) / _sum(hit.astype(x.dtype), axes, True), 0)
    ties = _sum(np.where(hit, 1.0, np.zeros_like(x)), axes, True)
    return np.where(hit, np.reshape(g, kept) / ties, 0)


def prod(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The product; of nothing it is 1. The gradient is right with zeros among the factors."""
    refuse_names(unknown)
    x, v = numeric(x)
    axes = _axes(axis, v.ndim)
    y = np.prod(v, axis=axes, keepdims=keepdims)
    return record(y, "prod", (x,), (x, axes), (_prod_pullback,), ("dx = g * product_of_others(x, axes)",))


def _prod_pullback(g: Any, x: Any, axes: tuple[int, ...]) -> Any:
    """g times the product of the other factors: no division, which fails at 0."""
    rest = tuple(i for i in range(x.ndim) if i not in axes)
    rows: Any = np.reshape(np.transpose(x, rest + axes), (*(x.shape[i] for i in rest), _count(x.shape, axes)))
    others: Any = (_products_of_others if isinstance(x, np.ndarray) else _products_of_others_composed)(rows)
    others = np.reshape(others, tuple(x.shape[i] for i in rest + axes))
    return np.reshape(g, _kept(x.shape, axes)) * np.transpose(others, np.argsort(rest + axes).tolist())


def _products_of_others(rows: np.ndarray) -> np.ndarray:
    """Along the last axis: the products of all before an element times those of all after it."""
    ones = np.ones_like(rows[..., :1])
    before = np.cumprod(np.concatenate([ones, rows[..., :-1]], axis=-1), axis=-1)
    after = np.cumprod(np.concatenate([ones, rows[..., :0:-1]], axis=-1), axis=-1)[..., ::-1]
    return (before * after)[..., : rows.shape[-1]]


def _products_of_others_composed(rows: Tensor) -> Tensor:
    """The same of a Tensor, recorded: one row per left-out factor, so quadratic in the number of factors."""
    n = rows.shape[-1]
    repeated = np.broadcast_to(np.expand_dims(rows, -2), (*rows.shape[:-1], n, n))
    return np.prod(np.where(np.eye(n, dtype=bool), 1, repeated), axis=-1)


def var(x: Operand, axis: Axes = None, ddof: int = 0, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The variance, sum((x - mean)^2) / (n - ddof), in two passes."""
    refuse_names(unknown)
    x, v = floating(x)
    axes = _axes(axis, v.ndim)
    n = _degrees(v.shape, axes, ddof)
    formula = "dx = g * 2 * (x - mean(x, axes)) / n"
    return record(_variance(v, axes, n, keepdims), "var", (x,), (x, axes, n), (_var_pullback,), (formula,))


def _degrees(shape: tuple[int, ...], axes: tuple[int, ...], ddof: int) -> int:
    """n - ddof, never below 0: too few elements give NaN or inf and no exception, as in NumPy."""
    n = _count(shape, axes) - ddof
    return n if n > 0 else 0


def _variance(v: np.ndarray, axes: tuple[int, ...], n: int, keepdims: bool) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        centred = _centred(v, axes)
        return np.asarray(_sum(centred * centred, axes, keepdims)) / v.dtype.type(n)


def _centred(x: Any, axes: tuple[int, ...]) -> Any:
    """x minus its mean. A second subtraction takes out what rounding has left of a large mean."""
    n = _count(x.shape, axes)
    if not x.size:
        return x
    centred = x - _sum(x, axes, True) / n
    return centred - _sum(centred, axes, True) / n


def _var_pullback(g: Any, x: Any, axes: tuple[int, ...], n: int) -> Any:
    return np.reshape(g, _kept(x.shape, axes)) * _centred(x, axes) * (2 / n if n else math.nan)


def std(x: Operand, axis: Axes = None, ddof: int = 0, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The standard deviation, sqrt(var); where it is 0 its gradient is 0."""
    refuse_names(unknown)
    x, v = floating(x)
    axes = _axes(axis, v.ndim)
    n = _degrees(v.shape, axes, ddof)
    y = np.sqrt(_variance(v, axes, n, keepdims))
    formula = "dx = where(y == 0, 0, g / y * (x - mean(x, axes)) / n)"
    return record(y, "std", (x,), (OUTPUT, x, axes, n), (_std_pullback,), (formula,))


def _std_pullback(g: Any, y: Any, x: Any, axes: tuple[int, ...], n: int) -> Any:
    flat = np.equal(y, 0)
    slope = np.where(flat, 0, g / np.where(flat, 1, y)) * (1 / n if n else math.nan)
    return np.reshape(slope, _kept(x.shape, axes)) * _centred(x, axes)


def logsumexp(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """log(sum(exp(x))), without overflow; of nothing and of -inf alone it is -inf."""
    refuse_names(unknown)
    x, v = floating(x)
    axes = _axes(axis, v.ndim)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        top = np.max(v, axis=axes, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0)
        y = np.log(_sum(np.exp(v - top), axes, True)) + top
    y = y if keepdims else np.reshape(y, tuple(n for i, n in enumerate(v.shape) if i not in axes))
    return record(y, "logsumexp", (x,), (OUTPUT, x, axes), (_logsumexp_pullback,), ("dx = g * exp(x - y)",))


def _logsumexp_pullback(g: Any, y: Any, x: Any, axes: tuple[int, ...]) -> Any:
    kept = _kept(x.shape, axes)
    return np.reshape(g, kept) * np.exp(x - np.reshape(np.where(np.equal(y, -np.inf), 0, y), kept))


def norm(x: Operand, ord: float = 2, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The vector norm sum(|x|^ord)^(1/ord); ord = inf is the largest |x|.  The gradient at 0 is 0."""
    refuse_names(unknown)
    if not isinstance(ord, numbers.Real):
        raise TypeError(f"norm's ord is a number, got {ord!r}; the Frobenius norm is the one of order 2 over all axes")
    if ord == math.inf:
        return max(abs(x), axis, keepdims)
    if ord <= 0:
        raise ValueError(f"norm's ord is positive or inf, got {ord}")
    ord = float(ord)  # a NumPy scalar would make float64 of float32
    x, v = floating(x)
    axes = _axes(axis, v.ndim)
    if ord == 2:
        y = np.sqrt(_sum(v * v, axes, keepdims))
        return record(y, "norm", (x,), (OUTPUT, x, axes), (_norm_pullback,), ("dx = where(y == 0, 0, g / y * x)",))
    y = _sum(np.abs(v) ** ord, axes, keepdims) ** (1 / ord)
    formula = "dx = where(x == 0, 0, g * sign(x) * (abs(x) / y) ** (ord - 1))"
    return record(y, "norm", (x,), (OUTPUT, x, axes, ord), (_norm_of_order_pullback,), (formula,))


def _norm_pullback(g: Any, y: Any, x: Any, axes: tuple[int, ...]) -> Any:
    flat = np.equal(y, 0)
    return np.reshape(np.where(flat, 0, g / np.where(flat, 1, y)), _kept(x.shape, axes)) * x


def _norm_of_order_pullback(g: Any, y: Any, x: Any, axes: tuple[int, ...], ord: float) -> Any:
    kept, zero = _kept(x.shape, axes), np.equal(x, 0)
    share = np.where(zero, np.ones_like(x), np.abs(x)) / np.reshape(np.where(np.equal(y, 0), 1, y), kept)
    return np.where(zero, 0, np.reshape(g, kept) * np.sign(x) * share ** (ord - 1))


def cumsum(x: Operand, axis: int | None = None, **unknown: Any) -> Tensor:
    """The running sum along one axis."""
    refuse_names(unknown)
    x, v = numeric(x)
    if axis is None:
        raise TypeError("cumsum runs along one axis: cumsum(x, axis); of all elements: x.flatten().cumsum(0)")
    axis = normalize_axis_index(axis, v.ndim)
    rule = lambda g, axis: np.flip(np.cumsum(np.flip(g, axis), axis), axis)
    formula = "dx = flip(cumsum(flip(g, axis), axis), axis)"
    return record(np.cumsum(v, axis=axis), "cumsum", (x,), (axis,), (rule,), (formula,))


def argmax(x: Operand, axis: int | None = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The index of the first largest element, int64; no gradient."""
    refuse_names(unknown)
    return Tensor.wrap(np.asarray(np.argmax(plain(x), axis=axis, keepdims=keepdims), dtype=np.int64))


def argmin(x: Operand, axis: int | None = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """The index of the first smallest element, int64; no gradient."""
    refuse_names(unknown)
    return Tensor.wrap(np.asarray(np.argmin(plain(x), axis=axis, keepdims=keepdims), dtype=np.int64))


def any(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """Whether one element is true (not 0); no gradient."""
    refuse_names(unknown)
    v = plain(x)
    return Tensor.wrap(np.asarray(np.any(v, axis=_axes(axis, np.ndim(v)), keepdims=keepdims)))


def all(x: Operand, axis: Axes = None, keepdims: bool = False, **unknown: Any) -> Tensor:
    """Whether every element is true (not 0); no gradient."""
    refuse_names(unknown)
    v = plain(x)
    return Tensor.wrap(np.asarray(np.all(v, axis=_axes(axis, np.ndim(v)), keepdims=keepdims)))
