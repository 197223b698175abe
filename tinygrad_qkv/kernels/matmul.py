"""Matrix product: tiles of the result shared out over threads, computed from operands in place or packed nearby."""

import math

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import native, plain
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.casts import any_strides
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.cpu_caches import cache_sizes
from tinygrad_qkv.kernels.dots import dots
from tinygrad_qkv.kernels.panels import pack
from tinygrad_qkv.kernels.simd import BLOCK_ROWS, block_columns
from tinygrad_qkv.kernels.threads import PARALLEL_FROM
from tinygrad_qkv.kernels.tile_product import tile_product

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
# Multiply-adds below which NumPy computes: up to there its calls cost less than a kernel's. The first two are the sizes
# up to which OpenBLAS, which NumPy's wheels contain, keeps to one thread (its interface/gemm.c and gemv.c).
NUMPY_BELOW = 2**18 + 1  # a product of two matrices
NUMPY_VECTOR_BELOW = 9216  # one with a vector
NUMPY_EACH_BELOW = 2**13  # each product of a batch, while all together are too few for threads
TASK_WORK = 2**18  # multiply-adds that are worth a tile of their own
TASKS = 16  # tiles that are enough to share out


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """out[..., m, n] = sum over k of a[..., m, k] * b[..., k, n].

    a (..., M, K), b (..., K, N), both float32 or both float64, any strides; leading axes broadcast. Gives a new
    C-contiguous array (..., M, N). Integers and bools take NumPy's own product. Small products go to NumPy as well, up
    to the sizes that its BLAS computes on one thread: two pools of threads in one process slow each other down.
    Each element is off by at most (K + 2) eps times the sum of |a| |b|.
    Errors: ValueError for shapes that do not fit, TypeError for other or unlike dtypes.
    """
    if type(a) is not np.ndarray or type(b) is not np.ndarray:
        a, b = plain(a, "matmul"), plain(b, "matmul")
    dtype = a.dtype
    if dtype is b.dtype and (dtype is FLOAT32 or dtype is FLOAT64) and a.ndim == 2 == b.ndim and a.shape[1] == len(b):
        rows, columns = len(a), b.shape[1]
        work = rows * b.size
        if work < NUMPY_VECTOR_BELOW or (work < NUMPY_BELOW and rows > 1 < columns):
            return a.dot(b)  # without the half microsecond that np.matmul spends on its dispatch
        if a.flags.aligned and b.flags.aligned:
            if work < PARALLEL_FROM["matmul"] and rows > 1 < columns and b.strides[1] == b.itemsize:
                out = np.empty((rows, columns), dtype)
                _two_matrices(a.T, b, out, parallel=False)
            else:
                out = empty((rows, columns), dtype)
                _in_threads(a.T[None, None], b[None, None], out[None, None], work)
            return out
    return _any_product(a, b)


def _any_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of batches, and of whatever the quick ways of `matmul` do not take."""
    _check_shapes(a, b)
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        return np.ascontiguousarray(np.matmul(a, b))
    a, b = native(a, "matmul"), native(b, "matmul")
    if a.dtype != b.dtype:
        raise TypeError(f"matmul needs operands of one dtype, got {a.dtype} and {b.dtype}: convert one with astype")
    lead = a.shape[:-2]
    if lead != b.shape[:-2]:
        lead = np.broadcast_shapes(lead, b.shape[:-2])
    rows, depth, columns = *a.shape[-2:], b.shape[-1]
    each = rows * depth * columns
    work = math.prod(lead) * each
    least = NUMPY_VECTOR_BELOW if 1 in (rows, columns) else NUMPY_BELOW
    quick = each < least and work < (PARALLEL_FROM["matmul"] if each < NUMPY_EACH_BELOW else NUMPY_BELOW)
    if quick or not work:  # of an empty batch too, whatever the size of its matrices
        return np.ascontiguousarray(np.matmul(a, b))
    out = empty((*lead, rows, columns), a.dtype)
    _in_threads(*_four_axes(a, b, out), work)
    return out


def _in_threads(a_t: np.ndarray, b: np.ndarray, out: np.ndarray, work: int) -> None:
    """out[i, j, m, n] = sum over k of a_t[i, j, k, m] * b[i, j, k, n], on one thread where the work is small."""
    if out.shape[2] > 1 < out.shape[3]:
        _tiles(a_t, b, out, *cache_sizes(), parallel=work >= PARALLEL_FROM["matmul"])
        return
    if out.shape[3] == 1:  # b^T a^T is the same
        a_t, b, out = b, a_t, out.swapaxes(2, 3)
    parallel = work >= PARALLEL_FROM["matrix_vector"]
    if b.strides[2] == b.itemsize:
        x = a_t[..., 0] if a_t.strides[2] == a_t.itemsize else np.ascontiguousarray(a_t[..., 0])
        _dots(b.swapaxes(2, 3), x, out[:, :, 0], parallel=parallel)
    else:
        _tiles(a_t, b, out, *cache_sizes(), parallel=parallel)


def _check_shapes(a: np.ndarray, b: np.ndarray) -> None:
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul needs arrays of at least two axes, got shapes {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul of shapes {a.shape} and {b.shape}: the last axis of the first ({a.shape[-1]}) must equal "
            f"the last but one of the second ({b.shape[-2]})"
        )


def _four_axes(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a^T, b and out as views (or copies, where strides allow no view) with two leading axes, those of out."""
    lead = out.shape[:-2]
    if lead and b.size == b.shape[-2] * b.shape[-1]:  # one right operand for all: a single tall product
        a, b, out, lead = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:]), out.reshape(-1, out.shape[-1]), ()
    a, b, out = (_two_leading_axes(x, lead) for x in (a, b, out))
    return a.swapaxes(2, 3), b, out


