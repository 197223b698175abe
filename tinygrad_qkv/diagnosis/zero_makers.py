"""Why one op lets no gradient through, and why one value is 0: what a check has to know about single ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.autograd import Node
from tinygrad_qkv.diagnosis.evidence import Evidence, most
from tinygrad_qkv.kernels.attention_rules import visible

SATURATED = 1e-4  # the median over rows of sum p (1 - p), which is what a softmax multiplies a gradient by
EQUAL = 1e-5  # the spread of what a softmax is told, beside its size
SHAPES = {"reshape", "swapaxes", "permute", "getitem", "broadcast_to", "unsqueeze", "squeeze", "expand", "clone"}
SHAPES |= {"astype", "neg", "transpose", "flatten", "identity", "split_heads", "merge_heads"}
NORMS = {"layer_norm", "rms_norm"}
PRODUCTS = {"matmul", "affine", "mul", "masked_scores", "masked_mix", "einsum", "dot"}
FLAT = {"tanh", "sigmoid", "gelu", "silu", "softplus", "erf"}


class Maker(NamedTuple):
    """A reason, in the fields of a finding."""

    reason: str
    words: str
    advice: str = ""
    numbers: dict[str, float] = {}  # noqa: RUF012, never changed
    harmless: bool = False


def why_zero_gradient(e: Evidence, node: Node, i: int) -> list[Maker]:
    """Why the rule of `node` gave nothing but zeros to operand i, of a gradient that was not 0."""
    by_op: dict[str, Callable[[], list[Maker]]] = {
        "relu": lambda: [_dead_relu(e, node)],
        "dropout": lambda: [_dropped(e, node)],
        "where": lambda: [_unselected(e, node, i)],
        "softmax": lambda: softmax_reason(e, node),
        "attention": lambda: _in_attention(e, node, i),
        "sign": lambda: [Maker("step function", f"{e.where(node)} is a step, and its slope is 0.")],
        "cross_entropy": lambda: [_ignored(e, node)],
        "square": lambda: _at_the_lowest_point(e, node),
        "abs": lambda: _at_the_lowest_point(e, node),
        "pow": lambda: _at_the_lowest_point(e, node),
        "clip": lambda: [_clipped(e, node)],
        "checkpoint": lambda: [_inside(e, node)],
        "maximum": lambda: [_never_chosen(e, node)],
        "minimum": lambda: [_never_chosen(e, node)],
    }
    found = by_op[node.op]() if node.op in by_op else []
    if not found and node.op in PRODUCTS | NORMS:
        found = _zero_factor(e, node, i)
    if not found and node.op in FLAT:
        y = e.value(node)
        size = "" if y is None else f" (its results lie between {y.min():.4g} and {y.max():.4g})"
        words = f"{e.where(node)} is flat at all of its inputs{size}."
        found = [Maker("saturated activation", words, "Make its inputs smaller: a smaller start, or a norm before it.")]
    return found or [_flat(e, node)]


def _flat(e: Evidence, node: Node) -> Maker:
    if any(0 in parent.shape for parent in node.parents if isinstance(parent, Node)):
        return Maker("no elements", f"{e.where(node)} is of no elements.", "Is this batch empty?")
    size = most(e.g[node])
    given = f"{e.where(node)} gave 0 for a gradient of up to {size:.1e}"
    if size < math.sqrt(np.finfo(node.dtype).tiny):
        words = f"{given}: below what {node.dtype} holds."
        return Maker("underflow", words, "Scale the loss, or compute in float64.", {"gradient": size})
    words = f"{given}: its slope is 0 at all of its inputs, or too small for {node.dtype}."
    return Maker("flat", words, "Look at its inputs: are they too large, or too small?", {"gradient": size})


def _inside(e: Evidence, node: Node) -> Maker:
    words = f"An op inside of {e.where(node)} lets nothing through."
    return Maker("inside a checkpoint", words, "Call the function without checkpoint() to see which.")


def _clipped(e: Evidence, node: Node) -> Maker:
    words = f"All inputs of {e.where(node)} lie outside of its bounds, where its slope is 0."
    return Maker("clipped", words, "Look at the bounds, and at the size of the inputs.")


def _never_chosen(e: Evidence, node: Node) -> Maker:
    words = f"{e.where(node)} takes the other operand for every element that carries a gradient."
    return Maker("never chosen", words, "Look at the sizes of its two operands.")


def _dead_relu(e: Evidence, node: Node) -> Maker:
    words = f"{e.where(node)} is 0 for every input of this batch: all of its units are dead (fraction 1)."
    return Maker("dead relu", words, "Lower the learning rate, start biases at 0, or use gelu.", {"fraction": 1.0})


def _dropped(e: Evidence, node: Node) -> Maker:
    p = float(node.saved[0])
    if p == 1:
        return Maker("dropout 1", f"{e.where(node)} has p = 1 and drops everything.", "Use p below 1.", {"p": p})
    return Maker(
        "dropped", f"{e.where(node)} has dropped all that carries a gradient in this pass.", "", {"p": p}, True
    )


def _ignored(e: Evidence, node: Node) -> Maker:
    words = f"All targets of {e.where(node)} have the ignored class, so the loss is 0 and teaches nothing."
    return Maker("targets ignored", words, "Look at the targets of this batch, and at ignore_index.")


def _at_the_lowest_point(e: Evidence, node: Node) -> list[Maker]:
    x = e.value(node.parents[0])
    if x is None or np.any(x):
        return []
    words = f"All inputs of {e.where(node)} are 0, where it is lowest and has the slope 0."
    return [Maker("at the minimum", words, "There is nothing to gain here; try another batch.", {}, True)]


def _masked(e: Evidence, node: Node) -> Maker:
    words = f"The mask of {e.where(node)} lets no query look at any key, so its output and gradients are 0."
    return Maker("masked everywhere", words, "attend= is True where a query may look, ignore= where it may not.")


def _unselected(e: Evidence, node: Node, i: int) -> Maker:
    of_scores = any(child.op == "softmax" for child, _ in e.uses.get(node, ()))
    if i == 0 and (of_scores or _mixes(node.parents[0])):
        return _masked(e, node)
    words = f"It stands in the branch of {e.where(node)} that is selected for no element."
    return Maker("unselected branch", words, "Look at the condition.")


def _mixes(node: Any) -> bool:
    """Whether a node is attention's product of weights and values."""
    if not isinstance(node, Node) or node.op not in ("matmul", "masked_mix"):
        return False
    weights: Any = node.parents[0]
    while isinstance(weights, Node) and weights.op in ("where", "dropout", "getitem"):
        weights = weights.parents[0]
    return isinstance(weights, Node) and weights.op == "softmax"


