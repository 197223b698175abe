"""Matrix product: packed panels, a register block of fused multiply-adds, tiles shared out over threads."""

import math
import threading

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import native
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.panels import pack_left, pack_right
from tinygrad_qkv.kernels.simd import BLOCK_ROWS, block_columns, tile_product
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

DEPTH = 256  # longest stretch of k in one pass: a panel of the right operand (DEPTH x 128 bytes) then fits into L1
SIDE = 4096  # most rows, and most columns, packed at once: bounds the working memory to SIDE * DEPTH elements a side
# NumPy's BLAS computes a product of two matrices on one thread below so many multiply-adds, one with a vector below
# the second number. A batch of such products goes to NumPy whatever its length: it needs no packing there.
NUMPY_BELOW, NUMPY_VECTOR_BELOW = 2**18, 9216
TASKS = 64  # tiles are split among columns too until there are as many tasks, so that threads come out even


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """out[..., m, n] = sum over k of a[..., m, k] * b[..., k, n].

    a (..., M, K), b (..., K, N), both float32 or both float64, any strides; leading axes broadcast. Gives a new
    C-contiguous array (..., M, N). Integers and bools take NumPy's own product.
    Small products go to NumPy as well, and batches of them, up to the sizes that its BLAS computes on one thread: two
    pools of threads in one process slow each other down.
    Errors: ValueError for shapes that do not fit, TypeError for other or unlike dtypes.
    """
    _check_shapes(a, b)
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        return np.ascontiguousarray(np.matmul(a, b))
    a, b = native(a, "matmul"), native(b, "matmul")
    if a.dtype != b.dtype:
        raise TypeError(f"matmul needs operands of one dtype, got {a.dtype} and {b.dtype}: convert one with astype")
    (rows, depth), columns = a.shape[-2:], b.shape[-1]
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.ndim + b.ndim > 4 else ()
    out_shape = (*lead, rows, columns)
    work = math.prod(out_shape) * depth
    if work == 0:
        return np.zeros(out_shape, a.dtype)
    least = NUMPY_VECTOR_BELOW if min(rows, columns) == 1 else NUMPY_BELOW
    each = work if b.size == depth * columns else rows * columns * depth  # one right operand for all: one tall product
    if work < least or (each < least and _suits_blas(a) and _suits_blas(b)):
        return np.ascontiguousarray(np.matmul(a, b))
    out = empty(out_shape, a.dtype)
    _in_blocks(*_four_axes(a, b, out), parallel=work >= PARALLEL_FROM["matmul"])
    return out


def _suits_blas(x: np.ndarray) -> bool:
    """Whether NumPy hands these matrices to its BLAS: rows or columns lie together, with steps forward between them."""
    row, column = x.strides[-2:]
    return min(row, column) == x.itemsize and max(row, column) % x.itemsize == 0


def _check_shapes(a: np.ndarray, b: np.ndarray) -> None:
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul needs arrays of at least two axes, got shapes {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul of shapes {a.shape} and {b.shape}: the last axis of the first ({a.shape[-1]}) must equal "
            f"the last but one of the second ({b.shape[-2]})"
        )


