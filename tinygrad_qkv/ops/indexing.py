"""Indexing and lookup. Their pullbacks add each gradient where its element came from, so repeats add up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.operands import Operand, numeric, plain, tensor
from tinygrad_qkv.tensor import Tensor


def getitem(x: Operand, index: Any) -> Tensor:
    """x[index], with NumPy's basic and advanced indexing and boolean masks; a view for basic ones."""
    x = tensor(x)
    index = _plain_index(index)
    return record(x._data[index], "getitem", (x,), (index, x.shape), (add_at,), ("dx = add_at(g, index, shape)",))


def _plain_index(index: Any) -> Any:
    """The index with tensors, lists and arrays as copied arrays: a later change of theirs must not move gradients."""
    if isinstance(index, tuple):
        return tuple(_plain_index(part) for part in index)
    if isinstance(index, (Tensor, list, np.ndarray)):
        array = np.array(plain(index) if not isinstance(index, list) else [plain(part) for part in index])
        if array.size == 0 and isinstance(index, list):
            array = array.astype(np.int64)
        if array.dtype.kind not in "biu":
            raise IndexError(f"an index is made of integers or booleans, got {array.dtype}")
        return array
    return index


def _is_basic(index: Any) -> bool:
    """Whether no element can be chosen twice: slices, single integers, None, ... and boolean masks alone."""
    parts = index if isinstance(index, tuple) else (index,)
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    return not arrays or (len(arrays) == 1 and arrays[0].dtype == np.bool_)


def add_at(g: Operand, index: Any, shape: tuple[int, ...]) -> Any:
    """Zeros of `shape` with g added at `index`, as often as an element is named: the adjoint of x[index].

    Array in, array out; Tensor in, Tensor out, recorded.
    """
    if isinstance(g, Tensor):
        rule = lambda g, index: g[index]
        return record(add_at(g._data, index, shape), "add_at", (g,), (index,), (rule,), ("dx = g[index]",))
    out = np.zeros(shape, g.dtype)
    if _is_basic(index):
        out[index] = g
    else:
        np.add.at(out, index, g)
    return out


def setitem(x: Operand, index: Any, value: Operand) -> Tensor:
    """A copy of x with x[index] replaced by `value`, which broadcasts; overwritten elements get no gradient."""
    x, v = numeric(x)
    index, value = _plain_index(index), tensor(value)
    y = v.copy()
    place = y[index].shape
    extra = value.ndim - len(place)
    if extra > 0 and value.shape[:extra] == (1,) * extra:
        value = np.reshape(value, value.shape[extra:])
    if any(n not in (1, m) for n, m in zip(value.shape[::-1], place[::-1], strict=False)) or value.ndim > len(place):
        raise ValueError(f"t[index] = value: a value of shape {value.shape} does not broadcast to t[index], {place}")
    if not np.can_cast(value.dtype, y.dtype, "same_kind"):
        raise TypeError(f"cannot write {value.dtype} into a tensor of {y.dtype}; convert one of them with astype")
    y[index] = value._data
    untouched = np.ones(v.shape, bool)
    untouched[index] = False
    last = _last_writers(index, v.shape)
    rules = (
        lambda g, untouched, index, last: np.where(untouched, g, 0),
        lambda g, untouched, index, last: np.where(last, g[index], 0),
    )
    formulas = ("dx = where(untouched, g, 0)", "dvalue = where(last, g[index], 0)")
    return record(y, "setitem", (x, value), (untouched, index, last), rules, formulas)


def _last_writers(index: Any, shape: tuple[int, ...]) -> np.ndarray | bool:
    """Which of the written values stay: of several for one element only one does, and only it gets a gradient."""
    if _is_basic(index):
        return True
    writer = np.zeros(shape, np.int64)
    order = np.arange(writer[index].size).reshape(writer[index].shape)
    writer[index] = order
    return writer[index] == order


def take_along_axis(x: Operand, indices: Operand, axis: int) -> Tensor:
    """x[..., indices, ...] along one axis: `indices` has x's number of axes and broadcasts against the others."""
    x = tensor(x)
    axis = normalize_axis_index(axis, x.ndim)
    chosen = np.asarray(plain(indices))
    if chosen.ndim != x.ndim:
        raise ValueError(f"take_along_axis: indices of shape {chosen.shape} need {x.ndim} axes, like x of {x.shape}")
    grid = [np.arange(n).reshape([-1 if i == k else 1 for i in range(x.ndim)]) for k, n in enumerate(x.shape)]
    grid[axis] = chosen
    return getitem(x, tuple(grid))


def embedding(weight: Operand, ids: Operand) -> Tensor:
    """Rows of a table: weight (rows, width), integer ids (...) from 0 to rows - 1 -> (..., width).

    An id outside that range raises IndexError, negative ones too.
    """
    weight, given = tensor(weight), plain(ids)
    ids = np.array(given)
    if weight.ndim != 2:
        raise ValueError(f"an embedding's weight has shape (rows, width), got {weight.shape}")
    if ids.dtype.kind not in "iu" and not ids.size and not isinstance(given, np.ndarray):
        ids = ids.astype(np.int64)  # an empty list, which NumPy takes for floats
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids are integers, got {ids.dtype}")
    rows = weight.shape[0]
    y = kernels.gather(weight._data, ids)
    return record(y, "embedding", (weight,), (ids, rows), (add_rows,), ("dweight = add_rows(g, ids, rows)",))


def add_rows(g: Any, ids: np.ndarray, rows: int) -> Any:
    """(rows, width) of zeros with g (..., width) added to the rows that ids (...) names: the adjoint of embedding.

    Array in, array out; Tensor in, Tensor out, recorded.
    """
    if isinstance(g, Tensor):
        rule = lambda g, ids: g[ids]
        return record(add_rows(g._data, ids, rows), "add_rows", (g,), (ids,), (rule,), ("dx = g[ids]",))
    return kernels.scatter_add(g.reshape(ids.size, g.shape[-1]), ids.reshape(-1), rows)
