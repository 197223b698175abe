"""Which keys a tile of fused attention may see, its scores from the raw products, and what dropout takes from it.

A tile is the queries from i0 on and the keys from j0 on of one head. Most tiles are either out of sight, and skipped,
or seen whole, and need no mask. Arrays of size 0 stand for what is absent.
"""

import numpy as np

from tinygrad_qkv.kernels.attention_tiles import close, tile_times
from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.random_bits import fill_bits
from tinygrad_qkv.kernels.scalars import tanh

HIDDEN, PARTLY, WHOLE = 0, 1, 2  # how much of a tile is seen


@kernel
def sight(keep, positions, bounds, reach, queries, i_tile, j_tile, i0, j0, seen):
    """HIDDEN, PARTLY or WHOLE; if PARTLY, `seen` (rows, columns) uint8 says which keys.

    keep (T, S) bool; positions (T + S,), those of the queries first; bounds (tiles, 2), the smallest and the largest
    position in each tile, those of the queries first, i_tile and j_tile being the numbers of the two. A key is seen
    where keep is True and reach[0] <= q_position - k_position <= reach[1].
    """
    partly = False
    if positions.size > 0:
        low, high, first, last = bounds[i_tile, 0], bounds[i_tile, 1], bounds[j_tile, 0], bounds[j_tile, 1]
        if high - first < reach[0] or low - last > reach[1]:
            return HIDDEN
        if low - last < reach[0] or high - first > reach[1]:
            partly = True
            _mark_near(positions[i0:], positions[queries + j0 :], reach[0], reach[1], seen)
    if keep.size > 0:
        if not partly:
            seen[...] = 1
        for i in range(seen.shape[0]):
            row = keep[i0 + i, j0 : j0 + seen.shape[1]]
            if row.strides[0] == row.itemsize:
                _and(close(row), seen[i])
            else:
                _and(row, seen[i])
        partly = True
    return _share_seen(seen) if partly else WHOLE


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


def _share_seen_plain(seen):
    return WHOLE if seen.all() else PARTLY if seen.any() else HIDDEN


@kernel(plain=_share_seen_plain)
def _share_seen(seen):
    some, every = np.uint8(0), np.uint8(1)
    for i in range(seen.shape[0]):
        for j in range(seen.shape[1]):
            some |= seen[i, j]
            every &= seen[i, j]
    return WHOLE if every else PARTLY if some else HIDDEN


@kernel
def finish_scores(x, slope, bias, i0, j0, scale, softcap, partly, seen):
    """Turns the raw products x of a tile into scores: scaled and capped, plus the bias (T, S), -inf if not seen.

    softcap 0 is none. Else slope = 1 - tanh^2, its derivative; who does not want that passes x itself.
    """
    if softcap > 0:
        _cap(x, slope, scale / softcap, softcap)
    else:
        tile_times(x, scale)
    if bias.size > 0:
        for i in range(x.shape[0]):
            row = bias[i0 + i, j0 : j0 + x.shape[1]]
            if row.strides[0] == row.itemsize:
                _add(close(row), x[i])
            else:
                _add(row, x[i])
    if partly:
        _hide(x, seen)


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


def _hide_plain(x, seen):
    x[seen == 0] = -np.inf


@kernel(plain=_hide_plain)
def _hide(x, seen):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = x[i, j] if seen[i, j] else -np.inf


@kernel
def drop_tile(x, first, step, limit, scale, seed):
    """x * scale where an element's random bits are above the limit, else 0, in place.

    Element (i, j) has the number first + i * step + j, its place in an array (B, H, T, S).
    """
    bits = np.empty(x.shape[1], np.uint32)
    for i in range(x.shape[0]):
        fill_bits(seed, first + i * step, bits)
        _drop(x[i], bits, limit, scale)


def _drop_plain(x, bits, limit, scale):
    x[...] = np.where(bits > limit, x * scale, 0)


@kernel(plain=_drop_plain)
def _drop(x, bits, limit, scale):
    for j in range(x.shape[0]):
        x[j] = x[j] * scale if bits[j] > limit else x.dtype.type(0)
