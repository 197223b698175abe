"""Fused attention, forward: an online softmax over tiles of keys, one strip of queries at a time."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.attention_masks import cap_and_bias, drop_tile, head_rules, hide, sight
from tinygrad_qkv.kernels.attention_tiles import (
    SET,
    matrix,
    rows_times,
    scratch,
    tile_exp,
    tile_max,
)
from tinygrad_qkv.kernels.casts import any_strides, as_contiguous
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.rows import row_times
from tinygrad_qkv.kernels.scalars import exp, log, of_rank, rank
from tinygrad_qkv.kernels.tile_product import tile_product
from tinygrad_qkv.kernels.transposes import transpose


def rule_types(scalar: types.Type) -> tuple[types.Type, ...]:
    """The types of the arguments from `sink` to `seed`, which forward and backward share."""
    i8, reach = types.int64, types.UniTuple(types.int64, 3)
    arrays = array_in(i8, 1), array_in(types.boolean, 4, "A"), array_in(scalar, 4, "A")
    places = array_in(i8, 2, "A"), array_in(i8, 3, "A"), reach
    return (*arrays, *places, *[scalar] * 2, types.boolean, types.uint32, scalar, types.uint64)


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    arrays = *[array_in(scalar, 4, "A")] * 3, array_out(scalar, 4, "A"), array_out(scalar, 3), array_in(scalar, 1)
    return (*arrays, *[types.intp] * 3, *rule_types(scalar))


@kernel(arguments=_types)
def forward(
    q,
    k,
    v,
    out,
    lse,
    sink,
    height,
    width,
    strips_a_task,
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
    """out (B, H, T, d_v) and lse (B, H, T) of q (B, H, T, d_k), k (B, H_kv, S, d_k), v (B, H_kv, S, d_v).

    for each batch entry, head and strip of `height` queries, in parallel:
        for each tile of `width` keys that the strip sees:
            scores = q k^T; top = max(top, scores); weights = exp(scores - top)
            total, out = (total, out) * exp(old top - top) + (sum(weights), weights v)
        out /= total; lse = top + log(total)
    """
    strips, shared = (q.shape[2] + height - 1) // height, q.shape[1] // k.shape[1]
    count = q.shape[0] * q.shape[1] * strips
    for task in prange((count + strips_a_task - 1) // strips_a_task):
        room = scratch(k.shape[3] * width + height * width + height * (v.shape[3] + 5), q)
        marks = np.empty(height * width, np.uint8)
        for n in range(task * strips_a_task, min(task * strips_a_task + strips_a_task, count)):
            b, h, i = n // (strips * q.shape[1]), n // strips % q.shape[1], n % strips
            # Long and short ones in turn: with a causal mask later queries see more keys.
            i = i // 2 if i % 2 == 0 else strips - 1 - i // 2
            every = keep, bias, positions, bounds, reach, scale, softcap, masked, drop_limit, drop_scale, seed
            rules = head_rules(every, b, h, (q.shape[1], q.shape[2], k.shape[2]))
            first = sink[h] if sink.size > 0 else -np.inf
            k_head, v_head = k[b, h // shared, : ends[b]], v[b, h // shared]
            _strip(q[b, h], k_head, v_head, out[b, h], lse[b, h], first, i, height, width, rules, room, marks)


@kernel
def _strip(q, k, v, out, lse, sink, strip, height, width, rules, room, marks):
    """`height` queries of one head; `sink` is a score that every row begins with, -inf for none."""
    i0, i1 = strip * height, min(strip * height + height, q.shape[0])
    rows, depth, strips = i1 - i0, k.shape[1], (q.shape[0] + height - 1) // height
    lines, mix = matrix(room, 5, rows), matrix(room[5 * height :], rows, v.shape[1])
    top, total, shift, shrink, sums = lines[0], lines[1], lines[2], lines[3], lines[4]
    room = room[5 * height + height * v.shape[1] :]
    top[...] = sink
    total[...] = 1 if sink > -np.inf else 0
    plain = rules.bias.size == 0 and rules.softcap == 0 and rules.scale > 0  # then the exponential takes the scale
    started = False
    for j0 in range(0, k.shape[0], width):
        seen = matrix(marks, rows, min(width, k.shape[0] - j0))
        how, r0, r1, c0, c1 = sight(rules, q.shape[0], strip, strips + j0 // width, i0, j0, seen)
        if r0 == r1:
            continue
        keys = slice(j0 + c0, j0 + c1)
        turned, scores = matrix(room, depth, c1 - c0), matrix(room[depth * width :], r1 - r0, c1 - c0)
        transpose(any_strides(k[keys]), any_strides(turned))
        tile_product(any_strides(q[i0 + r0 : i0 + r1].T), any_strides(turned), any_strides(scores), SET)
        factor = rules.scale
        if not plain:
            cap_and_bias(scores, scores, rules, i0 + r0, j0 + c0)
            factor = scores.dtype.type(1)
        if how:
            hide(scores, rules, i0 + r0, j0 + c0, how, seen[r0:r1, c0:c1])
        tile_max(scores, shift[r0:r1])
        _raise_tops(top[r0:r1], shift[r0:r1], factor, shrink[r0:r1])
        tile_exp(scores, factor, shift[r0:r1], sums[r0:r1])
        _grow(total[r0:r1], shrink[r0:r1], sums[r0:r1])
        if rules.drop_scale > 0:
            drop_tile(scores, rules, i0 + r0, j0 + c0)
        if started:
            rows_times(mix[r0:r1], shrink[r0:r1])
        elif r1 - r0 < rows:
            mix[...] = 0
        add = started or r1 - r0 < rows
        tile_product(any_strides(scores.T), any_strides(v[keys]), any_strides(mix[r0:r1]), add)
        started = True
    if not started:
        mix[...] = 0
    _shares(top, total, rules.masked, lse[i0:i1], shift)
    for i in range(rows):
        row_times(mix[i], shift[i], as_contiguous(out[i0 + i]))


def _raise_tops_plain(top, shift, factor, shrink):
    new = np.maximum(top, shift * factor)
    shift[:] = np.where(new == -np.inf, 0, new)
    shrink[:], top[:] = np.exp(top - shift), new


@kernel(plain=_raise_tops_plain)
def _raise_tops(top, shift, factor, shrink):
    """Takes the maxima of the raw scores in `shift`: raises top to them, and says what to subtract and to shrink by."""
    for i in range(top.shape[0]):
        old = top[i]
        new = of_rank(max(rank(old), rank(shift[i] * factor)))
        shift[i] = 0 if new == -np.inf else new  # nothing seen yet: exp(-inf) is the 0 that is wanted
        shrink[i] = exp(old - shift[i])
        top[i] = new


def _grow_plain(total, shrink, sums):
    total[:] = total * shrink + sums


@kernel(plain=_grow_plain)
def _grow(total, shrink, sums):
    for i in range(total.shape[0]):
        total[i] = total[i] * shrink[i] + sums[i]


def _shares_plain(top, total, masked, lse, share):
    empty = total == 0
    lse[:] = np.where(empty & (not masked), np.nan, top + np.log(total))
    share[:] = np.where(empty & masked, 0, 1 / total)


@kernel(plain=_shares_plain)
def _shares(top, total, masked, lse, share):
    """lse = top + log(total), share = 1 / total.

    Without a mask, scores of -inf alone have no softmax, and all is NaN; behind one there is nothing to see.
    """
    for i in range(top.shape[0]):
        empty = total[i] == 0
        lse[i] = np.nan if empty and not masked else top[i] + log(total[i])
        share[i] = 0 if empty and masked else 1 / total[i]
