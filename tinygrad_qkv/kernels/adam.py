"""One step of Adam or AdamW over all parameters of a model: every array is read and written once, in one kernel call.

The kernel gets a table with a line for each parameter: where its four arrays lie, where it ends among the elements of
all parameters in a row, and which settings hold for it. So many small parameters cost one call, and threads share
the elements evenly, however they are divided into parameters.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.addresses import array_at
from tinygrad_qkv.kernels.arrays import contiguous, one_dtype, plain, shapes_fit
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.elementwise import STRETCH
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

P, G, M, V, END, SETTINGS = COLUMNS = range(6)  # of the table


class AdamSettings(NamedTuple):
    """The numbers in the formula of `adam_step`, the same for all elements of a parameter."""

    shrink: float
    rate: float  # lr / (1 - beta1^step)
    part1: float  # 1 - beta1
    part2: float  # 1 - beta2
    root: float  # sqrt(1 - beta2^step)
    eps: float


def adam_settings(*, lr: float, betas: tuple[float, float], eps: float, step: int, shrink: float = 1.0) -> AdamSettings:
    """The settings of the step with number `step`, counted from 1, which begins with p = shrink * p."""
    rate, root = lr / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step)
    return AdamSettings(shrink, rate, 1 - betas[0], 1 - betas[1], root, eps)


class Moving(NamedTuple):
    """A parameter, its gradient, the running means of that and of its square, all of one shape, and the settings."""

    p: np.ndarray
    g: np.ndarray
    m: np.ndarray
    v: np.ndarray
    settings: AdamSettings


def adam_step(parameters: Sequence[Moving]) -> None:
    """Change p, m and v of each parameter in place by its gradient g; all arrays are float32, or all are float64.

    p = shrink * p;  m = (1 - part1) * m + part1 * g;  v = (1 - part2) * v + part2 * g^2
    p -= rate * m / (sqrt(v) / root + eps)

    Arrays that are not contiguous are copied there and back.
    """
    for p, g, m, v, _ in parameters:
        if not type(p) is type(g) is type(m) is type(v) is np.ndarray:
            p, g, m, v = (plain(x, "adam_step") for x in (p, g, m, v))
        if not (p.flags.writeable and m.flags.writeable and v.flags.writeable):
            raise ValueError("adam_step writes into p, m and v, and one of them is read-only: pass a copy")
        if not (p.shape == g.shape == m.shape == v.shape):
            shapes_fit("adam_step", g=(g, p.shape), m=(m, p.shape), v=(v, p.shape))
        if not (parameters[0].p.dtype is p.dtype is g.dtype is m.dtype is v.dtype):
            one_dtype("adam_step", parameters[0].p, p, g, m, v)
    parameters = [moving for moving in parameters if moving.p.size]
    if not parameters:
        return
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    lines = [_lines(moving, copies) for moving in parameters]  # nothing else may hold them, and the table does not
    table, end = np.empty((len(lines), len(COLUMNS)), np.int64), 0
    rows: dict[AdamSettings, int] = {}
    for number, (moving, line) in enumerate(zip(parameters, lines, strict=True)):
        end += moving.p.size
        _enter(*line, table, number, end, rows.setdefault(moving.settings, len(rows)), parallel=False)
    settings = np.array(list(rows), line[P].dtype)
    _move(settings, table, parallel=end >= PARALLEL_FROM["adam"] and not _overlap(table, settings.itemsize))
    for x, copy in copies:
        x[...] = copy.reshape(x.shape)


def _lines(moving: Moving, copies: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """p, g, m and v with one axis, for the kernel; `copies` gets those that have to be copied back."""
    arrays = moving.p, moving.g, moving.m, moving.v
    whole = [contiguous(x, "adam_step") for x in arrays]
    lines = [x.reshape(-1) for x in whole]
    for column in (P, M, V):
        if whole[column] is not arrays[column]:
            copies.append((arrays[column], lines[column]))
    return lines


def _overlap(table: np.ndarray, itemsize: int) -> bool:
    """Whether an element of a parameter lies in another one, or in a gradient: such move one after the other."""
    sizes = np.diff(table[:, END], prepend=0) * itemsize
    order = np.argsort(table[:, P])
    starts = table[order, P]
    ends = starts + sizes[order]
    if (starts[1:] < ends[:-1]).any():
        return True
    after = np.searchsorted(ends, table[:, G], side="right")  # the first parameter that ends behind a gradient's start
    return bool((np.append(starts, np.iinfo(np.int64).max)[after] < table[:, G] + sizes).any())


def _enter_types(scalar: types.Type) -> tuple[types.Type, ...]:
    out = array_out(scalar, 1)
    return out, array_in(scalar, 1), out, out, array_out(types.int64, 2), *(types.intp,) * 3


@kernel(arguments=_enter_types)
def _enter(p, g, m, v, table, number, end, settings):
    """Write one line of the table: asking NumPy for the four addresses would take four times as long."""
    table[number, P], table[number, G] = p.ctypes.data, g.ctypes.data
    table[number, M], table[number, V] = m.ctypes.data, v.ctypes.data
    table[number, END], table[number, SETTINGS] = end, settings


def _move_types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_in(scalar, 2), array_in(types.int64, 2)


@kernel(arguments=_move_types)
def _move(settings, table):
    """for each stretch of the elements of all parameters, in parallel: the formula of `adam_step`."""
    elements = table[-1, END]
    for task in prange((elements + STRETCH - 1) // STRETCH):
        _move_elements(settings, table, task * STRETCH, min(task * STRETCH + STRETCH, elements))


@kernel
def _move_elements(settings, table, start, stop):
    """The elements from `start` to `stop`, which may lie in several parameters."""
    number = _holding(table, start)
    while start < stop:
        line = table[number]
        first = start - (table[number - 1, END] if number else 0)
        size = min(stop, line[END]) - start
        offset = first * settings.itemsize
        p, g = array_at(line[P] + offset, size, settings), array_at(line[G] + offset, size, settings)
        m, v = array_at(line[M] + offset, size, settings), array_at(line[V] + offset, size, settings)
        shrink, rate, part1, part2, root, eps = settings[line[SETTINGS]]
        _move_stretch(p, g, m, v, shrink, rate, part1, part2, root, eps)
        start += size
        number += 1


@kernel
def _holding(table, element):
    """The line of the parameter in which an element lies."""
    low, high = 0, table.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if table[middle, END] <= element:
            low = middle + 1
        else:
            high = middle
    return low


def _move_plain(p, g, m, v, shrink, rate, part1, part2, root, eps):
    m[...] = (1 - part1) * m + part1 * g
    v[...] = (1 - part2) * v + part2 * (g * g)
    p *= shrink
    p -= rate * (m / (np.sqrt(v) / root + eps))


@kernel(plain=_move_plain)
def _move_stretch(p, g, m, v, shrink, rate, part1, part2, root, eps):
    one = p.dtype.type(1)
    keep1, keep2 = one - part1, one - part2  # for betas of 0 nothing is left of the past, not even a rounding error
    for i in range(p.shape[0]):
        m[i] = keep1 * m[i] + part1 * g[i]
        v[i] = keep2 * v[i] + part2 * (g[i] * g[i])
        p[i] = p[i] * shrink - rate * (m[i] / (math.sqrt(v[i]) / root + eps))