def _four_axes(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views (or copies, where strides allow no view) of the arrays with two leading axes; 1 there means shared."""
    if b.size == b.shape[-2] * b.shape[-1]:  # one right operand for all: a single tall product
        a, out = a.reshape(-1, a.shape[-1]), out.reshape(-1, out.shape[-1])
        return a[None, None], b.reshape(1, 1, *b.shape[-2:]), out[None, None]
    lead = out.shape[:-2]
    outer, inner = lead[:-1], lead[-1]

    def four(x: np.ndarray) -> np.ndarray:
        x = x.reshape((1,) * (out.ndim - x.ndim) + x.shape)
        if math.prod(x.shape[:-3]) > 1:
            x = np.broadcast_to(x, (*outer, *x.shape[-3:]))
        return x.reshape(-1, *x.shape[-3:])

    return four(a), four(b), out.reshape(-1, inner, *out.shape[-2:])


def _in_blocks(a: np.ndarray, b: np.ndarray, out: np.ndarray, parallel: bool) -> None:
    """Fill `out` block by block, each so large that its packed panels fit into the working memory."""
    outer, inner, rows, columns = out.shape
    depth = _even_part(a.shape[-1], DEPTH)
    row_step, column_step = _even_part(rows, SIDE), _even_part(columns, SIDE)
    inner_step = min(inner, max(1, SIDE // max(row_step, column_step)))
    outer_step = min(outer, max(1, SIDE // (max(row_step, column_step) * inner_step)))
    if (outer_step, inner_step, row_step, column_step) == out.shape:
        return _one_block(a.swapaxes(2, 3), b, out, depth, parallel)
    for i in range(0, outer, outer_step):
        for j in range(0, inner, inner_step):
            lead = slice(i, i + outer_step), slice(j, j + inner_step)
            for m in range(0, rows, row_step):
                for n in range(0, columns, column_step):
                    left, right = slice(m, m + row_step), slice(n, n + column_step)
                    _one_block(
                        _lead(a, lead)[..., left, :].swapaxes(2, 3),
                        _lead(b, lead)[..., right],
                        out[*lead, left, right],
                        depth,
                        parallel,
                    )


def _even_part(length: int, most: int) -> int:
    """The length of the parts when `length` is split evenly into as few as hold at most `most`."""
    return -(-length // -(-length // most))


def _lead(x: np.ndarray, lead: tuple[slice, slice]) -> np.ndarray:
    """The leading slices of x, whole where its axis is shared."""
    return x[tuple(part if size > 1 else slice(None) for part, size in zip(lead, x.shape[:2], strict=True))]


def _one_block(a_t: np.ndarray, b: np.ndarray, out: np.ndarray, depth: int, parallel: bool) -> None:
    width = block_columns(out.itemsize)
    row_panels, column_panels = -(-out.shape[2] // BLOCK_ROWS), -(-out.shape[3] // width)
    left = a_t.shape[0] * a_t.shape[1] * row_panels * BLOCK_ROWS * depth
    right = b.shape[0] * b.shape[1] * column_panels * width * depth
    work = _working_memory(out.dtype, left + right)
    column_tasks = min(column_panels, -(-TASKS // (out.shape[0] * out.shape[1] * row_panels)))
    _tiles(a_t, b, out, work[right:], work[:right], depth, column_tasks, parallel=parallel)


_kept = threading.local()


def _working_memory(dtype: np.dtype, size: int) -> np.ndarray:
    """An array of `size` elements that starts a cache line, kept for the next call of this Python thread.

    Fresh pages would cost as much as the packing itself.
    """
    room = getattr(_kept, "bytes", None)
    need = size * dtype.itemsize
    if room is None or room.size < need:
        fresh = np.empty(need + 64, np.uint8)
        start = -fresh.ctypes.data % 64
        room = _kept.bytes = fresh[start : start + need]
    return room[:need].view(dtype)


def _tile_types(scalar: types.Type) -> tuple[types.Type, ...]:
    strided, packed = array_in(scalar, 4, "A"), array_out(scalar, 1)
    return strided, strided, array_out(scalar, 4, "A"), packed, packed, types.intp, types.intp


@kernel(arguments=_tile_types)
def _tiles(a_t, b, out, left_room, right_room, depth, column_tasks):
    """out[i, j, m, n] = sum over k of a_t[i, j, k, m] * b[i, j, k, n].

    for each stretch of at most `depth` k, in order:
        for each panel, in parallel: pack it
        for each row panel and part of the column panels, in parallel: for each column panel: one register block
    Every element of out is added up in the same order, whatever the tiles and threads.
    """
    outer, inner, rows, columns = out.shape
    height, width = BLOCK_ROWS, block_columns(out.itemsize)
    row_panels, column_panels = (rows + height - 1) // height, (columns + width - 1) // width
    lefts, rights = a_t.shape[0] * a_t.shape[1] * row_panels, b.shape[0] * b.shape[1] * column_panels
    column_part = (column_panels + column_tasks - 1) // column_tasks
    for k0 in range(0, b.shape[2], depth):
        k1 = min(k0 + depth, b.shape[2])
        left = left_room[: lefts * (k1 - k0) * height].reshape((lefts, k1 - k0, height))
        right = right_room[: rights * (k1 - k0) * width].reshape((rights, k1 - k0, width))
        for p in prange(lefts + rights):
            if p < lefts:
                i, m = p // row_panels, p % row_panels * height
                part = a_t[i // a_t.shape[1], i % a_t.shape[1], k0:k1, m : min(m + height, rows)]
                pack_left(part, left[p])
            else:
                i, n = (p - lefts) // column_panels, (p - lefts) % column_panels * width
                part = b[i // b.shape[1], i % b.shape[1], k0:k1, n : min(n + width, columns)]
                pack_right(part, right[p - lefts])
        for task in prange(outer * inner * row_panels * column_tasks):
            first = task % column_tasks * column_part
            m = task // column_tasks % row_panels
            matrix = task // (column_tasks * row_panels)
            i, j = matrix // inner, matrix % inner
            l0 = (min(i, a_t.shape[0] - 1) * a_t.shape[1] + min(j, a_t.shape[1] - 1)) * row_panels
            r0 = (min(i, b.shape[0] - 1) * b.shape[1] + min(j, b.shape[1] - 1)) * column_panels
            for n in range(first, min(first + column_part, column_panels)):
                tile = out[i, j, m * height : (m + 1) * height, n * width : (n + 1) * width]
                tile_product(left[l0 + m], right[r0 + n], tile, k0 > 0)
