"""What `AnomalyError` says: who made the NaN or inf, where, of what, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tinygrad_qkv.anomaly.causes import SLOPES, cause_of, overflow
from tinygrad_qkv.anomaly.text import (
    Operand,
    count,
    first,
    first_bad,
    kept_operand,
    numbers_read,
    operand_of,
    other_operands,
    path_of,
    place_rows,
    said,
    shape_of,
    shape_of_node,
    short,
    signature,
    spoilt_operands,
    text_of,
    who_is,
    widest,
    words_of_rule,
    words_without_cause,
)
from tinygrad_qkv.autograd import Node
from tinygrad_qkv.modes import Frame
from tinygrad_qkv.observers import Part
from tinygrad_qkv.records import Line
from tinygrad_qkv.tensor import Tensor

if TYPE_CHECKING:
    from tinygrad_qkv.anomaly.origins import Found

OUTSIDE = "run the forward pass inside detect_anomaly() too, and the op that made it is named"
OF_A_PARAMETER = (
    "a step of the optimiser wrote it: the learning rate may be too large, or a gradient was not finite; run the steps "
    "before this one under detect_anomaly()"
)


class AnomalyError(FloatingPointError):
    """A NaN or inf was made.

    `phase` is "forward" or "backward", `bad` is "NaN", "inf" or "-inf"; `op`, `operand` (its place), `index`, `line`
    ("file:number") and `module` (its path) say where, `cause` why; each is None where it is unknown or means nothing.
    """

    def __init__(self, message: str, **facts: Any):
        super().__init__(message)
        self.phase: str = facts.get("phase", "forward")
        self.bad: str | None = facts.get("bad")
        self.op: str | None = facts.get("op")
        self.operand: int | None = facts.get("operand")
        self.index: tuple[int, ...] | None = facts.get("index")
        self.line: str | None = None if facts.get("line") is None else str(facts["line"])
        self.module: str | None = facts.get("module")
        self.cause: str | None = facts.get("cause")


def forward_report(
    op: str, out: Tensor, operands: Sequence[Operand], bad: str, place: tuple[Frame | None, Line | None]
) -> AnomalyError:
    """The error for an op whose result is bad and whose operands are not."""
    y = out._data
    cause = cause_of(op, [np.asarray(o.values) for o in operands])
    if cause is not None:
        i, words = cause.operand, cause.words
        index = first(cause.where)
    else:
        i, index = widest(operands)
        words = words_without_cause(op, operands, y, bad)
    words += "".join(f"; {o.who} holds numbers up to {o.largest:.1e}: {OF_A_PARAMETER}" for o in operands if o.is_huge)
    rows = [
        ("op", f"{signature(op, operands, y)}, {count(y, bad)}"),
        *place_rows(*place),
        *([("operand", said(operands[i], index))] if operands else []),
        *other_operands(operands, i, index, cause),
        ("cause", words),
    ]
    text = text_of(f"op '{op}' made {bad} in the forward pass", rows)
    return AnomalyError(
        text, bad=bad, op=op, operand=i, index=index, line=place[1], module=path_of(place[0]), cause=words
    )


def leaf_report(operand: Operand, bad: str, where: str, line: Line | None) -> AnomalyError:
    """The error for NaN (or inf) that no op of the block has made: it came in."""
    index = first_bad(operand.values, bad)
    made = operand.who.startswith("made by")
    words = OF_A_PARAMETER if operand.is_parameter else OUTSIDE if made else "look at how this input was made"
    who = {"a number": f"the number {operand.values}"}.get(operand.who, operand.who)
    rows = [
        ("value", f"{shape_of(operand.values)}, {count(operand.values, bad)}"),
        ("reaches", where),
        *place_rows(None, line),
        ("cause", words),
    ]
    title = f"{who} holds {bad} already" if not made else f"a tensor {who}, outside of this block, holds {bad}"
    return AnomalyError(text_of(title, rows), bad=bad, operand=operand.place, index=index, line=line, cause=words)


def root_report(root: Tensor, bad: str, found: Found | None, carried: Operand | None) -> AnomalyError:
    """The error for a backward pass from a tensor that is bad already."""
    title = f"backward starts from {short(root._data)}: the loss itself is not finite"
    facts: dict[str, Any] = {"phase": "forward", "bad": bad}
    if carried is not None:
        return leaf_report(carried, bad, "the loss that backward starts from", None)
    if found is None:
        rows = [("cause", f"no value that the graph has kept tells which op made it; {OUTSIDE}")]
        return AnomalyError(text_of(title, rows), cause=OUTSIDE, **facts)
    node = found.node
    facts |= {"op": node.op, "line": node.line, "module": path_of(node.frame)}
    if not node.parents:
        rows = [("culprit", f"{who_is(node)} {node.shape} holds {bad} already"), *place_rows(None, node.line)]
        words = OF_A_PARAMETER if node.name and node.requires_grad else "look at how this input was made"
        return AnomalyError(text_of(title, [*rows, ("cause", words)]), cause=words, **(facts | {"op": None}))
    arrays = [None if x is None else np.asarray(x) for x in found.operands]
    known = [x for x in arrays if x is not None]
    cause = cause_of(node.op, known) if len(known) == len(arrays) else None
    what = f"op '{node.op}' of shape {node.shape} " + ("made it" if found.certain else "is the first known to hold it")
    rows = [("culprit", what), *place_rows(node.frame, node.line)]
    if cause is not None:
        index = first(cause.where)
        facts |= {"operand": cause.operand, "index": index}
        rows.append(("operand", said(operand_of(node, cause.operand, arrays[cause.operand]), index)))
    words = cause.words if cause is not None else OUTSIDE
    return AnomalyError(text_of(title, [*rows, ("cause", words)]), cause=words, **facts)


def pass_report(node: Node, bad: str, what: str, g: np.ndarray) -> AnomalyError:
    """The error for a bad gradient that no rule has made: a seed, or what a hook returned."""
    rows = [("at", f"{who_is(node)} {node.shape}, {count(g, bad)}"), *place_rows(node.frame, node.line)]
    text = text_of(f"{what} holds {bad}", rows)
    return AnomalyError(
        text, phase="backward", bad=bad, op=node.op, index=first_bad(g, bad), line=node.line, module=path_of(node.frame)
    )


def backward_report(node: Node, part: Part, inputs: tuple, bad: str) -> AnomalyError:
    """The error for a rule whose gradient was good and whose contribution is not."""
    i, index = part.operand, first_bad(part.value, bad)
    values = [kept_operand(node, j) for j in range(len(node.parents))]
    shapes = ", ".join(shape_of_node(p) for p in node.parents)
    numbers = numbers_read(node, part, inputs, index)
    formula = node.formulas[i] if i < len(node.formulas) else None
    words = SLOPES.get(node.op) or words_of_rule(inputs, bad, part.value.dtype)
    rows = [
        ("op", f"{node.op}: {shapes} -> {node.shape} {node.dtype}"),
        ("gradient", f"{shape_of(part.value)}, {count(part.value, bad)}"),
        *([("rule", formula)] if formula else []),
        *([("numbers", numbers)] if numbers else []),
        *place_rows(node.frame, node.line),
        ("operand", said(operand_of(node, i, values[i]), index)),
        *spoilt_operands(node, values),
        ("cause", words),
    ]
    title = f"the rule of op '{node.op}' for its operand {i} made {bad} in the backward pass"
    facts = {"op": node.op, "operand": i, "index": index, "line": node.line, "module": path_of(node.frame)}
    return AnomalyError(text_of(title, rows), phase="backward", bad=bad, cause=words, **facts)


def sum_report(node: Node, part: Part, before: np.ndarray, total: np.ndarray, bad: str) -> AnomalyError:
    """The error for finite contributions whose sum is not finite."""
    index, parent = first_bad(total, bad), part.parent
    here = index if index is not None else ()
    rows = [
        ("gradient", f"of {who_is(parent)} {parent.shape} {parent.dtype}, {count(total, bad)}"),
        ("numbers", f"{before[here]} had arrived, and the rule of op '{node.op}' added {part.value[here]}"),
        *place_rows(node.frame, node.line),
        ("cause", overflow(total.dtype)),
    ]
    title = f"the sum of the contributions to one gradient overflows to {bad}"
    facts = {"op": node.op, "operand": part.operand, "index": index, "line": node.line, "module": path_of(node.frame)}
    return AnomalyError(text_of(title, rows), phase="backward", bad=bad, cause=overflow(total.dtype), **facts)
