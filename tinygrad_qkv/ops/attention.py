"""Fused attention as one op: scores and weights are never stored, and the pullback computes them again.

It is no public op; `nn.functional.scaled_dot_product_attention` calls it on its fused path.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import OUTPUT, record
from tinygrad_qkv.kernels.attention_rules import FAR, AttentionRules, visible
from tinygrad_qkv.ops.normalisation import softmax, softmax_pullback
from tinygrad_qkv.ops.selection import dropout_by_seed
from tinygrad_qkv.tensor import Tensor


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, rules: AttentionRules
) -> tuple[Tensor, np.ndarray]:
    """softmax(scale * q @ k.T) @ v under `rules`, and the log of each row's sum of exp(scores), a constant (B, H, T).

    q (B, H, T, d_k), k (B, H_kv, S, d_k), v (B, H_kv, S, d_v), bias that broadcasts to (B, H, T, S), sink (H,), all
    of one dtype; rules.bias and rules.sink are taken from those. Memory is linear in T and S; a bias that requires
    grad takes the memory of all scores in the pullback, and so does everything under create_graph.
    """
    rules = rules._replace(bias=_values(bias), sink=_values(sink))
    out, lse = kernels.attention(q._data, k._data, v._data, rules)
    given = tuple(x for x in (bias, sink) if x is not None)
    learned = bias is not None and bias.requires_grad
    saved = (OUTPUT, q, k, v, bias, sink, lse, rules, rules.scale, learned)
    return record(out, "attention", (q, k, v, *given), saved, _pullback, _formulas(*_present(q, k, rules))), lse


def _values(x: Tensor | None) -> np.ndarray | None:
    return None if x is None else x._data


def _pullback(
    g: Any,
    out: Any,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    sink: Any,
    lse: np.ndarray,
    rules: AttentionRules,
    scale: float,
    learned: bool,
) -> tuple[Any, ...]:
    """dq, dk, dv, and dbias and dsink if there are such; dbias is None unless the bias is `learned`."""
    blind = np.isneginf(lse)[..., None]
    if blind.any():  # their gradient may be infinite, and goes nowhere
        g = np.where(blind, 0, g)
    if isinstance(g, Tensor):
        return _composed_pullback(g, q, k, v, bias, sink, lse, rules._replace(scale=scale))
    dq, dk, dv, dbias = kernels.attention_pullback(g, q, k, v, out, lse, rules, learned)
    dsink = () if sink is None else (_sink_pullback(np.sum(g * out, axis=-1), sink, lse),)
    return dq, dk, dv, *(() if bias is None else (dbias,)), *dsink


def _sink_pullback(mean: Any, sink: Any, lse: Any) -> Any:
    """What each head's sink gets: its weight in every row, times minus the row's mean gradient of the weights."""
    return -np.sum(np.exp(sink[:, None] - lse) * mean, axis=(0, 2))


def _composed_pullback(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, lse: np.ndarray, rules: AttentionRules
) -> tuple[Any, ...]:
    """The same from NumPy functions, with all scores in memory, for derivatives of higher order."""
    shared_k, shared_v = per_head(k, q), per_head(v, q)
    raw = rules.scale * (q @ np.swapaxes(shared_k, -1, -2))
    capped = rules.softcap * np.tanh(raw / rules.softcap) if rules.softcap else raw
    scores: Any = capped if bias is None else capped + bias
    seen = visible(rules, lse, k)
    if bias is not None:
        seen = seen & ~np.isneginf(np.asarray(bias._data))
    blind = np.isneginf(lse)[..., None]
    if not seen.all():  # a row without a key gets scores of 0 and, below, weights of 0
        scores = np.where(seen, scores, np.where(blind, 0, -np.inf).astype(q.dtype))
    if sink is None:
        weights: Any = softmax(scores, -1)
    else:
        column = np.broadcast_to(np.reshape(sink, (-1, 1, 1)), (*lse.shape, 1))
        everything = softmax(np.concatenate([scores, column], -1), -1)
        weights, share = everything[..., :-1], everything[..., -1:]
    if blind.any():
        weights = np.where(blind, 0, weights)
    mixed = dropout_by_seed(weights, rules.dropout_p, rules.seed)
    dweights = dropout_by_seed(g @ np.swapaxes(shared_v, -1, -2), rules.dropout_p, rules.seed)
    dscores = softmax_pullback(dweights, weights, -1)
    draw = dscores * rules.scale
    if rules.softcap:
        draw = draw * (1 - (capped / rules.softcap) ** 2)
    dk = per_group(np.swapaxes(draw, -1, -2) @ q, k)
    dv = per_group(np.swapaxes(mixed, -1, -2) @ g, v)
    dsink: tuple = ()
    if sink is not None:
        dsink = (-np.sum(share * np.sum(dweights * weights, axis=-1, keepdims=True), axis=(0, 2, 3)),)
    return draw @ shared_k, dk, dv, *(() if bias is None else (dscores,)), *dsink


def per_head(x: Any, q: Any) -> Any:
    """k or v (B, H_kv, S, d) with a copy for each head of q (B, H, T, d_k) that shares it."""
    copies = q.shape[1] // x.shape[1]
    if copies == 1:
        return x
    B, heads, S, d = x.shape
    return np.reshape(np.broadcast_to(np.expand_dims(x, 2), (B, heads, copies, S, d)), (B, heads * copies, S, d))


def per_group(x: Any, k: Any) -> Any:
    """x (B, H, S, d) summed over the heads that share one of k (B, H_kv, S, d_k)."""
    B, heads, S, d = x.shape
    return x if heads == k.shape[1] else np.sum(np.reshape(x, (B, k.shape[1], -1, S, d)), axis=2)


def _present(q: Tensor, k: Tensor, rules: AttentionRules) -> tuple[bool, ...]:
    """What the formulas have to speak of."""
    near = rules.least > -FAR or rules.most < FAR
    masked = near or not rules.keep is rules.bias is rules.lengths is None
    grouped = q.shape[1] != k.shape[1]
    return grouped, masked, rules.bias is not None, rules.sink is not None, rules.softcap > 0, rules.dropout_p > 0


@functools.cache
def _formulas(grouped: bool, masked: bool, bias: bool, sink: bool, capped: bool, dropped: bool) -> tuple[str, ...]:
    """The rules in words, one for each parent; `rules` holds the masks."""
    K, V = ("per_head(k, q)", "per_head(v, q)") if grouped else ("k", "v")
    S = f"S = scale * q @ {K}.T; " + "S = capped(S, rules); " * capped + "S = S + bias; " * bias
    A = S + ("A = where(visible(rules, lse, k), exp(S - column(lse)), 0); " if masked else "A = exp(S - column(lse)); ")
    mixed = "dropped(A, rules)" if dropped else "A"
    dA = f"dA = g @ {V}.T; " + "dA = dropped(dA, rules); " * dropped
    dS = A + dA + "dS = A * (dA - sum(g * out, -1)); "
    cap = f"dS = dS * cap_slope(scale * q @ {K}.T, rules); " * capped
    dk, dv = "dS.T @ q * scale", f"{mixed}.T @ g"
    if grouped:
        dk, dv = f"per_group({dk}, k)", f"per_group({dv}, v)"
    texts = [dS + cap + f"dq = dS @ {K} * scale", dS + cap + f"dk = {dk}", A + f"dv = {dv}"]
    texts += [dS + "dbias = dS"] * bias
    share = "exp(column(column(sink)) - column(lse))"
    texts += [f"dsink = -reshape(sum({share} * sum(g * out, -1), (0, 2, 3)), (-1,))"] * sink
    return tuple(texts)
