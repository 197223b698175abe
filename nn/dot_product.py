"""Scaled dot-product attention, softmax(Q K^T * scale) V, under one clear contract for masks.

Source: Vaswani et al. 2017, section 3.2.1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.nn.masks import Mask, combine, refuse_unknown
from tinygrad_qkv.ops.masked_products import masked_mix, masked_scores
from tinygrad_qkv.ops.operands import floating
from tinygrad_qkv.tensor import Tensor

PATHS = ("tensor",)


class AttentionRecord(NamedTuple):
    """What `need` asked for; the rest is None.  All of it is tracked, so a loss may use it.

    weights    (..., T, S) after the softmax and before dropout; rows sum to 1, masked entries and rows are 0
    scores     (..., T, S) before the softmax: scaled, with the bias added, -inf where masked
    q, k, v    the queries, keys and values of each head
    logsumexp  (..., T), log of the sum of exp(scores); -inf for a row without a key
    """

    weights: Tensor | None = None
    scores: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    logsumexp: Tensor | None = None


def scaled_dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    attend: Any = None,
    ignore: Any = None,
    bias: Any = None,
    lengths: Any = None,
    is_causal: bool = False,
    q_positions: Any = None,
    k_positions: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    path: str | None = None,
    need: Iterable[str] = (),
    **unknown: Any,
) -> Any:
    """The values, averaged for each query by how well their keys match it.

    q (..., T, d_k), k (..., S, d_k), v (..., S, d_v) -> (..., T, d_v).  Leading axes broadcast; with four or more
    axes, axis -3 holds heads, and k and v may have fewer of them if the count divides (neighbours share).
    The masks are described in `tinygrad_qkv.nn.masks.MaskWords`; they combine, and a key counts where all let it.
    `scale` defaults to 1 / sqrt(d_k).  `dropout_p` drops weights whenever it is not 0.  `path` chooses how it is
    computed: "tensor" is the one that exists, and what None means.

    A query that may look at no key gets zeros, and gives zero gradients.  What stands behind a mask, NaN and inf
    too, reaches neither output nor gradients.

    `need`, some of ("weights", "scores", "q", "k", "v", "logsumexp"), makes the call return (output, record); it
    does not change a bit of the output.
    """
    refuse_unknown(unknown, "scale", "dropout_p", "path", "need")
    wanted = _checked_need(need)
    if path is not None and path not in PATHS:
        raise ValueError(f"path is None or one of {PATHS}, got {path!r}")
    q, k, v = _in_one_dtype(ops.tensor(q), ops.tensor(k), ops.tensor(v))
    given = {"q": q, "k": k, "v": v}
    k, v = _share_heads(q, k, "k"), _share_heads(q, v, "v")
    shape = _scores_shape(q, k, v)
    mask = combine(
        shape,
        attend=attend,
        ignore=ignore,
        bias=bias,
        lengths=lengths,
        is_causal=is_causal,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    with np.errstate(all="ignore"):  # NaN and inf are nothing to warn of behind a mask, and speak for themselves else
        scores, weights, output = _attend(q, k, v, _checked_scale(scale, q.shape[-1]), mask, dropout_p)
    if not wanted:
        return output
    makers = {"weights": lambda: weights, "scores": lambda: scores, "logsumexp": lambda: ops.logsumexp(scores, -1)}
    return output, AttentionRecord(**{name: given[name] if name in given else makers[name]() for name in wanted})


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """The tensor graph, step by step: scores and weights (..., T, S), output (..., T, d_v)."""
    scores = _biased(q @ k.mT * scale, mask)
    if mask.keep is None:
        weights = scores.softmax(-1)
        return scores, weights, ops.dropout(weights, p) @ v
    if not (all_finite(scores) and all_finite(v)):
        return _attend_around_nan(q, k, v, scale, mask, p)
    scores = ops.where(mask.keep, scores, -math.inf)
    seeing = mask.keep.any(-1, keepdims=True)  # (..., T, 1)
    if seeing.all():
        weights = scores.softmax(-1)
        return scores, weights, ops.dropout(weights, p) @ v
    weights = _softmax_of_seeing(scores, seeing)
    # Zero already; the selection keeps an infinite gradient of such a row from becoming 0 * inf further down.
    return scores, weights, ops.where(seeing, ops.dropout(weights, p) @ v, 0)


def _attend_around_nan(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where a number is not finite: it reaches only the queries that may look at it, forward and backward."""
    keep = np.broadcast_to(mask.keep, _scores_shape(q, k, v))
    scores = ops.where(keep, _biased(masked_scores(q, k, keep) * scale, mask), -math.inf)
    # The selection keeps a query's NaN, which its softmax spreads over the row, out of the entries behind the mask.
    weights = ops.where(keep, _softmax_of_seeing(scores, keep.any(-1, keepdims=True)), 0)
    return scores, weights, masked_mix(ops.dropout(weights, p), v, keep)


