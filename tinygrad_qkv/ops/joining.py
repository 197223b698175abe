"""Joining tensors along an axis and cutting them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.indexing import getitem
from tinygrad_qkv.ops.operands import FLOAT32, Operand, numeric, tensor
from tinygrad_qkv.ops.shapes import broadcast_to, reshape, swapaxes
from tinygrad_qkv.tensor import Tensor


def _common(tensors: Sequence[Operand], op: str) -> tuple[list[Tensor], list[np.ndarray]]:
    """The operands and their values, integers beside float32 as float32."""
    if isinstance(tensors, Tensor) or not tensors:
        raise ValueError(f"{op} needs a list of at least one tensor")
    parts, arrays = map(list, zip(*(numeric(t) for t in tensors), strict=True))
    if any(a.dtype.kind == "f" for a in arrays):
        arrays = [a if a.dtype.kind == "f" else a.astype(FLOAT32) for a in arrays]
    return parts, arrays


def cat(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
    """The tensors one after another along an existing axis; the other axes agree."""
    parts, arrays = _common(tensors, "cat")
    try:
        y = np.concatenate(arrays, axis)
    except ValueError as error:
        raise ValueError(f"cat along axis {axis} of shapes {[p.shape for p in parts]}: {error}") from None
    cuts = tuple(np.cumsum([p.shape[axis] for p in parts])[:-1].tolist())
    rule = lambda g, cuts, axis: np.split(g, cuts, axis)
    formulas = tuple(f"dx{i} = split(g, cuts, axis)[{i}]" for i in range(len(parts)))
    return record(y, "cat", tuple(parts), (cuts, axis), rule, formulas)


def stack(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
    """Tensors of one shape one after another along a new axis."""
    parts, arrays = _common(tensors, "stack")
    if len({a.shape for a in arrays}) > 1:
        raise ValueError(f"stack needs tensors of one shape, got {[p.shape for p in parts]}")
    y = np.stack(arrays, axis)
    rule = lambda g, axis: tuple(np.moveaxis(g, axis, 0))
    formulas = tuple(f"dx{i} = unbind(g, axis)[{i}]" for i in range(len(parts)))
    return record(y, "stack", tuple(parts), (normalize_axis_index(axis, y.ndim),), rule, formulas)


def split(x: Operand, sizes: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Pieces of the given sizes along an axis, as in PyTorch: one size (the last piece may be smaller), or a list."""
    x = tensor(x)
    axis = normalize_axis_index(axis, x.ndim)
    n = x.shape[axis]
    if isinstance(sizes, (int, np.integer)):
        if sizes <= 0:
            raise ValueError(f"split's size is positive, got {sizes}")
        sizes = [min(sizes, n - start) for start in range(0, n, sizes)] or [0]
    if not np.iterable(sizes):
        raise TypeError(f"split takes one size or a list of sizes, integers; got {sizes!r}")
    if sum(sizes) != n or any(size < 0 for size in sizes):
        raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}, axis {axis} of shape {x.shape} has {n}")
    ends = np.cumsum(sizes).tolist()
    return [_piece(x, axis, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def chunk(x: Operand, chunks: int, axis: int = 0) -> list[Tensor]:
    """At most `chunks` pieces of equal size along an axis, the last one smaller if needed, as in PyTorch."""
    x = tensor(x)
    if chunks <= 0:
        raise ValueError(f"chunk needs a positive number of chunks, got {chunks}")
    n = x.shape[normalize_axis_index(axis, x.ndim)]
    return split(x, max(1, -(-n // chunks)), axis)


def unbind(x: Operand, axis: int = 0) -> list[Tensor]:
    """The slices along an axis, without that axis."""
    x = tensor(x)
    axis = normalize_axis_index(axis, x.ndim)
    return [getitem(x, (slice(None),) * axis + (i,)) for i in range(x.shape[axis])]


def meshgrid(*axes: Operand, indexing: str = "ij") -> list[Tensor]:
    """Coordinate grids of 1-d tensors; indexing "ij" keeps their order, "xy" swaps the first two axes."""
    if indexing not in ("ij", "xy"):
        raise ValueError(f"meshgrid's indexing is 'ij' or 'xy', got {indexing!r}")
    lines = [tensor(a) for a in axes]
    if any(line.ndim > 1 for line in lines):
        raise ValueError(f"meshgrid takes 1-d tensors, got shapes {[line.shape for line in lines]}")
    shape = [line.size for line in lines]
    grids = [
        broadcast_to(reshape(line, [-1 if i == k else 1 for i in range(len(lines))]), shape)
        for k, line in enumerate(lines)
    ]
    return [swapaxes(grid, 0, 1) for grid in grids] if indexing == "xy" and len(lines) > 1 else grids


def _piece(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    index: tuple[Any, ...] = (slice(None),) * axis + (slice(start, stop),)
    return getitem(x, index)