def _two_leading_axes(x: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    if x.shape[:-2] != lead:
        x = np.broadcast_to(x, (*lead, *x.shape[-2:]))
    return x if len(lead) == 2 else x.reshape(-1, lead[-1] if lead else 1, *x.shape[-2:])


@kernel
def _part(length, block, parts, number):
    """Start and end of one of several parts of `length` that consist of whole blocks, as many in each as can be."""
    blocks = (length + block - 1) // block
    return number * blocks // parts * block, min((number + 1) * blocks // parts * block, length)


@kernel
def _even_part(length, most):
    """The length of the parts when `length` is split evenly into parts of about `most`, at most half as much again."""
    parts = max(1, (2 * length + most) // (2 * most))
    return (length + parts - 1) // parts


def _two_types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 2, "A"), array_in(scalar, 2, "A"), array_out(scalar, 2)


@kernel(arguments=_two_types)
def _two_matrices(a_t, b, out):
    """out[m, n] = sum over k of a_t[k, m] * b[k, n], b's rows contiguous, all so small that it stays cached."""
    tile_product(a_t, b, out, False)


def _four_types(scalar: types.Type) -> tuple[types.Type, ...]:
    strided = array_in(scalar, 4, "A")
    return strided, strided, array_out(scalar, 4), types.intp, types.intp


def _dots_types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 4, "A"), array_in(scalar, 3, "A"), array_out(scalar, 3)


@kernel(arguments=_dots_types)
def _dots(a, x, out):
    """out[i, j, r] = sum over k of a[i, j, r, k] * x[i, j, k], the rows of a and x contiguous."""
    inner, rows = out.shape[1], out.shape[2]
    parts = min((rows + 63) // 64, TASKS)
    for task in prange(out.shape[0] * inner * parts):
        i, j = task // parts // inner, task // parts % inner
        first, end = _part(rows, 8, parts, task % parts)
        dots(a[i, j, first:end], x[i, j], out[i, j, first:end])


@kernel
def _plan(a_t, b, out, l1, l2):
    """Depth of a stretch of k, rows of a tile product, parts of out's rows and columns, and whether b is packed.

    A stretch of b's block columns fills the first cache. A tile's rows of a, packed columns of b and part of out take a
    quarter of the second one each. Packed, tiles of 512 x 128 x 512 run at 0.95 to 0.98 of the multiply-adds' rate, in
    place at 0.82 to 0.95 (n = 512 to 2048); a itself is never packed, which made all of them slower.
    """
    matrices, rows, columns, length = out.shape[0] * out.shape[1], out.shape[2], out.shape[3], b.shape[2]
    size, width = out.itemsize, block_columns(out.itemsize)
    row_blocks, column_blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS, (columns + width - 1) // width
    depth = _even_part(length, l1 // (width * size))
    fit = l2 // 4 // (depth * size)  # so many rows of a, and columns of b, take a quarter of the cache each
    height = max(1, fit // BLOCK_ROWS) * BLOCK_ROWS
    packing = (b.strides[3] != size and columns > 1) or (rows >= 384 and length * columns * size > l2 // 2)
    wanted = max(1, min(matrices * rows * columns * length // TASK_WORK, TASKS) // matrices)
    if packing:
        wide = max(1, min(fit, 512 // size) // width)  # blocks of columns of a part
        tall = l2 // 4 // (wide * width * size)  # rows, so that the part of out takes a quarter as well
        column_parts = (column_blocks + wide - 1) // wide
        more = min(rows // 256, (wanted + column_parts - 1) // column_parts)
        row_parts = max((rows + tall - 1) // tall, more)
    else:
        row_parts = min(wanted, row_blocks if length * columns * size <= l2 // 2 else max(1, row_blocks // 8))
        column_parts = min((wanted + row_parts - 1) // row_parts, column_blocks)
    return depth, height, row_parts, column_parts, packing


@kernel(arguments=_four_types)
def _tiles(a_t, b, out, l1, l2):
    """out[i, j, m, n] = sum over k of a_t[i, j, k, m] * b[i, j, k, n].

    for each matrix and part of rows and columns, in parallel:
        for each stretch of k: pack b's rows there, if need be; for each `height` rows: one tile product
    Every element of out is added up in the same order, whatever the tiles and threads.
    """
    depth, height, row_parts, column_parts, packing = _plan(a_t, b, out, l1, l2)
    inner, width, room_size = out.shape[1], block_columns(out.itemsize), (0, 0)
    if packing:
        # One block more than a part has: rows a whole number of pages apart would meet in the same lines of the cache.
        room_size = depth, (b.shape[3] // width // column_parts + 2) * width
    tiles = out.shape[0] * inner * row_parts * column_parts
    tasks = min(tiles, 4 * TASKS)
    for task in prange(tasks):
        room = np.empty(room_size, out.dtype)
        for number in range(task * tiles // tasks, (task + 1) * tiles // tasks):
            matrix, part = number // (row_parts * column_parts), number % (row_parts * column_parts)
            i, j = matrix // inner, matrix % inner
            m0, m1 = _part(out.shape[2], BLOCK_ROWS, row_parts, part // column_parts)
            n0, n1 = _part(out.shape[3], width, column_parts, part % column_parts)
            for k in range(0, b.shape[2], depth):
                rows = any_strides(b[i, j, k : k + depth, n0:n1])
                if packing:
                    panel = room[: rows.shape[0], : rows.shape[1]]
                    pack(rows, panel)
                    rows = any_strides(panel)
                for m in range(m0, m1, height):
                    end = min(m + height, m1)
                    tile_product(a_t[i, j, k : k + depth, m:end], rows, out[i, j, m:end, n0:n1], k > 0)