def _biased(scores: Tensor, mask: Mask) -> Tensor:
    return scores if mask.bias is None else scores + mask.bias.astype(scores.dtype)


def _softmax_of_seeing(scores: Tensor, seeing: Any) -> Tensor:
    """The softmax of the rows that see a key, and 0 for the others, whose scores are all -inf and have no softmax."""
    return ops.where(seeing, ops.where(seeing, scores, 0).softmax(-1), 0)


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or inf.  One sum is cheap; should it overflow, the answer is a safe False."""
    with np.errstate(all="ignore"):
        return math.isfinite(float(np.sum(x.data)))


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """All in float64 if one is, else in float32; integers too."""
    dtype = np.float64 if any(t.dtype == np.float64 for t in tensors) else np.float32
    return [t if t.dtype == dtype else floating(t)[0].astype(dtype) for t in tensors]


def _share_heads(q: Tensor, x: Tensor, name: str) -> Tensor:
    """k or v with fewer heads than q, each repeated for the neighbouring query heads that share it."""
    if q.ndim < 4 or x.ndim < 4 or x.shape[-3] in (1, q.shape[-3]):
        return x
    heads, shared = q.shape[-3], x.shape[-3]
    if shared == 0 or heads % shared:
        raise ValueError(
            f"q has {heads} heads (axis -3 of {q.shape}) and {name} has {shared} ({x.shape}); the second must divide "
            "the first, so that neighbours share"
        )
    *lead, S, d = x.shape
    copies = ops.unsqueeze(x, -3).broadcast_to((*lead, heads // shared, S, d))
    return copies.reshape(*lead[:-1], heads, S, d)


def _scores_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape (..., T, S) of the scores, after all three shapes were checked."""
    shapes = f"q (..., T, d_k) = {q.shape}, k (..., S, d_k) = {k.shape}, v (..., S, d_v) = {v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"attention needs at least two axes: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries and keys differ in width d_k, {q.shape[-1]} and {k.shape[-1]}: {shapes}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"keys and values differ in number S, {k.shape[-2]} and {v.shape[-2]}: {shapes}")
    try:
        np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        raise ValueError(f"the leading axes (batch, heads) do not broadcast: {shapes}") from None
    return (*np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])


def _checked_scale(scale: Any, d_k: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d_k) if d_k else 1.0
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale is a number, got {type(scale).__name__}; multiply q by a tensor to learn the scale")
    return float(scale)


def _checked_need(need: Iterable[str]) -> tuple[str, ...]:
    fields = AttentionRecord._fields
    if isinstance(need, (str, bool)):
        example = need if isinstance(need, str) else "weights"
        raise TypeError(f"need is a tuple of names, got {need!r}; write e.g. need=({example!r},)")
    wanted = tuple(need)
    wrong = [name for name in wanted if name not in fields]
    if wrong:
        raise ValueError(f"need names {wrong[0]!r}; it may name {', '.join(fields)}")
    return wanted
