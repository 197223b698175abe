"""Where in a finished graph the first NaN or inf stands, as far as the values that it has kept tell."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.anomaly.causes import INFINITE, cause_of
from tinygrad_qkv.autograd import OUTPUT, Node, ancestry
from tinygrad_qkv.tensor import Tensor


class Found(NamedTuple):
    """The earliest node whose result is bad; `certain` if all that it was made of is known to be good."""

    node: Node
    values: np.ndarray | None  # None where only the operands are known, and say enough
    operands: list[Any]  # arrays, numbers, or None for what was not kept
    certain: bool


def kept_values(nodes: list[Node]) -> dict[Node, np.ndarray]:
    """The values of nodes that the graph still holds: saved for a rule, or kept by `recording()`."""
    values: dict[Node, np.ndarray] = {}
    for node in nodes:
        for s in node.saved:
            if isinstance(s, Tensor) and s._node is not None:
                values[s._node] = s._data
        if node.saved and node.saved[0] is OUTPUT and node.output is not None:
            values[node] = node.output
    values.update((node, node.value) for node in nodes if node.value is not None)
    return values


def first_bad_value(root: Node | None, bad: str) -> Found | None:
    """The earliest ancestor of `root` that holds `bad` ("NaN" or "inf"), or whose operands show that it must."""
    if root is None:
        return None
    is_bad = np.isnan if bad == "NaN" else lambda x: ~np.isfinite(x)
    order = ancestry([root])
    values = kept_values(order)
    for node in reversed(order):
        operands = [values.get(p) if isinstance(p, Node) else p for p in node.parents]
        known = values.get(node)
        if known is not None:
            if known.dtype.kind == "f" and is_bad(known).any():
                clean = all(x is not None and not is_bad(np.asarray(x)).any() for x in operands)
                return Found(node, known, operands, clean)
        elif operands and all(x is not None for x in operands):
            cause = cause_of(node.op, [np.asarray(x) for x in operands])
            if cause is not None and cause.sure and (bad != "NaN" or cause.words not in INFINITE):
                return Found(node, None, operands, True)
    return None
