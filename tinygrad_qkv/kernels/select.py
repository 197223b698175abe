"""Selection: each element from one of two arrays, by a mask, without a branch."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import plain
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.elementwise import line_of, piece, stretches
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def select(keep: np.ndarray, a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    """np.where(keep, a, b), whose branch at every element of a mask without order is often guessed wrong.

    keep boolean, a and b arrays or numbers; all three broadcast. Small masks, two numbers, and arrays that are not both
    float32 or both float64 go to NumPy.
    """
    keep = plain(keep, "select")
    if keep.dtype != np.bool_:
        raise TypeError(f"select's mask is boolean, got {keep.dtype}; compare first, e.g. mask != 0")
    if keep.size < PARALLEL_FROM["select"]:
        return np.where(keep, a, b)
    dtypes = {x.dtype for x in (a, b) if isinstance(x, (np.ndarray, np.generic))}
    if len(dtypes) != 1 or not dtypes <= {np.dtype(np.float32), np.dtype(np.float64)}:
        return np.where(keep, a, b)
    (dtype,) = dtypes
    shape = np.broadcast_shapes(keep.shape, np.shape(a), np.shape(b))
    keep, a, b = (np.broadcast_to(x, shape) for x in (keep, np.asarray(a, dtype), np.asarray(b, dtype)))
    out = empty(shape, dtype)
    mask = np.ascontiguousarray(keep).view(np.uint8).ravel()
    parallel = out.size >= PARALLEL_FROM["elementwise"]
    _select(line_of(a, "select"), line_of(b, "select"), mask, out.ravel(), parallel=parallel)
    return out


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 1), array_in(scalar, 1), array_in(types.uint8, 1), array_out(scalar, 1)


@kernel(arguments=_types)
def _select(a, b, keep, out):
    """for each stretch of elements, in parallel: out = a where keep, else b."""
    n = out.shape[0]
    for s in prange(stretches(out)):
        _select_stretch(piece(a, s, n), piece(b, s, n), piece(keep, s, n), piece(out, s, n))


@kernel(plain=lambda a, b, keep, out: np.copyto(out, np.where(keep, a, b)))
def _select_stretch(a, b, keep, out):
    for i in range(out.shape[0]):
        x, y = a[i], b[i]  # both are read, so that no branch is left
        out[i] = x if keep[i] != 0 else y