def _zero_factor(e: Evidence, node: Node, i: int) -> list[Maker]:
    """The other factor of a product is 0; why?"""
    others = [j for j in range(min(len(node.parents), 2)) if j != i]
    for j in others:
        value = e.value(node.parents[j])
        if value is not None and value.size and not np.any(value):
            return [why_zero_value(e, node.parents[j], node)]
    return []


def why_zero_value(e: Evidence, node: Any, product: Node) -> Maker:
    """Why a factor of `product` is 0: followed back to the op, the parameter or the input that makes it so."""
    while isinstance(node, Node) and node.parents:
        if node.op == "relu":
            return _dead_relu(e, node)
        if node.op == "dropout" and node.saved[0] == 1:
            return _dropped(e, node)
        if node.op == "where" and not np.any(node.saved[0]):
            return _unselected(e, node, 0)
        if node.op == "attention" and (closed := _closed(e, node)):
            return closed[0]
        values = [e.value(p) for p in node.parents]
        zeros = [p for p, x in zip(node.parents, values, strict=True) if x is not None and x.size and not np.any(x)]
        if node.op == "attention" and node.parents[2] in zeros:
            node = node.parents[2]
        elif node.op in PRODUCTS and zeros:
            node = zeros[0] if node.op != "affine" or zeros[0] in node.parents[:2] else None
        elif node.op in SHAPES and zeros:
            node = zeros[0]
        else:
            break
    if isinstance(node, Node) and node in e.names:
        return _zero_parameter(e, node, product)
    words = f"It is multiplied by 0 in {e.where(product)}."
    if isinstance(node, Node) and not node.parents:
        return Maker("zero input", f"{words} The 0 is an input or a constant.", "Look at the data of this batch.")
    return Maker("multiplied by 0", words, "Look for the factor that is 0.")


def _zero_parameter(e: Evidence, node: Node, product: Node) -> Maker:
    other, g = e.names[node], e.gradients.get(e.names[node])
    if g is not None and np.any(g):
        words = f"It is multiplied by {other} in {e.where(product)}, which is 0; {other} gets a gradient itself."
        return Maker("zero factor", words, f"It begins to learn when {other} has moved, after one step.", {}, True)
    words = (
        f"It is multiplied by {other} in {e.where(product)}, which is 0 and gets no gradient either: each waits for "
        "the other, and both stay where they are (a saddle)."
    )
    return Maker("saddle", words, "Start at least one of the two at random values.")


