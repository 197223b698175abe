"""Sums and extremes over any axes, split into blocks by the sizes alone.

Neighbouring axes that are reduced together are one axis: x is then (A, R, B), reduced over R. A block is some 16 to 64
thousand numbers; what the blocks of one result come to is reduced in the same way again.
- B = 1: a block is a piece of a line.
- else: a block is a few dozen lines of some 512 to 2048 numbers, added up line by line. Where B is smaller, a line is
  several rows of B, and its parts are added up at the end, by halves.
So no number goes through more than about 32 sums in a row within a block.
"""

import itertools
import math

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import is_ready
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.rows import row_add, row_sum
from tinygrad_qkv.kernels.scalars import of_rank, rank
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

PIECE = 2048  # elements of a line that are summed in vector lanes: 32 to a lane with AVX-512
PIECES = 8  # of a block
LINE = 512  # elements of a line of columns, at least
STRIP = 4096  # and at most
LINES = 32  # of a block
ROWS = 512  # of columns, from which a kernel pays: NumPy takes 13 ns or more for each


def total(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """sum(x) over `axes`, which are gone from the result.

    The error is at most 128 units in the last place of sum(|x|) up to 10^8 numbers. Few numbers, dtypes other than
    float32 and float64, arrays that are not contiguous, and axes out of order or negative go to NumPy.
    """
    return _reduced(x, axes, _sum_lines, _sum_columns) if _is_work(x, axes) else np.add.reduce(x, axis=axes)


def largest(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """max(x) over `axes`, NaN where one of them is; as `total`, but exact. Over nothing it raises ValueError."""
    return _reduced(x, axes, _max_lines, _max_columns, 1.0) if _is_work(x, axes) else np.maximum.reduce(x, axis=axes)


def smallest(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """min(x) over `axes`, NaN where one of them is; as `largest`."""
    if not _is_work(x, axes):
        return np.minimum.reduce(x, axis=axes)
    return np.negative(_reduced(x, axes, _max_lines, _max_columns, -1.0))


def _is_work(x: np.ndarray, axes: tuple[int, ...]) -> bool:
    if type(x) is not np.ndarray or x.size < ROWS or not axes or not is_ready(x):
        return False
    if not 0 <= axes[0] <= axes[-1] < x.ndim or any(first >= second for first, second in itertools.pairwise(axes)):
        return False  # NumPy sorts them, or says what is wrong
    inner = math.prod(x.shape[axes[-1] + 1 :])
    if x.size < PARALLEL_FROM["reductions"] and not 1 < inner <= x.size // ROWS:
        return False
    return inner == 1 or x.shape[axes[-1]] * inner >= LINE  # less in a row than a line is not worth a task


def _reduced(x, axes, lines, columns, sign=None):
    """x reduced over its last group of neighbouring axes, and so on until none of `axes` is left.

    With a sign it is the largest sign * x.
    """
    while axes:
        last = first = axes[-1]
        while first - 1 in axes:
            first -= 1
        outer, inner = x.shape[:first], x.shape[last + 1 :]
        y = x.reshape(math.prod(outer), math.prod(x.shape[first : last + 1]), math.prod(inner))
        while True:
            y = _in_blocks(y, lines, columns, sign)
            sign = None if sign is None else 1.0
            if y.shape[1] == 1:
                break
        x = y.reshape(outer + inner)
        axes = axes[: axes.index(first)]
    return x


def _in_blocks(x, lines, columns, sign):
    """x (A, R, B) -> (A, blocks, B), each block reduced."""
    a, r, b = x.shape
    parallel = x.size >= PARALLEL_FROM["reductions"]
    size = PIECE * PIECES if b == 1 else LINES * max(LINE // b, 1)  # rows of a block
    y = np.full((a, -(-r // size), b), 0 if sign is None else -np.inf, x.dtype)
    extra = () if sign is None else (sign,)
    if b == 1:
        lines(x[:, :, 0], max(size // r, 1), *extra, y[:, :, 0], parallel=parallel)
    else:
        columns(x, size // LINES, *extra, y, parallel=parallel)
    return y


def _line_types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 2), types.intp, array_out(scalar, 2)


@kernel(arguments=_line_types)
def _sum_lines(x, rows, y):
    """y[a, block] = sum(x[a, the block's elements]); in parallel over blocks, or `rows` lines of one block together."""
    blocks, size = y.shape[1], PIECE * PIECES
    for task in prange((x.shape[0] + rows - 1) // rows * blocks):
        first, block = task // blocks * rows, task % blocks
        for a in range(first, min(first + rows, x.shape[0])):
            y[a, block] = _line_sum(x[a, block * size : min(block * size + size, x.shape[1])])


@kernel(plain=lambda x: x.sum())
def _line_sum(x):
    total = row_sum(x[:PIECE])
    for first in range(PIECE, x.shape[0], PIECE):
        total += row_sum(x[first : first + PIECE])
    return total


def _signed_line_types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 2), types.intp, scalar, array_out(scalar, 2)


@kernel(arguments=_signed_line_types)
def _max_lines(x, rows, sign, y):
    """y[a, block] = max(sign * x[a, the block's elements]), as `_sum_lines`."""
    blocks, size = y.shape[1], PIECE * PIECES
    for task in prange((x.shape[0] + rows - 1) // rows * blocks):
        first, block = task // blocks * rows, task % blocks
        for a in range(first, min(first + rows, x.shape[0])):
            y[a, block] = _line_max(x[a, block * size : min(block * size + size, x.shape[1])], sign)


@kernel(plain=lambda x, sign: (sign * x).max())
def _line_max(x, sign):
    top, missing = rank(sign * x[0]), 0
    for i in range(x.shape[0]):
        top = max(top, rank(sign * x[i]))
        missing |= x[i] != x[i]
    return x.dtype.type(np.nan) if missing else of_rank(top)


def _column_types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 3), types.intp, array_out(scalar, 3)


@kernel(arguments=_column_types)
def _sum_columns(x, together, y):
    """y[a, block, b] = sum over the block's rows r of x[a, r, b]; in parallel over a, blocks and strips of columns."""
    line, out = x.reshape(-1), y.reshape(-1)
    for task in prange(_column_tasks(x, y)):
        first, rows, place, columns = _column_task(x, y, together, task)
        _sum_block(line[first:], rows, x.shape[2], together, out[place : place + columns])


@kernel
def _column_tasks(x, y):
    return y.shape[0] * y.shape[1] * ((x.shape[2] + STRIP - 1) // STRIP)


@kernel
def _column_task(x, y, together, task):
    """Where the block of a task begins in x, how many rows it has, where its result belongs, and how many columns."""
    rows, width, blocks = x.shape[1], x.shape[2], y.shape[1]
    strips = (width + STRIP - 1) // STRIP
    block, left = task // strips, task % strips * STRIP
    top = block % blocks * LINES * together
    first = (block // blocks * rows + top) * width + left
    return first, min(LINES * together, rows - top), block * width + left, min(STRIP, width - left)


@kernel
def _sum_block(x, rows, width, together, out):
    """out[i] += sum over r < rows of x[r * width + i], where `together` rows make a line."""
    if together == 1:
        for r in range(rows):
            row_add(x[r * width : r * width + out.shape[0]], out)
        return
    lanes = np.zeros(together * width, x.dtype)
    for r in range(0, rows, together):
        n = min(together, rows - r) * width
        row_add(x[r * width : r * width + n], lanes[:n])
    while together > 1:  # the parts of a line, by halves
        half = (together + 1) // 2
        row_add(lanes[half * width : together * width], lanes[: (together - half) * width])
        together = half
    row_add(lanes[:width], out)


def _signed_column_types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 3), types.intp, scalar, array_out(scalar, 3)


@kernel(arguments=_signed_column_types)
def _max_columns(x, together, sign, y):
    """y[a, block, b] = max(y, sign * x[a, r, b] for the rows r of the block); in parallel as `_sum_columns`."""
    line, out = x.reshape(-1), y.reshape(-1)
    for task in prange(_column_tasks(x, y)):
        first, rows, place, columns = _column_task(x, y, together, task)
        _max_block(line[first:], rows, x.shape[2], together, sign, out[place : place + columns])


@kernel
def _max_block(x, rows, width, together, sign, out):
    if together == 1:
        for r in range(rows):
            _raise(x[r * width : r * width + out.shape[0]], sign, out)
        return
    lanes = np.full(together * width, -np.inf, x.dtype)
    for r in range(0, rows, together):
        _raise(x[r * width : min(r + together, rows) * width], sign, lanes)
    while together > 1:
        half = (together + 1) // 2
        _raise(lanes[half * width : together * width], x.dtype.type(1), lanes)
        together = half
    _raise(lanes[:width], x.dtype.type(1), out)


@kernel(plain=lambda x, sign, out: np.maximum(sign * x, out[: len(x)], out=out[: len(x)]))
def _raise(x, sign, out):
    """out = max(out, sign * x) over the length of x; NaN stays."""
    for i in range(x.shape[0]):
        v = sign * x[i]
        out[i] = v if v > out[i] or v != v else out[i]
