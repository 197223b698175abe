"""Ops that move elements without changing them; most results are views that share the operand's memory."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.indexing import getitem
from tinygrad_qkv.ops.operands import FLOAT32, Operand, operand, plain, tensor
from tinygrad_qkv.tensor import Tensor


def _sizes(given: tuple) -> tuple[int, ...]:
    """(2, 3) from f(2, 3), f((2, 3)) or f([2, 3]); TypeError for what is no integer."""
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"sizes, axes and counts are integers, got {given}; write n // 2, not n / 2") from None


def reshape(x: Operand, *shape: Any) -> Tensor:
    """The elements in C order in another shape; one size may be -1. A view where strides allow it."""
    x = tensor(x)
    sizes = _sizes(shape)
    try:
        y = x._data.reshape(sizes)
    except ValueError:
        given = math.prod(n for n in sizes if n != -1)
        why = {0: f"that is {given}", 1: f"the size -1 would be {x.size} / {given}"}
        reason = why.get(sizes.count(-1), "only one size may be -1")
        raise ValueError(f"cannot reshape {x.shape} ({x.size} elements) to {sizes}: {reason}") from None
    return record(y, "reshape", (x,), (x.shape,), RESHAPE_RULES, ("dx = reshape(g, shape)",))


RESHAPE_RULES = (lambda g, shape: np.reshape(g, shape),)


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
    order = normalize_axis_tuple(_sizes(axes), x.ndim, "axes", allow_duplicate=True)
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"permute of {x.ndim} axes (shape {x.shape}) needs each of them once, got {_sizes(axes)}")
    back = tuple(sorted(range(x.ndim), key=order.__getitem__))
    return record(x._data.transpose(order), "permute", (x,), (back,), PERMUTE_RULES, ("dx = permute(g, back)",))


PERMUTE_RULES = (lambda g, back: np.transpose(g, back),)


def swapaxes(x: Operand, i: int, j: int) -> Tensor:
    """Two axes swapped."""
    x = tensor(x)
    return record(x._data.swapaxes(i, j), "swapaxes", (x,), (i, j), SWAPAXES_RULES, ("dx = swapaxes(g, i, j)",))


SWAPAXES_RULES = (lambda g, i, j: np.swapaxes(g, i, j),)


def squeeze(x: Operand, axis: Any = None) -> Tensor:
    """Without the axes of size 1, or without the given ones, which must have size 1."""
    x = tensor(x)
    for i in () if axis is None else normalize_axis_tuple(axis, x.ndim, "axis"):
        if x.shape[i] != 1:
            raise ValueError(f"squeeze takes away axes of size 1; axis {i} of shape {x.shape} has size {x.shape[i]}")
    return record(np.squeeze(x._data, axis), "squeeze", (x,), (x.shape,), RESHAPE_RULES, ("dx = reshape(g, shape)",))


def unsqueeze(x: Operand, axis: Any) -> Tensor:
    """With a new axis of size 1 at `axis` of the result (or several, for a tuple)."""
    x = tensor(x)
    y = np.expand_dims(x._data, axis)
    return record(y, "unsqueeze", (x,), (x.shape,), RESHAPE_RULES, ("dx = reshape(g, shape)",))


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
    try:
        y = np.broadcast_to(x._data, shape)
    except ValueError:
        raise ValueError(
            f"shape {x.shape} does not broadcast to {shape}: counted from the last axis, each of its sizes must be "
            "the wanted one, or 1"
        ) from None
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
    if min(times, default=1) < 0:
        raise ValueError(f"tile's counts are not negative, got {times}")
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
    n, counts = x.shape[axis], np.asarray(plain(repeats))
    if counts.dtype.kind not in "iu" or np.any(counts < 0) or counts.shape not in ((), (1,), (n,)):
        raise ValueError(
            f"repeats are non-negative integers, one for all or one for each of the {n} elements along axis {axis}; "
            f"got {repeats!r}"
        )
    source = np.repeat(np.arange(n), counts)
    return getitem(x, (slice(None),) * axis + (source,))


def pad(x: Operand, widths: Any, value: float = 0) -> Tensor:
    """x with `value` around it; `widths` as in np.pad: one number, (before, after), or one such pair per axis.

    A float around integers makes them float32.
    """
    x, filler = tensor(x), operand(value)
    v = x._data.astype(FLOAT32) if isinstance(filler, float) and x.dtype.kind != "f" else x._data
    pairs = _widths(x.shape, widths)
    inside = tuple(slice(before, before + n) for (before, _), n in zip(pairs.tolist(), x.shape, strict=True))
    y = np.pad(v, pairs, constant_values=filler)
    return record(y, "pad", (x,), (inside,), (lambda g, inside: g[inside],), ("dx = g[inside]",))


def _widths(shape: tuple[int, ...], widths: Any) -> np.ndarray:
    """(ndim, 2): before and after each axis of `shape`."""
    given = np.asarray(widths)
    if given.dtype.kind not in "iu" or np.any(given < 0) or given.shape not in ((), (1,), (2,), (len(shape), 2)):
        raise ValueError(
            f"pad's widths are non-negative integers: one number, (before, after), or such a pair for each of the "
            f"{len(shape)} axes of shape {shape}; got {widths!r}"
        )
    return np.broadcast_to(given, (len(shape), 2))


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