def softmax_reason(e: Evidence, node: Node) -> list[Maker]:
    """Whether a softmax (or attention) lets nothing through because it is saturated, or is told the same everywhere."""
    known = _weights_of(node) if node.op == "attention" else _weights_at(e, node)
    if known is None:
        return []
    weights, seen = known
    choosing = np.sum(seen, axis=-1) > 1  # rows with a choice
    if not choosing.any():
        return [Maker("one key", f"In {e.where(node)} no query sees more than one key: there is nothing to choose.")]
    rows = weights[choosing]
    slope, largest = float(np.median(np.sum(rows * (1 - rows), axis=-1))), float(np.median(np.max(rows, axis=-1)))
    numbers = {"max weight": largest, "sum p(1-p)": slope}
    if slope < SATURATED:
        words = (
            f"{e.where(node)} is saturated: in the middle row the largest weight is {largest:.6f}, and sum p (1 - p), "
            f"which a gradient is multiplied by, {slope:.1e}."
        )
        advice = "Make the scores smaller: scale 1 / sqrt(d_k), smaller W_Q and W_K, or a norm on q and k."
        return [Maker("saturated softmax", words, advice, numbers)]
    if _is_told_the_same(e, node, weights):
        if node.op == "softmax" and not _leads_to_values(e, node):
            words = (
                f"{e.where(node)} is told the same for all numbers of a row, as when they are summed: the sum is 1 "
                "whatever its input is, so that nothing before it can learn."
            )
            return [Maker("constant branch", words, "Choose one class of each row, or weigh them.", numbers)]
        words = (
            f"{e.where(node)} is told the same for all keys of a row, because their values are equal: no look is "
            "better than another, so W_Q and W_K cannot learn, while W_V can."
        )
        return [Maker("equal values", words, "Are all tokens of the input equal?", numbers)]
    return []


def _weights_at(e: Evidence, node: Node) -> tuple[np.ndarray, np.ndarray] | None:
    """The weights of a softmax over the last axis, and which of its scores are no -inf."""
    weights, scores = e.value(node), e.value(node.parents[0])
    if weights is None or not weights.ndim:
        return None
    return weights, np.ones(weights.shape, bool) if scores is None else ~np.isneginf(scores)


def _leads_to_values(e: Evidence, node: Node) -> bool:
    """Whether the results of a softmax mix values, as weights of attention do."""
    return any(
        child.op in ("matmul", "masked_mix", "einsum") for child, _ in e.after(node, through={"where", "dropout"})
    )


def _is_told_the_same(e: Evidence, node: Node, weights: np.ndarray) -> bool:
    """Whether the gradient of the weights is one number in each row, or the values of attention are one vector."""
    if node.op == "attention":
        v = node.saved[3]._data
        return bool(np.any(v)) and most(v - v.mean(-2, keepdims=True)) <= EQUAL * most(v)
    g = e.g.get(node)
    if g is None or not np.any(g):
        return False
    mean = np.sum(g * weights, axis=-1, keepdims=True)
    return most((g - mean) * (weights > 0)) <= EQUAL * most(g)


def _in_attention(e: Evidence, node: Node, i: int) -> list[Maker]:
    if closed := _closed(e, node):
        return closed
    _, q, k, *_ = node.saved
    if i in (0, 1) and not np.any((k, q)[i]._data):
        return [why_zero_value(e, node.parents[1 - i], node)]
    if i < 2 and not np.any(node.saved[3]._data):
        return [why_zero_value(e, node.parents[2], node)]
    return softmax_reason(e, node) if i < 2 else []


def _closed(e: Evidence, node: Node) -> list[Maker]:
    """Whether fused attention lets nothing through at all."""
    lse, rules = node.saved[6:8]
    if np.isneginf(lse).all():
        return [_masked(e, node)]
    if rules.dropout_p == 1:
        return [Maker("dropout 1", f"{e.where(node)} has dropout p = 1 and drops every weight.", "Use p below 1.")]
    return []


def _weights_of(node: Node) -> tuple[np.ndarray, np.ndarray]:
    """The weights (B, H, T, S) of fused attention, again from what it saved, and which keys a query sees."""
    _, q, k, _, bias, sink, lse, rules, scale, _ = node.saved
    keys = np.repeat(k._data, q.shape[1] // k.shape[1], axis=1)
    scores = scale * (q._data @ np.swapaxes(keys, -1, -2))
    if rules.softcap:
        scores = rules.softcap * np.tanh(scores / rules.softcap)
    scores = scores if bias is None else scores + bias._data
    seen = visible(rules, lse, k._data) & ~np.isneginf(scores)
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(np.max(scores, axis=-1, keepdims=True), -np.finfo(scores.dtype).max)  # lse is not exact enough
    e = np.exp(scores - top)
    total = np.sum(e, axis=-1, keepdims=True) + (0 if sink is None else np.exp(sink._data[:, None, None] - top))
    return e / np.where(total > 0, total, 1), seen
