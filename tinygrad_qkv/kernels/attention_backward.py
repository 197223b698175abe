"""Fused attention, backward: one tile of keys at a time, whose weights are computed again from q, k and lse."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.attention_forward import rule_types
from tinygrad_qkv.kernels.attention_masks import HIDDEN, PARTLY, drop_tile, finish_scores, sight
from tinygrad_qkv.kernels.attention_tiles import (
    ADD,
    SET,
    any_strides,
    close,
    matrix,
    scratch,
    tile_exp,
    tile_softmax_pullback,
    tile_times,
)
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.rows import row_dot
from tinygrad_qkv.kernels.simd import tile_product
from tinygrad_qkv.kernels.transposes import transpose


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    inputs = *[array_in(scalar, 4, "A")] * 5, array_in(scalar, 3)
    outputs = array_out(scalar, 4, "A"), array_out(scalar, 5), *[array_out(scalar, 4, "A")] * 3
    return (*inputs, *outputs, *[types.intp] * 2, *rule_types(scalar))


@kernel(arguments=_types)
def _backward(
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
    depth, v_depth, queries = k.shape[3], v.shape[3], q.shape[2]
    tiles = (k.shape[2] + width - 1) // width
    for task in prange(q.shape[0] * k.shape[1] * parts):
        b, head, part = task // (k.shape[1] * parts), task // parts % k.shape[1], task % parts
        room = scratch(2 * width * (depth + v_depth) + 3 * height * width + 2 * height, q)
        marks = np.empty(height * width if masked else 0, np.uint8)
        means = np.empty((shared, queries), q.dtype)
        for h in range(shared):
            _row_dots(g[b, head * shared + h], out[b, head * shared + h], means[h])
        for tile in range(part, tiles, parts):
            for h in range(head * shared, head * shared + shared):
                _key_tile(
                    g[b, h],
                    q[b, h],
                    k[b, head, : ends[b]],
                    v[b, head, : ends[b]],
                    lse[b, h],
                    means[h - head * shared],
                    any_strides(dq[b, h]) if part == 0 else any_strides(dq_parts[part - 1, b, h]),
                    dk[b, head],
                    dv[b, head],
                    dbias[b, h],
                    h % shared == 0,
                    h % shared == shared - 1,
                    tile,
                    height,
                    width,
                    keep[b, h],
                    bias[b, h],
                    close(positions[b]),
                    bounds[b],
                    reach,
                    scale,
                    softcap,
                    masked,
                    drop_limit,
                    drop_scale,
                    seed,
                    (b * q.shape[1] + h) * queries * k.shape[2],
                    room,
                    marks,
                )


@kernel
def _row_dots(a, b, out):
    for i in range(out.shape[0]):
        out[i] = row_dot(close(a[i]), close(b[i]))


@kernel
def _key_tile(
    g,
    q,
    k,
    v,
    lse,
    means,
    dq,
    dk,
    dv,
    dbias,
    first,
    last,
    tile,
    height,
    width,
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
    number,
    room,
    marks,
):
    j0, j1 = tile * width, min(tile * width + width, k.shape[0])
    columns, depth, v_depth, keys = max(j1 - j0, 0), k.shape[1], v.shape[1], dk.shape[0]
    tiles = (q.shape[0] + height - 1) // height
    k_turned, v_turned = matrix(room, depth, columns), matrix(room[width * depth :], v_depth, columns)
    room = room[width * (depth + v_depth) :]
    k_sum, v_sum = matrix(room, columns, depth), matrix(room[width * depth :], columns, v_depth)
    room = room[width * (depth + v_depth) :]
    lines = room[: 2 * height]
    room = room[2 * height :]
    if first:
        transpose(any_strides(k[j0:j1]), any_strides(k_turned))
        transpose(any_strides(v[j0:j1]), any_strides(v_turned))
        k_sum[...] = 0
        v_sum[...] = 0
    plain = bias.size == 0 and softcap == 0
    for i_tile in range(tiles if columns > 0 else 0):
        i0, i1 = i_tile * height, min(i_tile * height + height, q.shape[0])
        rows = i1 - i0
        seen = matrix(marks, rows if masked else 0, columns)
        state = sight(keep, positions, bounds, reach, q.shape[0], i_tile, tiles + tile, i0, j0, seen)
        if state == HIDDEN:
            continue
        weights, shift, sums = matrix(room, rows, columns), lines[:rows], lines[height : height + rows]
        ds = matrix(room[height * width :], rows, columns)
        slope = matrix(room[2 * height * width :], rows if softcap > 0 else 0, columns)
        tile_product(any_strides(q[i0:i1].T), any_strides(k_turned), any_strides(weights), SET)
        factor = scale
        if state == PARTLY or not plain:
            finish_scores(weights, slope, bias, i0, j0, scale, softcap, state == PARTLY, seen)
            factor = weights.dtype.type(1)
        for i in range(rows):  # a query without a key, of lse -inf, gets weights of 0
            shift[i] = np.inf if lse[i0 + i] == -np.inf else lse[i0 + i]
        tile_exp(weights, factor, shift, sums)
        tile_product(any_strides(g[i0:i1].T), any_strides(v_turned), any_strides(ds), SET)
        if drop_scale > 0:
            drop_tile(ds, number + i0 * keys + j0, keys, drop_limit, drop_scale, seed)
        tile_softmax_pullback(weights, ds, means[i0:i1])
        if dbias.size > 0:
            _copy_rows(ds, dbias[i0:i1, j0:j1])
        if softcap > 0:
            _times(ds, slope)
        tile_times(ds, scale)
        tile_product(any_strides(ds.T), any_strides(k[j0:j1]), any_strides(dq[i0:i1]), ADD)
        tile_product(any_strides(ds), any_strides(q[i0:i1]), any_strides(k_sum), ADD)
        if drop_scale > 0:
            drop_tile(weights, number + i0 * keys + j0, keys, drop_limit, drop_scale, seed)
        tile_product(any_strides(weights), any_strides(g[i0:i1]), any_strides(v_sum), ADD)
    if last:
        _copy_rows(k_sum, dk[j0:j1])
        _copy_rows(v_sum, dv[j0:j1])


@kernel(plain=lambda x, factors: np.multiply(x, factors, out=x))
def _times(x, factors):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] *= factors[i, j]


@kernel
def _copy_rows(x, out):
    for i in range(x.shape[0]):
        _copy_row(x[i], close(out[i]))


@kernel(plain=lambda x, out: np.copyto(out, x))
def _copy_row(x, out):
    for j in range(x.shape[0]):
        out[j] = x[j]
