"""Which keys a tile of fused attention may see, its scores from the raw products, and what dropout takes from it.

A tile is the queries from i0 on and the keys from j0 on of one head. Most tiles are either out of sight, and skipped,
or seen whole, and need no mask; of the others the box that holds all that is seen is computed.
"""

from typing import NamedTuple

import numpy as np

from tinygrad_qkv.kernels.attention_tiles import tile_times
from tinygrad_qkv.kernels.casts import as_contiguous
from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.random_bits import fill_bits, keep_scaled_in_place
from tinygrad_qkv.kernels.scalars import tanh

STEP = 32  # a box begins and ends at multiples of so many keys: whole registers, and whole register blocks
MARKED, CUT = 1, 2  # how a tile is hidden in part: where it has no mark; and outside a range of columns in each row


class HeadRules(NamedTuple):
    """`AttentionRules` of one head, as kernels read them; an array of size 0 stands for what is absent.

    keep, bias (T, S); reach is (least, most, offset): key j is seen by query i where least <= i + offset - j <= most;
    unless there are positions (T + S,), those of the queries first, with bounds (tiles, 2), the smallest and the
    largest in each tile of queries, then of keys.  masked: whether any of these hides anything.  softcap 0 is none.
    An element (i, j) is dropped unless its random bits, of number `first` + i * keys + j, are above drop_limit;
    drop_scale 0 is no dropout.
    """

    keep: np.ndarray
    bias: np.ndarray
    positions: np.ndarray
    bounds: np.ndarray
    reach: tuple[int, int, int]
    scale: float
    softcap: float
    masked: bool
    drop_limit: int
    drop_scale: float
    seed: int
    first: int
    keys: int


@kernel
def head_rules(every, b, h, shape):
    """The rules of head h of batch entry b, from those of `every` head; an entry's scores are `shape` (H, T, S)."""
    keep, bias, positions, bounds, reach, scale, softcap, masked, drop_limit, drop_scale, seed = every
    first = (b * shape[0] + h) * shape[1] * shape[2]
    keep, bias, positions, bounds = keep[b, h], bias[b, h], as_contiguous(positions[b]), bounds[b]
    numbers = reach, scale, softcap, masked, drop_limit, drop_scale, seed, first, shape[2]
    return HeadRules(keep, bias, positions, bounds, *numbers)


@kernel
def sight(rules, queries, i_tile, j_tile, i0, j0, seen):
    """(how, r0, r1, c0, c1): the box of rows and columns of a tile outside which nothing is seen, empty if hidden.

    `how` is 0 where all of it is seen, MARKED if `seen` (rows, columns) uint8 says which keys, CUT if `hide` has to
    look at positions, or both. The number of the query tile and that of the key tile, counted from the first query
    tile, find the bounds of positions; `queries` is T.
    """
    rows, columns = seen.shape
    how, r0, r1, c0, c1 = 0, 0, rows, 0, columns
    least, most, offset = rules.reach
    if rules.positions.size > 0:
        low, high = rules.bounds[i_tile, 0], rules.bounds[i_tile, 1]
        first, last = rules.bounds[j_tile, 0], rules.bounds[j_tile, 1]
        if high - first < least or low - last > most:
            return 0, 0, 0, 0, 0
        if low - last < least or high - first > most:
            how = MARKED
            _mark_near(rules.positions[i0:], rules.positions[queries + j0 :], least, most, seen)
    else:
        ahead = i0 + offset - j0  # of the first key is the first query
        r0, r1 = max(0, least - ahead), min(rows, most - ahead + columns)
        if r0 >= r1:
            return 0, 0, 0, 0, 0
        c0, c1 = max(0, ahead + r0 - most), min(columns, ahead + r1 - least)
        if ahead - columns + 1 < least or ahead + rows - 1 > most:
            how = CUT
            c0, c1 = c0 // STEP * STEP, min((c1 + STEP - 1) // STEP * STEP, columns)
    if rules.keep.size > 0:
        if how != MARKED:
            seen[...] = 1
        for i in range(rows):
            row = rules.keep[i0 + i, j0 : j0 + columns]
            if row.strides[0] == row.itemsize:
                _and(as_contiguous(row), seen[i])
            else:
                _and(row, seen[i])
    if rules.keep.size == 0 and how != MARKED:
        return how, r0, r1, c0, c1
    every, some0, some1, first, last = _box(seen)
    how = (how & CUT) + (0 if every else MARKED)
    r0, r1 = max(r0, some0), min(r1, some1)
    c0, c1 = max(c0, first), min(c1, last)
    return (how, r0, r1, c0, c1) if r0 < r1 and c0 < c1 else (0, 0, 0, 0, 0)


