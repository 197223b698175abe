"""Attention as a scalar graph: every multiplication, addition, exp and division is a node of one number.

The smallest engines work like this throughout, and it is how one can follow a single number through attention. A pair
of a query and a key that a mask parts has no node at all, so nothing that stands behind a mask can leak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.nn.fused_path import Terms
from tinygrad_qkv.nn.masks import Mask, MaskWords, keep_and_bias, read
from tinygrad_qkv.tensor import Tensor

LARGEST = 10**6  # nodes: about 8 s and 0.4 GB, and 4 s for their gradients


def scalar(q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: Terms, shape: tuple[int, ...]) -> Tensor:
    """The output (..., T, d_v) for scores of `shape` (..., T, S). ValueError for what it does not take."""
    keep, bias = keep_and_bias(mask, *shape[-2:])
    keep = np.broadcast_to(True if keep is None else keep, shape)
    _refuse(terms, sum(_counts(keep, q.shape[-1], v.shape[-1], bias is not None).values()), q.shape[-1])
    lead = np.broadcast_shapes(shape[:-2], _rows(v, shape[:-2]).shape[:-1])
    if not keep.any() or 0 in (*lead, v.shape[-1]):
        connected: Any = sum(x.sum() for x in (q, k, v, bias) if x is not None)
        return ops.where(np.zeros((*lead, shape[-2], v.shape[-1]), bool), connected, 0)
    weights = _all_weights(q, k, _added(bias, shape, q), terms.scale, keep)
    values, places = _numbers(v), np.broadcast_to(_rows(v, lead), (*lead, shape[-1]))
    of_scores = np.broadcast_to(np.arange(len(weights)).reshape(shape[:-1]), (*lead, shape[-2]))
    seen = [np.flatnonzero(row) for row in keep.reshape(-1, shape[-1])]
    nothing = Tensor(np.zeros(v.shape[-1], v.dtype))
    outputs = []
    for place in np.ndindex(of_scores.shape):
        row = of_scores[place]
        mixed = [values[i] for i in places[place[:-1]][seen[row]]]  # the values that this query sees, (n, d_v)
        outputs.append(ops.stack([_dot(weights[row], column) for column in zip(*mixed)]) if mixed else nothing)  # noqa: B905
    output = ops.stack(outputs)
    return output if not lead else output.reshape(*lead, shape[-2], v.shape[-1])


def attention_node_count(
    shape: tuple[int, ...], d_k: int, d_v: int, *, path: str = "scalar", **masks: Unpack[MaskWords]
) -> dict[str, int]:
    """How many nodes of each op `F.scaled_dot_product_attention` records for scores of `shape` (..., T, S).

    With P pairs of a query and a key that it may look at, R queries that see a key and K keys that are seen, summed
    over batch and heads, the scalar path takes

        mul      P * (d_k + 1 + d_v)                       q_i * k_i, the scale, weight * value
        add      P * (d_k - 1) + (P - R) * (1 + d_v)       sums of the products, of the exps, of the output; a bias: + P
        sub      P                                         the row's largest score, a plain number, so that exp is safe
        exp      P
        div      P                                         exp / sum of the row's exps
        getitem  (R + K) * (d_k + 1) + K * (d_v + 1)       rows of q, k, v, and their numbers
        stack    R + 1                                     the outputs back into rows, and into one tensor

    and 4 reshape where there are leading axes. Without a mask P = T * S, R = T, K = S for each head; with is_causal
    and T <= S, P = T * S - T * (T - 1) / 2. The tensor path takes 5 nodes, with masks up to 4 `where` more; the fused
    path 1, and 4 reshape where the inputs have not four axes. Leaves are not counted. It holds where q, k and v all
    require grad and have the same leading axes, the bias (if any) does not, and all is finite.
    """
    keep, bias = keep_and_bias(read(shape, **masks), *shape[-2:])
    seen = np.broadcast_to(True if keep is None else keep, shape)
    added = bias is not None
    if path == "scalar":
        return _counts(seen, d_k, d_v, added)
    if path == "tensor":
        selections = 0 if keep is None else 1 if seen.any(-1).all() else 4
        counts = {"swapaxes": 1, "matmul": 2, "mul": 1, "add": int(added), "where": selections, "softmax": 1}
    elif path == "fused":
        counts = {"attention": 1, "reshape": 0 if len(shape) == 4 else 4}
    else:
        raise ValueError(f"path is 'scalar', 'tensor' or 'fused', got {path!r}")
    return {op: n for op, n in counts.items() if n}


def _counts(seen: np.ndarray, d_k: int, d_v: int, bias: bool) -> dict[str, int]:
    """The closed form, for `seen` (..., T, S)."""
    P, R, K = (int(np.count_nonzero(x)) for x in (seen, seen.any(-1), seen.any(-2)))
    counts = {
        "mul": P * (d_k + 1 + d_v),
        "add": P * (d_k - 1) + (P - R) * (1 + d_v) + P * bias,
        "sub": P,
        "exp": P,
        "div": P,
        "getitem": (R + K) * (d_k + 1) + K * (d_v + 1),
        "stack": R + 1,
        "reshape": 4 if seen.ndim > 2 else 0,
    }
    return {op: n for op, n in counts.items() if n}


def _refuse(terms: Terms, nodes: int, d_k: int) -> None:
    """ValueError for terms that this path does not take, and for a graph that nobody could look at."""
    for word, given in (("softcap", terms.softcap), ("sink", terms.sink is not None), ("dropout_p", terms.dropout_p)):
        if given:
            raise ValueError(
                f'path="scalar" shows plain attention and takes no {word}=, which its count of nodes has no term for; '
                'leave it out (a layer drops nothing after model.eval()), or use path="tensor"'
            )
    if d_k == 0:
        raise ValueError('path="scalar" makes each score of d_k products, and here d_k is 0; use path="tensor"')
    if nodes > LARGEST:
        raise ValueError(
            f'path="scalar" would make {nodes:,} nodes, one for each number, and stops at {LARGEST:,}; '
            'path="tensor" computes the same with about 5: use it, or a smaller input'
        )


def _all_weights(q: Tensor, k: Tensor, added: Any, scale: float, keep: np.ndarray) -> list[list[Tensor]]:
    """For each query the weights of the keys that it sees."""
    queries, keys = _numbers(q), _numbers(k)
    shape = keep.shape
    q_rows = np.broadcast_to(_rows(q, shape[:-2]), shape[:-1])
    k_rows = np.broadcast_to(_rows(k, shape[:-2]), (*shape[:-2], shape[-1]))
    rows = []
    for place in np.ndindex(shape[:-1]):
        scores = []
        for j in np.flatnonzero(keep[place]):
            score = _dot(queries[q_rows[place]], keys[k_rows[place[:-1]][j]]) * scale
            scores.append(score if added is None else score + added((*place, j)))
        rows.append(_softmax(scores))
    return rows


def _softmax(scores: list[Tensor]) -> list[Tensor]:
    """exp(score) / sum of them all, after the largest was subtracted, which changes nothing but keeps exp small."""
    if not scores:
        return []
    largest = max(score.item() for score in scores)
    exps = [ops.exp(score - largest) for score in scores]
    total = _sum(exps)
    return [e / total for e in exps]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return _sum([x * y for x, y in zip(a, b, strict=True)])


def _sum(terms: list[Tensor]) -> Tensor:
    """From left to right; n terms are n - 1 nodes."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _numbers(x: Tensor) -> list[list[Tensor]]:
    """Every row of x (..., n, d) as d tensors of one number.

    By way of the rows, since each number's gradient is an array as large as what the number was taken from.
    """
    rows = ops.unbind(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
    return [ops.unbind(row) for row in rows]


def _rows(x: Tensor, lead: tuple[int, ...]) -> np.ndarray:
    """(..., n): at each position the number of its row in `_numbers(x)`; fewer heads than `lead` has are repeated."""
    rows = np.arange(math.prod(x.shape[:-1])).reshape(x.shape[:-1])
    if x.ndim > 3 and len(lead) > 1 and x.shape[-3] not in (1, lead[-1]) and lead[-1] % x.shape[-3] == 0:
        rows = np.repeat(rows, lead[-1] // x.shape[-3], axis=-2)
    return rows


def _added(bias: Tensor | None, shape: tuple[int, ...], q: Tensor) -> Any:
    """A function from a place in the scores to what the bias adds there: a number, or a node if it is learnt."""
    if bias is None:
        return None
    bias = bias.astype(q.dtype)
    if not bias.requires_grad:
        values = np.broadcast_to(bias.data, shape)
        return lambda place: float(values[place])
    sizes, made = bias.shape, dict[tuple, Tensor]()

    def at(place: tuple[int, ...]) -> Tensor:
        own = tuple(0 if n == 1 else i for i, n in zip(place[len(place) - len(sizes) :], sizes, strict=True))
        if own not in made:
            made[own] = bias[own]
        return made[own]

    return at
