"""Ops that move elements without changing them; most results are views that share the operand's memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.indexing import getitem
from tinygrad_qkv.ops.operands import Operand, plain, tensor
from tinygrad_qkv.tensor import Tensor


def _sizes(given: tuple) -> tuple[int, ...]:
    """(2, 3) from f(2, 3), f((2, 3)) or f([2, 3])."""
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    return tuple(int(n) for n in given)


def reshape(x: Operand, *shape: Any) -> Tensor:
    """The elements in C order in another shape; one size may be -1.  A view where strides allow it."""
    x = tensor(x)
    sizes = _sizes(shape)
    try:
        y = np.reshape(x._data, sizes)
    except ValueError:
        raise ValueError(
            f"cannot reshape {x.shape} ({x.size} elements) to {sizes} ({math.prod(sizes)} elements)"
        ) from None
    return record(y, "reshape", (x,), (x.shape,), (lambda g, shape: np.reshape(g, shape),), ("dx = reshape(g, shape)",))


def view(x: Operand, *shape: Any) -> Tensor:
    """Like reshape, but a view for sure: where strides would need a copy it raises."""
    y = reshape(x, *shape)
    if y.size and not np.may_share_memory(y._data, tensor(x)._data):
        raise ValueError(f"a view of shape {y.shape} needs a copy of this layout; use reshape instead")
    return y


def flatten(x: Operand, start: int = 0, end: int = -1) -> Tensor:
    """The axes from `start` to `end` (inclusive) as one; a 0-d tensor becomes (1,)."""
    x = tensor(x)
    if x.ndim == 0:
        return reshape(x, 1)
    i, j = normalize_axis_index(start, x.ndim), normalize_axis_index(end, x.ndim)
    if i > j:
        raise ValueError(f"flatten's start {start} lies after its end {end} for {x.ndim} axes")
    return reshape(x, *x.shape[:i], math.prod(x.shape[i : j + 1]), *x.shape[j + 1 :])


def permute(x: Operand, *axes: Any) -> Tensor:
    """The axes in another order: axis i of the result is axis axes[i] of x."""
    x = tensor(x)
    order = _sizes(axes)
    if len(order) != x.ndim:
        raise ValueError(f"permute of {x.ndim} axes (shape {x.shape}) needs each of them once, got {order}")
    order = normalize_axis_tuple(order, x.ndim, "axes")
    rule = lambda g, back: np.transpose(g, back)
    back = tuple(np.argsort(order).tolist())
    return record(np.transpose(x._data, order), "permute", (x,), (back,), (rule,), ("dx = permute(g, back)",))


def swapaxes(x: Operand, i: int, j: int) -> Tensor:
    """Two axes swapped."""
    x = tensor(x)
    rule = lambda g, i, j: np.swapaxes(g, i, j)
    return record(np.swapaxes(x._data, i, j), "swapaxes", (x,), (i, j), (rule,), ("dx = swapaxes(g, i, j)",))


def squeeze(x: Operand, axis: Any = None) -> Tensor:
    """Without the axes of size 1, or without the given ones, which must have size 1."""
    x = tensor(x)
    rule = lambda g, shape: np.reshape(g, shape)
    return record(np.squeeze(x._data, axis), "squeeze", (x,), (x.shape,), (rule,), ("dx = reshape(g, shape)",))


def unsqueeze(x: Operand, axis: Any) -> Tensor:
    """With a new axis of size 1 at `axis` of the result (or several, for a tuple)."""
    x = tensor(x)
    rule = lambda g, shape: np.reshape(g, shape)
    return record(np.expand_dims(x._data, axis), "unsqueeze", (x,), (x.shape,), (rule,), ("dx = reshape(g, shape)",))


def expand(x: Operand, *sizes: Any) -> Tensor:
    """Broadcast to `sizes`; -1 keeps an axis."""
    x = tensor(x)
    wanted = _sizes(sizes)
    padded = (1,) * (len(wanted) - x.ndim) + x.shape
    if len(padded) != len(wanted):
        raise ValueError(f"expand to {wanted} has fewer axes than shape {x.shape}")
    return broadcast_to(x, tuple(n if n != -1 else old for n, old in zip(wanted, padded, strict=True)))


def broadcast_to(x: Operand, shape: Any) -> Tensor:
    """x stretched along axes of size 1 and along new leading axes; a read-only view."""
    x = tensor(x)
    y = np.broadcast_to(x._data, shape)
    return record(y, "broadcast_to", (x,), (), (lambda g: g,), ("dx = g",))


def flip(x: Operand, axis: Any = None) -> Tensor:
    """The elements in reverse order along one axis, several, or all."""
    x = tensor(x)
    rule = lambda g, axis: np.flip(g, axis)
    return record(np.flip(x._data, axis), "flip", (x,), (axis,), (rule,), ("dx = flip(g, axis)",))


def roll(x: Operand, shift: Any, axis: Any = None) -> Tensor:
    """The elements moved on by `shift`, those that fall off coming back at the start."""
    x = tensor(x)
    back = tuple(-s for s in shift) if isinstance(shift, (tuple, list)) else -shift
    rule = lambda g, back, axis: np.roll(g, back, axis)
    return record(np.roll(x._data, shift, axis), "roll", (x,), (back, axis), (rule,), ("dx = roll(g, back, axis)",))


def tile(x: Operand, *counts: Any) -> Tensor:
    """The whole tensor repeated counts[i] times along axis i; missing counts are 1, missing axes are added in front."""
    x = tensor(x)
    times = _sizes(counts)
    ndim = max(len(times), x.ndim)
    if x.ndim < ndim:
        x = unsqueeze(x, tuple(range(ndim - x.ndim)))
    times = (1,) * (ndim - len(times)) + times
    split = tuple(n for pair in zip(times, x.shape, strict=True) for n in pair)
    rule = lambda g, split: np.sum(np.reshape(g, split), axis=tuple(range(0, len(split), 2)))
    return record(np.tile(x._data, times), "tile", (x,), (split,), (rule,), ("dx = sum_over_copies(g, split)",))


def repeat_interleave(x: Operand, repeats: Any, axis: int | None = None) -> Tensor:
    """Each element along `axis` repeated `repeats` times (one number, or one for each); None flattens first."""
    x = flatten(x) if axis is None else tensor(x)
    axis = normalize_axis_index(0 if axis is None else axis, x.ndim)
    counts = np.broadcast_to(np.asarray(plain(repeats)), (x.shape[axis],))
    if counts.dtype.kind not in "iu" or np.any(counts < 0):
        raise ValueError(f"repeats are non-negative integers, got {repeats!r}")
    source = np.repeat(np.arange(x.shape[axis]), counts)
    return getitem(x, (slice(None),) * axis + (source,))


def pad(x: Operand, widths: Any, value: float = 0.0) -> Tensor:
    """x with `value` around it; `widths` as in np.pad: one number, (before, after), or one such pair per axis."""
    x = tensor(x)
    widths = np.broadcast_to(np.asarray(widths), (x.ndim, 2)).tolist()
    inside = tuple(slice(before, before + n) for (before, _), n in zip(widths, x.shape, strict=True))
    y = np.pad(x._data, widths, constant_values=value)
    return record(y, "pad", (x,), (inside,), (lambda g, inside: g[inside],), ("dx = g[inside]",))


def tril(x: Operand, k: int = 0) -> Tensor:
    """The lower triangle of the last two axes, zeros elsewhere; k > 0 keeps diagonals above the main one."""
    x = tensor(x)
    rule = lambda g, k: np.tril(g, k)
    return record(np.tril(x._data, k), "tril", (x,), (k,), (rule,), ("dx = tril(g, k)",))


def triu(x: Operand, k: int = 0) -> Tensor:
    """The upper triangle of the last two axes, zeros elsewhere; k < 0 keeps diagonals below the main one."""
    x = tensor(x)
    rule = lambda g, k: np.triu(g, k)
    return record(np.triu(x._data, k), "triu", (x,), (k,), (rule,), ("dx = triu(g, k)",))
