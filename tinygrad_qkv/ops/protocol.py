"""NumPy's own functions on Tensors: `np.exp(t)`, `array + t`, `np.sum(t, axis=0)` record like the ops.

Rules are written with these functions, so that the same text runs on arrays and, for higher orders, on Tensors.
`np.f(t)` always keeps NumPy's meaning and signature. What has no rule raises a TypeError that says what to use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from tinygrad_qkv import ops
from tinygrad_qkv.tensor import Tensor


def _truth(x: Any) -> Tensor:
    """What NumPy's logic sees: True where x is not 0."""
    return ops.not_equal(x, 0)


UFUNCS: dict[np.ufunc, Callable] = {
    np.add: ops.add,
    np.subtract: ops.sub,
    np.multiply: ops.mul,
    np.true_divide: ops.div,
    np.floor_divide: ops.floordiv,
    np.remainder: ops.mod,
    np.power: ops.pow,
    np.negative: ops.neg,
    np.positive: lambda x: x,
    np.absolute: ops.abs,
    np.fabs: ops.abs,
    np.sign: ops.sign,
    np.reciprocal: ops.reciprocal,
    np.square: ops.square,
    np.exp: ops.exp,
    np.expm1: ops.expm1,
    np.log: ops.log,
    np.log1p: ops.log1p,
    np.log2: ops.log2,
    np.log10: ops.log10,
    np.sqrt: ops.sqrt,
    np.logaddexp: ops.logaddexp,
    np.sin: ops.sin,
    np.cos: ops.cos,
    np.tan: ops.tan,
    np.sinh: ops.sinh,
    np.cosh: ops.cosh,
    np.tanh: ops.tanh,
    np.arcsin: ops.arcsin,
    np.arccos: ops.arccos,
    np.arctan: ops.arctan,
    np.maximum: ops.maximum,
    np.minimum: ops.minimum,
    np.matmul: ops.matmul,
    np.equal: ops.equal,
    np.not_equal: ops.not_equal,
    np.less: ops.less,
    np.less_equal: ops.less_equal,
    np.greater: ops.greater,
    np.greater_equal: ops.greater_equal,
    np.bitwise_and: ops.logical_and,
    np.bitwise_or: ops.logical_or,
    np.bitwise_xor: ops.logical_xor,
    np.invert: ops.logical_not,
    np.logical_and: lambda a, b: ops.logical_and(_truth(a), _truth(b)),
    np.logical_or: lambda a, b: ops.logical_or(_truth(a), _truth(b)),
    np.logical_xor: lambda a, b: ops.logical_xor(_truth(a), _truth(b)),
    np.logical_not: lambda a: ops.equal(a, 0),
    np.isnan: ops.isnan,
    np.isinf: ops.isinf,
    np.isfinite: ops.isfinite,
}


def call_ufunc(ufunc: np.ufunc, method: str, inputs: tuple, kwargs: dict) -> Any:
    """A ufunc on operands of which at least one is a Tensor."""
    out = kwargs.pop("out", None)
    if method != "__call__":
        raise TypeError(f"np.{ufunc.__name__}.{method} does not take Tensors; use the op, e.g. t.sum(axis=0)")
    if ufunc not in UFUNCS:
        raise TypeError(f"np.{ufunc.__name__} has no rule for Tensors; use t.numpy() for a value without gradient")
    if kwargs:
        raise TypeError(f"np.{ufunc.__name__} of a Tensor takes no {', '.join(kwargs)}=")
    if out is None:
        return UFUNCS[ufunc](*inputs)
    return _into(ufunc, out[0], inputs)


def _into(ufunc: np.ufunc, out: Any, inputs: tuple) -> Any:
    """`array += t`: allowed only where no history is lost."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not isinstance(out, np.ndarray) or any(t.requires_grad for t in tensors):
        raise TypeError(
            f"np.{ufunc.__name__} into an array (out=, or array += t) would lose the history of the tensor; "
            "write array = array + t, or use t.detach()"
        )
    return ufunc(*(x._data if isinstance(x, Tensor) else x for x in inputs), out=out)


def call_function(function: Callable, args: tuple, kwargs: dict) -> Any:
    """A NumPy function that is no ufunc, with NumPy's own arguments."""
    if function not in FUNCTIONS:
        name = f"{function.__module__}.{function.__name__}".replace("numpy", "np", 1)
        raise TypeError(f"{name} has no rule for Tensors; use t.numpy() for a value without gradient")
    try:
        return FUNCTIONS[function](*args, **kwargs)
    except TypeError as error:
        _, refused, keyword = str(error).partition("got an unexpected keyword argument")
        if not refused:
            raise
        raise TypeError(f"np.{function.__name__} of a Tensor {refused}{keyword}; leave it out") from None


def _transpose(a: Any, axes: Any = None) -> Tensor:
    return ops.permute(a, *(range(np.ndim(a))[::-1] if axes is None else axes))


def _moveaxis(a: Any, source: Any, destination: Any) -> Tensor:
    a = ops.tensor(a)
    moved = normalize_axis_tuple(source, a.ndim, "source")
    places = normalize_axis_tuple(destination, a.ndim, "destination")
    order = [axis for axis in range(a.ndim) if axis not in moved]
    for place, axis in sorted(zip(places, moved, strict=True)):
        order.insert(place, axis)
    return ops.permute(a, *order)


