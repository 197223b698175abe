"""Scaled dot-product attention, softmax(Q K^T * scale) V, under one clear contract for masks.

Source: Vaswani et al. 2017, section 3.2.1.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.nn.fused_path import Terms, all_finite, fused, suits
from tinygrad_qkv.nn.masks import Mask, keep_and_bias, read, refuse_unknown
from tinygrad_qkv.nn.scalar_path import scalar
from tinygrad_qkv.observers import observers
from tinygrad_qkv.ops.masked_products import masked_mix, masked_scores
from tinygrad_qkv.ops.operands import floating
from tinygrad_qkv.ops.selection import dropout_by_seed, probability
from tinygrad_qkv.random import dropout_seed
from tinygrad_qkv.tensor import Tensor

PATHS = ("scalar", "tensor", "fused")


class AttentionRecord(NamedTuple):
    """What `need` asked for; the rest is None. All of it is tracked, so a loss may use it.

    weights    (..., T, S) after the softmax and before dropout; rows sum to 1 (less, with a sink), masked ones are 0
    scores     (..., T, S) before the softmax: scaled, capped, with the bias added, -inf where masked
    q, k, v    the queries, keys and values of each head
    logsumexp  (..., T), log of the sum of exp(scores), the sink's included; -inf for a row without a key
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
    window: int | None = None,
    q_positions: Any = None,
    k_positions: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    path: str | None = None,
    need: Iterable[str] = (),
    **unknown: Any,
) -> Any:
    """The values, averaged for each query by how well their keys match it.

    q (..., T, d_k), k (..., S, d_k), v (..., S, d_v) -> (..., T, d_v). Leading axes broadcast; with four or more
    axes, axis -3 holds heads, and k and v may have fewer of them if the count divides (neighbours share).
    The masks are described in `tinygrad_qkv.nn.masks.MaskWords`; they combine, and a key counts where all let it.
    `scale` defaults to 1 / sqrt(d_k). `softcap` c makes the scores c * tanh(scores / c), before bias and masks.
    `sink`, a number for each head (H,), is one more score in every row, whose value is zero: with sinks of 0 the
    weights are exp(scores) / (1 + sum(exp(scores))). `dropout_p` drops weights whenever it is not 0.

    A query that may look at no key gets zeros, and gives zero gradients. What stands behind a mask, NaN and inf
    too, reaches neither output nor gradients.

    `path` chooses how it is computed.  "tensor" is the graph of matmul, scale, mask, softmax and matmul, each a node;
    "fused" is one node, whose kernel never stores the scores: its memory grows with T + S, forward and backward,
    except for a bias that requires grad, under create_graph, and where NaN or inf meet a mask. None takes "fused"
    where it is faster: where T * S >= 1024 and S >= 32, and from T * S >= 256 and S >= 16 on if there is at most a
    causal mask or a window. The two agree within 2e-6 (float32) and 4e-15 (float64) of
    the largest |v|, and so do their gradients, relative to the largest.

    `need`, some of ("weights", "scores", "q", "k", "v", "logsumexp"), makes the call return (output, record); it
    does not change a bit of the output.
    """
    refuse_unknown(unknown, "scale", "softcap", "sink", "dropout_p", "path", "need")
    wanted = _checked_need(need)
    if path is not None and path not in PATHS:
        raise ValueError(f"path is None or one of {PATHS}, got {path!r}")
    q, k, v = _in_one_dtype(ops.tensor(q), ops.tensor(k), ops.tensor(v))
    shape = _scores_shape(q, k, v)
    mask = read(
        shape,
        attend=attend,
        ignore=ignore,
        bias=bias,
        lengths=lengths,
        is_causal=is_causal,
        window=window,
        q_positions=q_positions,
        k_positions=k_positions,
    )
    terms = _terms(shape, q, scale, softcap, sink, dropout_p)
    output: Any = None
    made: Any = None
    with np.errstate(all="ignore"):  # NaN and inf are nothing to warn of behind a mask, and speak for themselves else
        if path == "scalar":
            output = scalar(q, k, v, mask, terms, shape)
        elif path == "fused" or (path is None and suits(shape, mask, terms)):
            output = fused(q, k, v, mask, terms, shape)
        if output is None or not wanted <= {"q", "k", "v"}:
            made = _attend(q, _share_heads(q, k), _share_heads(q, v), mask, terms)
        output = made.mix() if output is None else output
    if not wanted:
        return output
    given = {"q": q, "k": k, "v": v}
    return output, AttentionRecord(**{name: given[name] if name in given else made.get(name) for name in wanted})


