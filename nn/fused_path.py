"""Attention on its fused path: the inputs of a call as the op takes them, with four axes and masks left small."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.nn.masks import Mask
from tinygrad_qkv.ops.attention import AttentionRules, fused_attention
from tinygrad_qkv.tensor import Tensor

# Measured, forward and backward: the fused call is the faster one from so many scores of a head and so many keys on.
# With 16 keys it takes 1.0 to 1.4 times as long as the graph, whose every step can be looked at besides; with 32 keys
# 0.9 to 1.1 times, with 64 keys 0.9 times and less.
FUSED_FROM, KEYS_FROM = 2**10, 32
# Without rules but a causal mask or a window, which have a kernel for few keys: in a layer with 16 keys 0.9 to 1.0
# times as long, with 8 keys and many heads 1.0 to 1.1 times.
PLAIN_FROM, PLAIN_KEYS_FROM = 2**8, 16


class Terms(NamedTuple):
    """What a call says besides q, k, v and the masks; softcap 0 and dropout_p 0 are none."""

    scale: float
    softcap: float
    sink: Tensor | None  # (H,)
    dropout_p: float
    seed: int


def suits(shape: tuple[int, ...], mask: Mask, terms: Terms) -> bool:
    """Whether the fused path is the faster one for scores of this shape."""
    keys, scores = shape[-1], shape[-2] * shape[-1]
    if scores >= FUSED_FROM and keys >= KEYS_FROM:
        return True
    bare = mask.attend is mask.bias is mask.lengths is mask.positions is terms.sink is None
    return bare and not terms.softcap and not terms.dropout_p and scores >= PLAIN_FROM and keys >= PLAIN_KEYS_FROM


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms, shape: tuple[int, ...]) -> Tensor | None:
    """The output (..., T, d_v) for scores of `shape` (..., T, S), or None where only the tensor graph can make it.

    That is where NaN or inf meet a mask, and where v has leading axes of its own under dropout.
    """
    lead = shape[:-2]
    if v.shape[:-2] != lead:
        lead = np.broadcast_shapes(lead, v.shape[:-2]) if v.ndim < 4 or len(shape) < 4 else _lead(shape, v)
    if terms.dropout_p and lead != shape[:-2]:
        return None
    B, H = (math.prod(lead[:-1]), lead[-1]) if len(lead) > 1 else (math.prod(lead), 1)
    if mask.lengths is not None and not (all_finite(k) and all_finite(v)):  # padding may hold anything
        real: Any = (np.arange(shape[-1]) < mask.lengths[..., None])[..., None]
        real = real.any(-3, keepdims=True) if real.ndim > 3 else real
        k, v = ops.where(real, k, 0), ops.where(real, v, 0)
    if mask.hides and not (all_finite(q) and all_finite(k) and all_finite(v)):
        return None
    if not (len(lead) == 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2] == lead):
        compact = k.shape[:-2] == v.shape[:-2] and len(lead) > 1
        q, k, v = _four_axes(q, lead, H, False), _four_axes(k, lead, H, compact), _four_axes(v, lead, H, compact)
    rules = _rules(mask, terms, lead, (B, H, *shape[-2:]))
    bias = None if mask.bias is None else _bias(mask.bias, lead, (B, H, *shape[-2:])).astype(q.dtype)
    output, lse = fused_attention(q, k, v, bias, terms.sink, rules)
    if mask.hides and not (lse < math.inf).all():  # NaN too
        return None
    return output if len(lead) == 2 else output.reshape(*lead, *output.shape[-2:])


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or inf. One sum is cheap; should it overflow, the answer is a safe False."""
    with np.errstate(all="ignore"):
        return math.isfinite(float(np.sum(x.data)))


def _lead(shape: tuple[int, ...], v: Tensor) -> tuple[int, ...]:
    """The output's leading axes; v may have fewer heads."""
    return (*np.broadcast_shapes(shape[:-3], v.shape[:-3]), max(shape[-3], v.shape[-3]))


def _four_axes(x: Tensor, lead: tuple[int, ...], H: int, compact: bool) -> Tensor:
    """x (..., n, d) as (B, H, n, d), or with its own number of heads where `compact`; copied only if broadcast."""
    n, d = x.shape[-2:]
    own = (1,) * (len(lead) + 2 - x.ndim) + x.shape[:-2]
    if len(lead) < 2:
        whole, heads = lead, 1
    else:
        heads = own[-1] if compact else H
        whole = (*lead[:-1], heads)
        if not compact and own[-1] not in (1, H):
            x = ops.reshape(x, (*own[:-1], own[-1], 1, n, d)).broadcast_to((*own, H // own[-1], n, d))
            own = (*own[:-1], H)
            x = x.reshape(*own, n, d)
    if own != whole or x.ndim != len(lead) + 2:
        x = x.broadcast_to((*whole, n, d))
    return x if len(lead) == 2 else x.reshape(math.prod(lead[:-1] if len(lead) > 1 else lead), heads, n, d)


def _bias(bias: Tensor, lead: tuple[int, ...], four: tuple[int, ...]) -> Tensor:
    """The bias so that it broadcasts to (B, H, T, S)."""
    if len(lead) == 2 or bias.ndim < 3:
        return bias
    return ops.unsqueeze(bias, 1) if len(lead) == 1 else bias.broadcast_to((*lead, *four[2:])).reshape(four)


def _rules(mask: Mask, terms: Terms, lead: tuple[int, ...], four: tuple[int, ...]) -> AttentionRules:
    """The masks for scores of the four axes (B, H, T, S)."""
    T, S = four[2:]
    keep = mask.attend
    if keep is not None and keep.ndim > 2 and len(lead) != 2:
        keep = keep[:, None] if len(lead) == 1 else np.broadcast_to(keep, (*lead, T, S)).reshape(four)
    lengths, reach, positions = mask.lengths, mask.reach, mask.positions
    if lengths is not None:
        lengths = _by_batch(lengths[..., None], lead, four)
    if positions is not None:
        positions = _by_batch(positions[0], lead, four), _by_batch(positions[1], lead, four)
    if _by_head(lengths) or (positions is not None and any(map(_by_head, positions))):
        own: Any = Mask(lengths=mask.lengths, reach=mask.reach, positions=mask.positions).keep(T, S)
        own = np.broadcast_to(own, (*lead, T, S)).reshape(four)
        keep, lengths, reach = own if keep is None else own & keep, None, None
    rules = AttentionRules(
        scale=terms.scale,
        softcap=terms.softcap,
        keep=keep,
        lengths=None if lengths is None else lengths[:, 0, 0],
        dropout_p=terms.dropout_p,
        seed=terms.seed,
    )
    if reach is None:
        return rules
    at = None if positions is None else (positions[0][:, 0], positions[1][:, 0])
    return rules._replace(least=reach[0], most=reach[1], offset=S - T, positions=at)


def _by_batch(x: np.ndarray, lead: tuple[int, ...], four: tuple[int, ...]) -> np.ndarray:
    """(..., n) with leading axes like the scores', as (B, 1 or H, n)."""
    B, H = four[:2]
    shared = len(lead) < 2 or x.ndim < 2 or x.shape[-2] == 1
    whole = (*lead[:-1], 1, x.shape[-1]) if shared and len(lead) > 1 else (*lead, x.shape[-1])
    return np.broadcast_to(x, whole).reshape(B, 1 if shared else H, x.shape[-1])


def _by_head(x: Any) -> bool:
    return x is not None and x.shape[1] > 1