def _split(ary: Any, indices_or_sections: Any, axis: int = 0) -> list[Tensor]:
    n = np.shape(ary)[axis]
    if isinstance(indices_or_sections, (int, np.integer)):
        if n % indices_or_sections:
            raise ValueError(f"np.split of {n} elements into {indices_or_sections} parts: the parts would be unequal")
        return ops.split(ary, n // indices_or_sections, axis)
    ends = [slice(end).indices(n)[1] for end in indices_or_sections]
    return ops.split(ary, np.diff([*ends, n], prepend=0).tolist(), axis)


def _pad(array: Any, pad_width: Any, mode: str = "constant", constant_values: float = 0) -> Tensor:
    if mode != "constant":
        raise TypeError(f"np.pad of a Tensor knows mode='constant' only, got {mode!r}")
    return ops.pad(array, pad_width, constant_values)


def _take(a: Any, indices: Any, axis: int | None = None) -> Tensor:
    a = ops.flatten(a) if axis is None else ops.tensor(a)
    axis = 0 if axis is None else normalize_axis_index(axis, a.ndim)
    return ops.getitem(a, (slice(None),) * axis + (indices,))


def _cumsum(a: Any, axis: int | None = None) -> Tensor:
    return ops.cumsum(ops.flatten(a), 0) if axis is None else ops.cumsum(a, axis)


def _norm(x: Any, ord: float | None = None, axis: Any = None, keepdims: bool = False) -> Tensor:
    if ord not in (None, 2) and axis is None and np.ndim(x) != 1:
        raise TypeError("np.linalg.norm of a matrix Tensor with ord= is no vector norm; use t.norm(ord, axis)")
    return ops.norm(x, 2 if ord is None else ord, axis, keepdims)


def _clip(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Tensor:
    return ops.clip(a, a_min if min is None else min, a_max if max is None else max)


FUNCTIONS: dict[Callable, Callable] = {
    np.sum: lambda a, axis=None, keepdims=False: ops.sum(a, axis, keepdims),
    np.mean: lambda a, axis=None, keepdims=False: ops.mean(a, axis, keepdims),
    np.max: lambda a, axis=None, keepdims=False: ops.max(a, axis, keepdims),
    np.amax: lambda a, axis=None, keepdims=False: ops.max(a, axis, keepdims),
    np.amin: lambda a, axis=None, keepdims=False: ops.min(a, axis, keepdims),
    np.min: lambda a, axis=None, keepdims=False: ops.min(a, axis, keepdims),
    np.prod: lambda a, axis=None, keepdims=False: ops.prod(a, axis, keepdims),
    np.var: lambda a, axis=None, ddof=0, keepdims=False: ops.var(a, axis, ddof, keepdims),
    np.std: lambda a, axis=None, ddof=0, keepdims=False: ops.std(a, axis, ddof, keepdims),
    np.any: lambda a, axis=None, keepdims=False: ops.any(a, axis, keepdims),
    np.all: lambda a, axis=None, keepdims=False: ops.all(a, axis, keepdims),
    np.argmax: lambda a, axis=None, keepdims=False: ops.argmax(a, axis, keepdims),
    np.argmin: lambda a, axis=None, keepdims=False: ops.argmin(a, axis, keepdims),
    np.cumsum: _cumsum,
    np.linalg.norm: _norm,
    np.reshape: lambda a, shape: ops.reshape(a, shape),
    np.ravel: lambda a: ops.reshape(a, -1),
    np.transpose: _transpose,
    np.swapaxes: ops.swapaxes,
    np.moveaxis: _moveaxis,
    np.expand_dims: ops.unsqueeze,
    np.squeeze: ops.squeeze,
    np.broadcast_to: ops.broadcast_to,
    np.flip: ops.flip,
    np.roll: ops.roll,
    np.tile: lambda A, reps: ops.tile(A, *np.atleast_1d(reps).tolist()),
    np.repeat: ops.repeat_interleave,
    np.pad: _pad,
    np.tril: ops.tril,
    np.triu: ops.triu,
    np.concatenate: lambda arrays, axis=0: ops.cat(
        arrays if axis is not None else [ops.flatten(a) for a in arrays], axis or 0
    ),
    np.stack: ops.stack,
    np.split: _split,
    np.meshgrid: lambda *xi, indexing="xy": ops.meshgrid(*xi, indexing=indexing),
    np.take: _take,
    np.take_along_axis: lambda arr, indices, axis=-1: ops.take_along_axis(arr, indices, axis),
    np.where: ops.where,
    np.clip: _clip,
    np.dot: ops.dot,
    np.outer: ops.outer,
    np.tensordot: ops.tensordot,
    np.einsum: lambda subscripts, *operands, optimize=False: ops.einsum(subscripts, *operands),
    np.zeros_like: ops.zeros_like,
    np.ones_like: ops.ones_like,
    np.full_like: ops.full_like,
    np.copy: ops.clone,
    np.allclose: ops.allclose,
    np.shape: lambda a: ops.tensor(a).shape,
    np.ndim: lambda a: ops.tensor(a).ndim,
    np.size: lambda a, axis=None: ops.tensor(a).size if axis is None else ops.tensor(a).shape[axis],
}
