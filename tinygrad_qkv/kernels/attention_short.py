"""Attention of so few keys that a row of scores stays in registers: one tile a head, and no online softmax."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.attention_rules import AttentionRules
from tinygrad_qkv.kernels.attention_tiles import SET, matrix, scratch
from tinygrad_qkv.kernels.casts import any_strides
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.passes import SHORT, short_blocks, short_rows
from tinygrad_qkv.kernels.rows import row_times
from tinygrad_qkv.kernels.tile_product import tile_product
from tinygrad_qkv.kernels.transposes import transpose

QUERIES = 64  # at most: with more, the tiles of `attention_forward` cost as little
TASKS = 16  # to share out: enough for the threads, and of some heads each


def is_short(q: np.ndarray, k: np.ndarray, rules: AttentionRules) -> bool:
    """Whether the kernels of this file serve q (B, H, T, d_k) and k (B, H_kv, S, d_k).

    That is where they are few enough, and the rules say at most which keys are near enough, one or more of them for
    every query.
    """
    queries, keys = q.shape[2], k.shape[2]
    if queries > QUERIES or keys * k.itemsize > SHORT:
        return False
    (scale, softcap, bias, keep, lengths, least, most, offset, positions, sink, dropout_p, _) = rules
    if not (bias is keep is lengths is positions is sink is None) or softcap or dropout_p or not scale > 0:
        return False
    return least <= min(offset, most) and queries + offset - most <= keys


def _forward_types(scalar: types.Type) -> tuple[types.Type, ...]:
    arrays = *[array_in(scalar, 4, "A")] * 3, array_out(scalar, 4, "A"), array_out(scalar, 3)
    return (*arrays, scalar, types.UniTuple(types.int64, 3))


@kernel(arguments=_forward_types)
def short_forward(q, k, v, out, lse, scale, reach):
    """out (B, H, T, d_v) and lse (B, H, T) of q (B, H, T, d_k), k (B, H_kv, S, d_k), v (B, H_kv, S, d_v).

    for each batch entry and head, in parallel:
        scores = scale * q k^T, -inf where hidden; lse = log(rowsum(exp(scores))); out = exp(scores - lse) v
    Key j is hidden unless least <= i + offset - j <= most, for reach = (least, most, offset); each query sees one.
    """
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    queries, keys, depth = q.shape[2], k.shape[2], k.shape[3]
    count = q.shape[0] * heads
    tasks = min(count, TASKS)
    for task in prange(tasks):
        room = scratch(keys * depth + 2 * queries * keys, q)
        k_turned, pair = matrix(room, depth, keys), room[keys * depth :]
        weights, sums = matrix(pair, queries, keys), matrix(pair[queries * keys :], queries, keys)
        for n in range(task * count // tasks, (task + 1) * count // tasks):
            b, h = n // heads, n % heads
            transpose(any_strides(k[b, h // shared]), any_strides(k_turned))
            _weigh(q[b, h], k_turned, scale, reach, weights, sums)
            tile_product(any_strides(weights.T), any_strides(v[b, h // shared]), any_strides(out[b, h]), SET)
            for i in range(queries):
                lse[b, h, i] = sums[i, 0]


def _backward_types(scalar: types.Type) -> tuple[types.Type, ...]:
    arrays = *[array_in(scalar, 4, "A")] * 4, *[array_out(scalar, 4, "A")] * 3
    return (*arrays, scalar, types.UniTuple(types.int64, 3))


@kernel(arguments=_backward_types)
def short_backward(g, q, k, v, dq, dk, dv, scale, reach):
    """dq, dk and dv from g (B, H, T, d_v), the gradient of out.

    for each batch entry and head of k and v, in parallel: for each head that shares them:
        weights as in `short_forward`
        ds = weights * (g v^T - rowsum(weights * g v^T)) * scale
        dq = ds k; dk += ds^T q; dv += weights^T g
    """
    heads, shared = k.shape[1], q.shape[1] // k.shape[1]
    queries, keys, depth, v_depth = q.shape[2], k.shape[2], k.shape[3], v.shape[3]
    count = q.shape[0] * heads
    tasks = min(count, TASKS)
    for task in prange(tasks):
        room = scratch(keys * (depth + v_depth) + 2 * queries * keys, q)
        k_turned, v_turned = matrix(room, depth, keys), matrix(room[keys * depth :], v_depth, keys)
        pair = room[keys * (depth + v_depth) :]
        weights, ds = matrix(pair, queries, keys), matrix(pair[queries * keys :], queries, keys)
        for n in range(task * count // tasks, (task + 1) * count // tasks):
            b, head = n // heads, n % heads
            transpose(any_strides(k[b, head]), any_strides(k_turned))
            transpose(any_strides(v[b, head]), any_strides(v_turned))
            for h in range(head * shared, head * shared + shared):
                _weigh(q[b, h], k_turned, scale, reach, weights, ds)
                tile_product(any_strides(g[b, h].T), any_strides(v_turned), any_strides(ds), SET)
                for block in range(short_blocks(ds)):
                    _pull_block(weights, ds, scale, ds, block)
                more = h > head * shared
                tile_product(any_strides(ds.T), any_strides(k[b, head]), any_strides(dq[b, h]), SET)
                tile_product(any_strides(ds), any_strides(q[b, h]), any_strides(dk[b, head]), more)
                tile_product(any_strides(weights), any_strides(g[b, h]), any_strides(dv[b, head]), more)


@kernel
def _weigh(q, k_turned, scale, reach, weights, sums):
    """The weights (T, S), and in every column of sums (T, S) the log of each row's sum of exp(scores)."""
    tile_product(any_strides(q.T), any_strides(k_turned), any_strides(weights), SET)
    elements = weights.reshape(weights.size)
    row_times(elements, scale, elements)
    rows, columns = weights.shape
    least, most, offset = reach
    if offset - columns + 1 < least or offset + rows - 1 > most:
        for i in range(rows):
            weights[i, : max(i + offset - most, 0)] = -np.inf
            weights[i, max(min(i + offset - least + 1, columns), 0) :] = -np.inf
    for block in range(short_blocks(weights)):
        _weigh_block(weights, weights, sums, block)


@short_rows(into=2)
def _weigh_block(scores):
    top = np.maximum.reduce(scores, -1, keepdims=True)
    e = np.exp(scores - top)
    total = np.add.reduce(e, -1, keepdims=True)
    # No score is larger than the log of the sum, so the maximum is that, in every column.
    return e * (1 / total), np.maximum(scores, top + np.log(total))


@short_rows()
def _pull_block(weights, dweights, scale):
    return weights * (dweights - np.add.reduce(weights * dweights, -1, keepdims=True)) * scale