def _mark_near_plain(q, k, least, most, seen):
    distance = q[: len(seen), None] - k[: seen.shape[1]]
    seen[...] = (distance >= least) & (distance <= most)


@kernel(plain=_mark_near_plain)
def _mark_near(q, k, least, most, seen):
    """seen[i, j] = least <= q[i] - k[j] <= most."""
    for i in range(seen.shape[0]):
        first, last = q[i] - most, q[i] - least
        for j in range(seen.shape[1]):
            seen[i, j] = (k[j] >= first) & (k[j] <= last)


@kernel(plain=lambda keep, seen: np.multiply(seen, keep, out=seen))
def _and(keep, seen):
    for j in range(seen.shape[0]):
        seen[j] &= keep[j]


@kernel
def _box(seen):
    """Whether all marks are set, and the rows and the columns, in whole steps, that hold those that are."""
    rows, columns = seen.shape
    r0, r1, c0, c1, every = rows, 0, 0, columns, True
    anywhere = np.zeros(columns, np.uint8)
    for i in range(rows):
        if _some(seen[i], anywhere):
            r0, r1 = min(r0, i), i + 1
        every = every and _every(seen[i])
    while c0 < columns and not anywhere[c0]:
        c0 += 1
    while c1 > c0 and not anywhere[c1 - 1]:
        c1 -= 1
    return every, r0, r1, c0 // STEP * STEP, min((c1 + STEP - 1) // STEP * STEP, columns)


def _some_plain(row, anywhere):
    anywhere |= row
    return row.any()


@kernel(plain=_some_plain)
def _some(row, anywhere):
    """Whether a row has a mark; marks are gathered in `anywhere`."""
    mark = row.dtype.type(0)
    for j in range(row.shape[0]):
        mark |= row[j]
        anywhere[j] |= row[j]
    return mark != 0


@kernel(plain=lambda row: row.all())
def _every(row):
    mark = row.dtype.type(1)
    for j in range(row.shape[0]):
        mark &= row[j]
    return mark != 0


@kernel
def cap_and_bias(x, slope, rules, i0, j0):
    """Turns the raw products x of a tile into scores: scaled and capped, plus the bias.

    With a soft cap, slope = 1 - tanh^2, its derivative; who does not want that passes x itself.
    """
    if rules.softcap > 0:
        _cap(x, slope, rules.scale / rules.softcap, rules.softcap)
    else:
        tile_times(x, rules.scale)
    for i in range(x.shape[0] if rules.bias.size > 0 else 0):
        row = rules.bias[i0 + i, j0 : j0 + x.shape[1]]
        if row.strides[0] == row.itemsize:
            _add(as_contiguous(row), x[i])
        else:
            _add(row, x[i])


@kernel
def hide(x, rules, i0, j0, how, seen):
    """-inf in those scores, or raw products, of a tile that `how` and `seen` hide; see `sight`."""
    for i in range(x.shape[0]):
        if how & MARKED:
            _hide_unmarked(x[i], as_contiguous(seen[i]))
        if how & CUT:
            ahead = i0 + i + rules.reach[2] - j0
            x[i, : max(ahead - rules.reach[1], 0)] = -np.inf
            x[i, max(min(ahead - rules.reach[0] + 1, x.shape[1]), 0) :] = -np.inf  # marks may leave a box beyond them


def _cap_plain(x, slope, inner, cap):
    t = np.tanh(x * inner)
    slope[...] = 1 - t * t
    x[...] = cap * t


@kernel(plain=_cap_plain)
def _cap(x, slope, inner, cap):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            t = tanh(x[i, j] * inner)
            slope[i, j] = x.dtype.type(1) - t * t
            x[i, j] = cap * t


@kernel(plain=lambda bias, x: np.add(x, bias, out=x))
def _add(bias, x):
    for j in range(x.shape[0]):
        x[j] += bias[j]


def _hide_unmarked_plain(x, seen):
    x[seen == 0] = -np.inf


@kernel(plain=_hide_unmarked_plain)
def _hide_unmarked(x, seen):
    for j in range(x.shape[0]):
        x[j] = x[j] if seen[j] else -np.inf


@kernel
def drop_tile(x, rules, i0, j0):
    """Dropout of a tile, in place: x * drop_scale where an element's random bits are above the limit, else 0."""
    bits = np.empty(x.shape[1], np.uint32)
    for i in range(x.shape[0]):
        fill_bits(rules.seed, rules.first + (i0 + i) * rules.keys + j0, bits)
        keep_scaled_in_place(x[i], bits, rules.drop_limit, rules.drop_scale)
