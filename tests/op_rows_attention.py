"""Rows of the table of ops: fused attention, with each of its rules alone and with all of them."""

from typing import Any

import numpy as np
from op_table import normal, row

from tinygrad_qkv.kernels import dropout
from tinygrad_qkv.ops.attention import AttentionRules, fused_attention

B, H, T, S, D_K, D_V = 2, 6, 5, 7, 3, 11


def call(q: Any, k: Any, v: Any, *more: Any, bias: bool = False, sink: bool = False, **rules: Any) -> Any:
    given = list(more)
    return fused_attention(
        q, k, v, given.pop(0) if bias else None, given.pop(0) if sink else None, AttentionRules(**rules)
    )[0]


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *more: Any, bias: bool = False, sink: bool = False, **given: Any
) -> np.ndarray:
    """The definition with all scores at hand."""
    rules, more = AttentionRules(**given), list(more)
    k, v = (np.repeat(x, H // x.shape[1], 1) for x in (k, v))
    scores = rules.scale * q @ k.swapaxes(-1, -2)
    if rules.softcap:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    if bias:
        scores = scores + more.pop(0)
    seen = np.ones(scores.shape, bool) if rules.keep is None else rules.keep & np.ones(scores.shape, bool)
    if rules.lengths is not None:
        seen &= np.arange(S) < rules.lengths[:, None, None, None]
    if rules.positions is not None or rules.offset:
        places = rules.positions or (np.arange(T)[None] + rules.offset, np.arange(S)[None])
        distance = places[0][:, None, :, None] - places[1][:, None, None, :]
        seen &= (distance >= rules.least) & (distance <= rules.most)
    e = np.where(seen, np.exp(scores), 0)
    total = e.sum(-1, keepdims=True) + (np.exp(more.pop(0))[:, None, None] if sink else 0)
    weights = e / np.where(total > 0, total, 1)
    return (dropout(weights, rules.dropout_p, rules.seed) if rules.dropout_p else weights) @ v


POSITIONS = (np.arange(S - T, S)[None], np.arange(S)[None])
RULES: dict[str, dict] = {
    "plain": {},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "keep": {"keep": np.random.default_rng(1).random((B, 1, T, S)) < 0.6},
    "lengths": {"lengths": np.array([0, 4])},
    "causal": {"positions": POSITIONS, "least": 0},
    "offset": {"offset": S - T, "least": 0},
    "window": {"positions": POSITIONS, "least": -1, "most": 2},
    "dropout": {"dropout_p": 0.3, "seed": 2**63 + 5},
    "bias": {"bias": True},
    "sink": {"sink": True},
}
RULES["all"] = {name: value for rules in RULES.values() for name, value in rules.items()}
ROWS = [
    row(
        "attention",
        (
            normal(B, H, T, D_K),
            normal(B, heads, S, D_K),
            normal(B, heads, S, D_V),
            *([normal(H, 1, S)] if "bias" in rules else []),
            *([normal(H)] if "sink" in rules else []),
        ),
        reference,
        call=call,
        note=f"{name} {heads}",
        **rules,
    )
    for name, rules in RULES.items()
    for heads in ((H, 2) if name in ("plain", "all") else (H,))
]