def _terms(shape: tuple[int, ...], q: Tensor, scale: Any, softcap: Any, sink: Any, dropout_p: Any) -> Terms:
    """The numbers besides the masks, checked."""
    p = probability(dropout_p)
    if softcap is not None and not (isinstance(softcap, numbers.Real) and 0 < float(softcap) < math.inf):
        raise ValueError(f"softcap is a positive number, got {softcap!r}")
    if sink is not None:
        sink = floating(sink)[0].astype(q.dtype)
        heads = shape[-3] if len(shape) > 3 else 1
        if sink.shape not in ((heads,), ()):
            raise ValueError(f"sink has a number for each head, shape ({heads},), got {sink.shape}")
        sink = sink.broadcast_to((heads,))
    scale = _checked_scale(scale, q.shape[-1])
    return Terms(scale, 0.0 if softcap is None else float(softcap), sink, p, dropout_seed() if p else 0)


class _Graph(NamedTuple):
    """Attention as a tensor graph, its last product still to be made."""

    scores: Tensor  # (..., T, S)
    weights: Tensor  # (..., T, S)
    sink: Tensor | None  # (H, 1), or (1,) where no axis holds heads
    mix: Callable[[], Tensor]  # the output (..., T, d_v)

    def get(self, name: str) -> Tensor:
        """What `need` calls weights, scores or logsumexp."""
        if name == "logsumexp":
            total = ops.logsumexp(self.scores, -1)
            return total if self.sink is None else ops.logaddexp(total, self.sink)
        return self.weights if name == "weights" else self.scores


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms) -> _Graph:
    """The tensor graph, step by step."""
    keep, bias = keep_and_bias(mask, q.shape[-2], k.shape[-2])
    sink = terms.sink if terms.sink is None or q.ndim < 4 else ops.unsqueeze(terms.sink, -1)
    if keep is not None and observers.get() and not (all_finite(q) and all_finite(k)):
        # As below, but before who looks on is told of a product that is thrown away.
        return _attend_around_nan(q, k, v, keep, bias, terms, sink)
    raw = q @ k.mT * terms.scale
    scores = _capped_and_biased(raw, bias, terms)
    if keep is None:
        weights = _softmax(scores, sink)
        return _Graph(scores, weights, sink, lambda: _drop(weights, terms) @ v)
    capped = terms.softcap and not all_finite(raw)  # an infinite product looks finite behind the cap
    if capped or not (all_finite(scores) and all_finite(v)):
        return _attend_around_nan(q, k, v, keep, bias, terms, sink)
    scores = ops.where(keep, scores, -math.inf)
    seeing = keep.any(-1, keepdims=True)  # (..., T, 1)
    if seeing.all():
        weights = _softmax(scores, sink)
        return _Graph(scores, weights, sink, lambda: _drop(weights, terms) @ v)
    weights = _softmax_of_seeing(scores, seeing, sink)
    # Zero already; the selection keeps an infinite gradient of such a row from becoming 0 * inf further down.
    return _Graph(scores, weights, sink, lambda: ops.where(seeing, _drop(weights, terms) @ v, 0))


def _attend_around_nan(
    q: Tensor, k: Tensor, v: Tensor, keep: np.ndarray, bias: Tensor | None, terms: Terms, sink: Tensor | None
) -> _Graph:
    """The same where a number is not finite: it reaches only the queries that may look at it, forward and backward."""
    keep = np.broadcast_to(keep, _scores_shape(q, k, v))
    scores = _capped_and_biased(masked_scores(q, k, keep) * terms.scale, bias, terms)
    scores = ops.where(keep, scores, -math.inf)
    # The selection keeps a query's NaN, which its softmax spreads over the row, out of the entries behind the mask.
    weights = ops.where(keep, _softmax_of_seeing(scores, keep.any(-1, keepdims=True), sink), 0)
    return _Graph(scores, weights, sink, lambda: masked_mix(_drop(weights, terms), v, keep))


