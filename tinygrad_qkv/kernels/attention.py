"""Fused attention, softmax(scale * q k^T) v, and its pullback: memory linear in the numbers of queries and keys.

B batch, H heads, T query positions, S key positions. Source: Dao, Fu, Ermon, Rudra and Re 2022, "FlashAttention".
"""

import numpy as np

from tinygrad_qkv.kernels.arrays import native, one_dtype, shapes_fit
from tinygrad_qkv.kernels.attention_backward import backward
from tinygrad_qkv.kernels.attention_forward import forward
from tinygrad_qkv.kernels.attention_rules import AttentionRules, prepared, sink_of
from tinygrad_qkv.kernels.attention_short import is_short, short_backward, short_forward
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

HEIGHT = 96  # queries of a tile
ROW_BYTES = 512  # of a line of its scores, which take 48 KB in float32 and lie in L2 with the tile's operands
TASK_WORK = 2**18  # multiply-adds of a task, at least
TASKS = 16  # of the pullback, where there are enough keys; with fewer pairs of batch entry and head the keys are split
NO_RULES = AttentionRules()


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rules: AttentionRules = NO_RULES
) -> tuple[np.ndarray, np.ndarray]:
    """out (B, H, T, d_v) and lse (B, H, T), the log of the sum of a row's exp(scores).

    q (B, H, T, d_k), k (B, H_kv, S, d_k), v (B, H_kv, S, d_v), all float32 or float64, any strides (read in place where
    the last axis is contiguous); H divides by H_kv, neighbours share. `out` has the order of q's axes in memory.
    A query that sees no key gives zeros, and lse -inf.
    Errors: ValueError for shapes that do not fit, TypeError for other or unlike dtypes.
    """
    q, k, v = _operands("attention", q, k, v)
    out = _ordered_as(q, v.shape[3])
    lse = np.empty(q.shape[:3], q.dtype)
    if lse.size == 0 or k.shape[2] == 0:
        out[...], lse[...] = 0, -np.inf if rules.sink is None else rules.sink[:, None]
        return out, lse
    row_work = k.shape[2] * (k.shape[3] + v.shape[3])
    parallel = lse.size * row_work >= PARALLEL_FROM["attention"]
    if is_short(q, k, rules):
        short_forward(q, k, v, out, lse, rules.scale, (rules.least, rules.most, rules.offset), parallel=parallel)
        return out, lse
    height, width = 2 * HEIGHT, ROW_BYTES // q.itemsize
    strips = -(-TASK_WORK // max(1, min(height, q.shape[2]) * row_work))
    rest = prepared(rules, q, k, height, width)
    forward(q, k, v, out, lse, sink_of(rules, q), height, width, strips, *rest, parallel=parallel)
    return out, lse


def attention_pullback(
    g: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    rules: AttentionRules = NO_RULES,
    bias_too: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """dq, dk, dv, each with the order of its operand's axes in memory, and dbias (B, H, T, S) if asked for.

    g (B, H, T, d_v) is the gradient of `out`, and out and lse are what `attention` gave for the same rules.
    """
    q, k, v = _operands("attention_pullback", q, k, v)
    shape = *q.shape[:3], v.shape[3]
    g, out, lse = (native(x, "attention_pullback") for x in (g, out, lse))
    one_dtype("attention_pullback", q, g, out, lse)
    shapes_fit("attention_pullback", g=(g, shape), out=(out, shape), lse=(lse, q.shape[:3]))
    g, out, lse = _rows_in_place(g), _rows_in_place(out), np.ascontiguousarray(lse)
    dq, dk, dv = (_ordered_as(x, x.shape[3]) for x in (q, k, v))
    parallel = lse.size * k.shape[2] * (k.shape[3] + v.shape[3]) >= PARALLEL_FROM["attention"]
    if lse.size and k.shape[2] and not bias_too and is_short(q, k, rules):
        reach = rules.least, rules.most, rules.offset
        short_backward(g, q, k, v, dq, dk, dv, rules.scale, reach, parallel=parallel)
        return dq, dk, dv, None
    dq[...] = 0
    if rules.lengths is not None:  # keys that are not read get no gradient
        dk[...], dv[...] = 0, 0
    dbias = np.zeros((*lse.shape, k.shape[2]) if bias_too else (*q.shape[:2], 0, 0), q.dtype)
    if lse.size and k.shape[2]:
        height, width = HEIGHT, ROW_BYTES // q.itemsize
        tiles = -(-k.shape[2] // width)
        parts = min(tiles, -(-TASKS // (k.shape[0] * k.shape[1])))
        dq_parts = np.zeros((parts - 1, *q.shape), q.dtype)
        arrays = g, q, k, v, out, lse, dq, dq_parts, dk, dv, dbias
        backward(*arrays, height, width, *prepared(rules, q, k, height, width), parallel=parallel)
        for part in dq_parts:
            dq += part
    else:
        dk[...], dv[...] = 0, 0
    return dq, dk, dv, dbias if bias_too else None


def _operands(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v as the kernels take them, after their shapes and dtypes were checked."""
    q, k, v = native(q, name), native(k, name), native(v, name)
    one_dtype(name, q, k, v)
    shapes = f"q (B, H, T, d_k) = {q.shape}, k (B, H_kv, S, d_k) = {k.shape}, v (B, H_kv, S, d_v) = {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{name} needs four axes: {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{name}: sizes of one name must be equal: {shapes}")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(f"{name}: the heads H of q must be a multiple of the heads H_kv of k and v: {shapes}")
    return _rows_in_place(q), _rows_in_place(k), _rows_in_place(v)


def _rows_in_place(x: np.ndarray) -> np.ndarray:
    """x with a contiguous last axis, copied only where it is not so."""
    return x if x.shape[-1] <= 1 or x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


def _ordered_as(x: np.ndarray, width: int) -> np.ndarray:
    """An array with rows of `width` elements, contiguous, and otherwise x's shape and order of axes in memory."""
    shape = (*x.shape[:3], width)
    out = np.empty_like(x, shape=shape)
    return out if out.strides[3] == out.itemsize else np.empty(shape, x.dtype)  # x is a broadcast view
