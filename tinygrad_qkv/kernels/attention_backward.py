"""Fused attention, backward: one tile of keys at a time, whose weights are computed again from q, k and lse."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.attention_forward import rule_types
from tinygrad_qkv.kernels.attention_masks import cap_and_bias, drop_tile, head_rules, hide, sight
from tinygrad_qkv.kernels.attention_tiles import (
    ADD,
    SET,
    matrix,
    scratch,
    tile_exp,
    tile_softmax_pullback,
    tile_times,
)
from tinygrad_qkv.kernels.casts import any_strides, as_contiguous
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.rows import row_copy, row_dot
from tinygrad_qkv.kernels.tile_product import tile_product
from tinygrad_qkv.kernels.transposes import transpose


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    inputs = *[array_in(scalar, 4, "A")] * 5, array_in(scalar, 3)
    outputs = array_out(scalar, 4, "A"), array_out(scalar, 5), *[array_out(scalar, 4, "A")] * 3
    return (*inputs, *outputs, *[types.intp] * 2, *rule_types(scalar))


@kernel(arguments=_types)
def backward(
    g,
    q,
    k,
    v,
    out,
    lse,
    dq,
    dq_parts,
    dk,
    dv,
    dbias,
    height,
    width,
    ends,
    keep,
    bias,
    positions,
    bounds,
    reach,
    scale,
    softcap,
    masked,
    drop_limit,
    drop_scale,
    seed,
):
    """dq, which all of dq_parts (parts - 1, B, H, T, d_k) are to be added to, dk, dv, and dbias if it is (B, H, T, S).

    for each batch entry, head of k and v, and part p, in parallel:
        for each tile of `width` keys whose number is p modulo the parts:
            for each head that shares them, and each tile of `height` queries that sees one:
                weights = exp(scale * q k^T - lse)
                dv += weights^T g
                ds = weights * (g v^T - rowsum(g * out)) * scale
                dq of part p += ds k; dk += ds^T q
    """
    parts, shared = dq_parts.shape[0] + 1, q.shape[1] // k.shape[1]
    queries, keys, widths = q.shape[2], k.shape[2], k.shape[3] + v.shape[3]
    for task in prange(q.shape[0] * k.shape[1] * parts):
        b, head, part = task // (k.shape[1] * parts), task // parts % k.shape[1], task % parts
        room = scratch(2 * width * widths + 3 * height * width + 2 * height, q)
        marks = np.empty(height * width, np.uint8)
        means = np.empty((shared, queries), q.dtype)
        for h in range(shared):
            _row_dots(g[b, head * shared + h], out[b, head * shared + h], means[h])
        for tile in range(part, (ends[b] + width - 1) // width, parts):
            for h in range(head * shared, head * shared + shared):
                every = keep, bias, positions, bounds, reach, scale, softcap, masked, drop_limit, drop_scale, seed
                rules = head_rules(every, b, h, (q.shape[1], queries, keys))
                dq_head = any_strides(dq[b, h]) if part == 0 else any_strides(dq_parts[part - 1, b, h])
                j0, j1 = tile * width, min(tile * width + width, ends[b])
                head_in = g[b, h], q[b, h], k[b, head, j0:j1], v[b, head, j0:j1], lse[b, h], means[h % shared]
                head_out = dq_head, dk[b, head, j0:j1], dv[b, head, j0:j1], dbias[b, h]
                ends_of_group = h % shared == 0, h % shared == shared - 1
                _key_tile(head_in, head_out, ends_of_group, tile, height, width, rules, room, marks)


@kernel
def _row_dots(a, b, out):
    for i in range(out.shape[0]):
        out[i] = row_dot(as_contiguous(a[i]), as_contiguous(b[i]))


@kernel
def _key_tile(head_in, head_out, ends_of_group, tile, height, width, rules, room, marks):
    """What one head gives to a tile of keys and values, and what it gets from it.

    The sums for the keys stay in `room` from the first of the heads that share them to the last.
    """
    g, q, k, v, lse, means = head_in
    dq, dk, dv, dbias = head_out
    columns, depth, v_depth = k.shape[0], k.shape[1], v.shape[1]
    tiles, j0 = (q.shape[0] + height - 1) // height, tile * width
    k_turned, v_turned = matrix(room, depth, columns), matrix(room[width * depth :], v_depth, columns)
    room = room[width * (depth + v_depth) :]
    k_sum, v_sum = matrix(room, columns, depth), matrix(room[width * depth :], columns, v_depth)
    room = room[width * (depth + v_depth) :]
    if ends_of_group[0]:
        transpose(any_strides(k), any_strides(k_turned))
        transpose(any_strides(v), any_strides(v_turned))
        k_sum[...] = 0
        v_sum[...] = 0
    plain = rules.bias.size == 0 and rules.softcap == 0 and rules.scale > 0  # then the exponential takes the scale
    for i_tile in range(tiles):
        i0 = i_tile * height
        seen = matrix(marks, min(height, q.shape[0] - i0), columns)
        how, r0, r1, c0, c1 = sight(rules, q.shape[0], i_tile, tiles + tile, i0, j0, seen)
        if r0 == r1:
            continue
        rows, across = slice(i0 + r0, i0 + r1), slice(c0, c1)
        weights, ds = matrix(room, r1 - r0, c1 - c0), matrix(room[height * width :], r1 - r0, c1 - c0)
        slope = matrix(room[2 * height * width :], r1 - r0 if rules.softcap > 0 else 0, c1 - c0)
        lines = matrix(room[3 * height * width :], 2, r1 - r0)
        tile_product(any_strides(q[rows].T), any_strides(k_turned[:, across]), any_strides(weights), SET)
        factor = rules.scale
        if not plain:
            cap_and_bias(weights, slope, rules, i0 + r0, j0 + c0)
            factor = weights.dtype.type(1)
        if how:
            hide(weights, rules, i0 + r0, j0 + c0, how, seen[r0:r1, across])
        _shift_by(lse[rows], lines[0])
        tile_exp(weights, factor, lines[0], lines[1])
        tile_product(any_strides(g[rows].T), any_strides(v_turned[:, across]), any_strides(ds), SET)
        if rules.drop_scale > 0:
            drop_tile(ds, rules, i0 + r0, j0 + c0)
        tile_softmax_pullback(weights, ds, means[rows], rules.scale if dbias.size == 0 else ds.dtype.type(1))
        if dbias.size > 0:
            _copy_rows(ds, any_strides(dbias[rows, j0 + c0 : j0 + c1]))
            tile_times(ds, rules.scale)
        if rules.softcap > 0:
            _times(ds, slope)
        tile_product(any_strides(ds.T), any_strides(k[across]), any_strides(dq[rows]), ADD)
        tile_product(any_strides(ds), any_strides(q[rows]), any_strides(k_sum[across]), ADD)
        if rules.drop_scale > 0:
            drop_tile(weights, rules, i0 + r0, j0 + c0)
        tile_product(any_strides(weights), any_strides(g[rows]), any_strides(v_sum[across]), ADD)
    if ends_of_group[1]:
        _copy_rows(k_sum, any_strides(dk))
        _copy_rows(v_sum, any_strides(dv))


def _shift_by_plain(lse, shift):
    shift[:] = np.where(lse == -np.inf, np.inf, lse)


@kernel(plain=_shift_by_plain)
def _shift_by(lse, shift):
    """What to subtract from the scores of each row: inf, which leaves weights of 0, where a query sees no key."""
    for i in range(shift.shape[0]):
        shift[i] = np.inf if lse[i] == -np.inf else lse[i]


@kernel(plain=lambda x, factors: np.multiply(x, factors, out=x))
def _times(x, factors):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] *= factors[i, j]


@kernel
def _copy_rows(x, out):
    for i in range(x.shape[0]):
        row_copy(x[i], as_contiguous(out[i]))