def _capped_and_biased(scores: Tensor, bias: Tensor | None, terms: Terms) -> Tensor:
    if terms.softcap:
        scores = (scores / terms.softcap).tanh() * terms.softcap
    return scores if bias is None else scores + bias.astype(scores.dtype)


def _drop(weights: Tensor, terms: Terms) -> Tensor:
    return dropout_by_seed(weights, terms.dropout_p, terms.seed)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """exp(scores) / sum(exp(scores)); the sink (H, 1) is one more term of the sum."""
    if sink is None:
        return scores.softmax(-1)
    column = ops.unsqueeze(sink, -1).broadcast_to((*scores.shape[:-1], 1))
    return ops.cat([scores, column], -1).softmax(-1)[..., :-1]


def _softmax_of_seeing(scores: Tensor, seeing: Any, sink: Tensor | None) -> Tensor:
    """The softmax of the rows that see a key, and 0 for the others, whose scores are all -inf and have no softmax."""
    return ops.where(seeing, _softmax(ops.where(seeing, scores, 0), sink), 0)


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """All in float64 if one is, else in float32; integers too."""
    dtype = np.float64 if any(t.dtype == np.float64 for t in tensors) else np.float32
    return [t if t.dtype == dtype else floating(t)[0].astype(dtype) for t in tensors]


def _share_heads(q: Tensor, x: Tensor) -> Tensor:
    """k or v with fewer heads than q, each repeated for the neighbouring query heads that share it."""
    if q.ndim < 4 or x.ndim < 4 or x.shape[-3] in (1, q.shape[-3]):
        return x
    *lead, heads, S, d = x.shape
    copies = ops.unsqueeze(x, -3).broadcast_to((*lead, heads, q.shape[-3] // heads, S, d))
    return copies.reshape(*lead, q.shape[-3], S, d)


def _leading(q: Tensor, x: Tensor, name: str) -> tuple[int, ...]:
    """The leading axes of k or v, with q's heads where those share x's."""
    if q.ndim < 4 or x.ndim < 4 or x.shape[-3] in (1, q.shape[-3]):
        return x.shape[:-2]
    heads, shared = q.shape[-3], x.shape[-3]
    if shared == 0 or heads % shared:
        raise ValueError(
            f"q has {heads} heads (axis -3 of {q.shape}) and {name} has {shared} ({x.shape}); the second must divide "
            "the first, so that neighbours share"
        )
    return (*x.shape[:-3], heads)


def _scores_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape (..., T, S) of the scores, after all three shapes were checked."""
    shapes = f"q (..., T, d_k) = {q.shape}, k (..., S, d_k) = {k.shape}, v (..., S, d_v) = {v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(f"attention needs at least two axes: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries and keys differ in width d_k, {q.shape[-1]} and {k.shape[-1]}: {shapes}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"keys and values differ in number S, {k.shape[-2]} and {v.shape[-2]}: {shapes}")
    k_lead, v_lead = _leading(q, k, "k"), _leading(q, v, "v")
    if q.shape[:-2] == k_lead == v_lead:  # nearly always; NumPy takes 3 us to say so
        return (*k_lead, q.shape[-2], k.shape[-2])
    try:
        np.broadcast_shapes(q.shape[:-2], k_lead, v_lead)
    except ValueError:
        raise ValueError(f"the leading axes (batch, heads) do not broadcast: {shapes}") from None
    return (*np.broadcast_shapes(q.shape[:-2], k_lead), q.shape[-2], k.shape[-2])


def _checked_scale(scale: Any, d_k: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d_k) if d_k else 1.0
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale is a number, got {type(scale).__name__}; multiply q by a tensor to learn the scale")
    if not math.isfinite(scale):
        raise ValueError(f"scale is a finite number, got {scale}")
    return float(scale)


def _checked_need(need: Iterable[str]) -> set[str]:
    fields = AttentionRecord._fields
    if isinstance(need, (str, bool)):
        example = need if isinstance(need, str) else "weights"
        raise TypeError(f"need is a tuple of names, got {need!r}; write e.g. need=({example!r},)")
    wanted = tuple(need)
    wrong = [name for name in wanted if name not in fields]
    if wrong:
        raise ValueError(f"need names {wrong[0]!r}; it may name {', '.join(fields)}")
    return set(wanted)
