"""What `AnomalyError` says: who made the NaN or inf, where, of what, and why."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tinygrad_qkv.anomaly_causes import MEANS, OF_NOTHING, SLOPES, Cause, cause_of, overflow
from tinygrad_qkv.autograd import OUTPUT, Node
from tinygrad_qkv.modes import Frame
from tinygrad_qkv.observers import Part
from tinygrad_qkv.records import Line
from tinygrad_qkv.tensor import Tensor

if TYPE_CHECKING:
    from tinygrad_qkv.anomaly_origins import Found

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


class Operand(NamedTuple):
    """An operand as a report calls it."""

    place: int
    values: Any
    who: str
    is_parameter: bool = False

    @classmethod
    def of(cls, place: int, operand: Any, op: str | None = None, line: Line | None = None) -> Operand:
        """Of a Tensor or a number; `op` and `line` say how a tensor without a node was made, where that is known."""
        if not isinstance(operand, Tensor):
            return cls(place, np.asarray(operand), "a number")
        node = operand._node
        if node is not None and (node.parents or node.op != "leaf"):
            op, line = node.op, node.line
        if operand.name:
            kind = "the parameter" if operand.is_leaf and operand.requires_grad else "named"
            return cls(place, operand._data, f"{kind} {operand.name!r}", kind == "the parameter")
        if op:
            return cls(place, operand._data, f"made by op '{op}'" + (f" at {line}" if line else ""))
        kind = "a leaf that requires grad" if operand.requires_grad else "an input or a constant"
        return cls(place, operand._data, kind)


def forward_report(
    op: str, out: Tensor, operands: Sequence[Operand], bad: str, place: tuple[Frame | None, Line | None]
) -> AnomalyError:
    """The error for an op whose result is bad and whose operands are not."""
    y = out._data
    cause = cause_of(op, [np.asarray(o.values) for o in operands], bad)
    if cause is not None:
        i, words = cause.operand, cause.words
        index = _first(cause.where)
    else:
        i, index = _widest(operands, y, bad)
        words = _words_without_cause(op, operands, y, bad)
    rows = [
        ("op", f"{_signature(op, operands, y)}, {_count(y, bad)}"),
        *_place_rows(*place),
        *([("operand", _said(operands[i], index))] if operands else []),
        *_other_operands(operands, i, index, cause),
        ("cause", words),
    ]
    text = _text(f"op '{op}' made {bad} in the forward pass", rows)
    return AnomalyError(
        text, bad=bad, op=op, operand=i, index=index, line=place[1], module=_path(place[0]), cause=words
    )


def leaf_report(operand: Operand, bad: str, where: str, line: Line | None) -> AnomalyError:
    """The error for NaN (or inf) that no op of the block has made: it came in."""
    index = _first_bad(operand.values, bad)
    made = operand.who.startswith("made by")
    words = OF_A_PARAMETER if operand.is_parameter else OUTSIDE if made else "look at how this input was made"
    who = {"a number": f"the number {operand.values}"}.get(operand.who, operand.who)
    rows = [
        ("value", f"{_shape(operand.values)}, {_count(operand.values, bad)}"),
        ("reaches", where),
        *_place_rows(None, line),
        ("cause", words),
    ]
    title = f"{who} holds {bad} already" if not made else f"a tensor {who}, outside of this block, holds {bad}"
    return AnomalyError(_text(title, rows), bad=bad, operand=operand.place, index=index, line=line, cause=words)


def root_report(root: Tensor, bad: str, found: Found | None, carried: Operand | None) -> AnomalyError:
    """The error for a backward pass from a tensor that is bad already."""
    title = f"backward starts from {_kind(root._data)}: the loss itself is not finite"
    facts: dict[str, Any] = {"phase": "forward", "bad": bad}
    if carried is not None:
        return leaf_report(carried, bad, f"the tensor {root!r} that backward starts from", None)
    if found is None:
        rows = [("cause", f"no value that the graph has kept tells which op made it; {OUTSIDE}")]
        return AnomalyError(_text(title, rows), cause=OUTSIDE, **facts)
    node = found.node
    facts |= {"op": node.op, "line": node.line, "module": _path(node.frame)}
    if not node.parents:
        who = f"the parameter {node.name!r}" if node.name and node.requires_grad else _who(node)
        rows = [("culprit", f"{who} {node.shape} holds {bad} already"), *_place_rows(None, node.line)]
        words = OF_A_PARAMETER if node.name and node.requires_grad else "look at how this input was made"
        return AnomalyError(_text(title, [*rows, ("cause", words)]), cause=words, **(facts | {"op": None}))
    arrays = [None if x is None else np.asarray(x) for x in found.operands]
    known = [x for x in arrays if x is not None]
    cause = cause_of(node.op, known, bad) if len(known) == len(arrays) else None
    first = f"op '{node.op}' of shape {node.shape} " + ("made it" if found.certain else "is the first known to hold it")
    rows = [("culprit", first), *_place_rows(node.frame, node.line)]
    if cause is not None:
        index = _first(cause.where)
        facts |= {"operand": cause.operand, "index": index}
        rows.append(("operand", _said(_parent(node, cause.operand, arrays[cause.operand]), index)))
    words = cause.words if cause is not None else OUTSIDE
    return AnomalyError(_text(title, [*rows, ("cause", words)]), cause=words, **facts)


def pass_report(node: Node, bad: str, what: str, g: np.ndarray) -> AnomalyError:
    """The error for a bad gradient that no rule has made: a seed, or what a hook returned."""
    rows = [("at", f"{_who(node)} {node.shape}, {_count(g, bad)}"), *_place_rows(node.frame, node.line)]
    text = _text(f"{what} holds {bad}", rows)
    return AnomalyError(
        text, phase="backward", bad=bad, op=node.op, index=_first_bad(g, bad), line=node.line, module=_path(node.frame)
    )


def backward_report(node: Node, part: Part, inputs: tuple, bad: str) -> AnomalyError:
    """The error for a rule whose gradient was good and whose contribution is not."""
    i, index = part.operand, _first_bad(part.value, bad)
    values = [_kept_operand(node, j) for j in range(len(node.parents))]
    shapes = ", ".join(_node_shape(p) for p in node.parents)
    numbers = _numbers(node, part, inputs, index)
    formula = node.formulas[i] if i < len(node.formulas) else None
    words = SLOPES.get(node.op) or _words_of_rule(inputs, bad, part.value.dtype)
    rows = [
        ("op", f"{node.op}: {shapes} -> {node.shape} {node.dtype}"),
        ("gradient", f"{_shape(part.value)}, {_count(part.value, bad)}"),
        *([("rule", formula)] if formula else []),
        *([("numbers", numbers)] if numbers else []),
        *_place_rows(node.frame, node.line),
        ("operand", _said(_parent(node, i, values[i]), index)),
        *_spoilt_operands(node, values),
        ("cause", words),
    ]
    title = f"the rule of op '{node.op}' for its operand {i} made {bad} in the backward pass"
    facts = {"op": node.op, "operand": i, "index": index, "line": node.line, "module": _path(node.frame)}
    return AnomalyError(_text(title, rows), phase="backward", bad=bad, cause=words, **facts)


def sum_report(node: Node, part: Part, before: np.ndarray, total: np.ndarray, bad: str) -> AnomalyError:
    """The error for finite contributions whose sum is not finite."""
    index, parent = _first_bad(total, bad), part.parent
    here = index if index is not None else ()
    rows = [
        ("gradient", f"of {_who(parent)} {parent.shape} {parent.dtype}, {_count(total, bad)}"),
        ("numbers", f"{before[here]} had arrived, and the rule of op '{node.op}' added {part.value[here]}"),
        *_place_rows(node.frame, node.line),
        ("cause", overflow(total.dtype)),
    ]
    title = f"the sum of the contributions to one gradient overflows to {bad}"
    facts = {"op": node.op, "operand": part.operand, "index": index, "line": node.line, "module": _path(node.frame)}
    return AnomalyError(_text(title, rows), phase="backward", bad=bad, cause=overflow(total.dtype), **facts)


# ---- the words


def _text(title: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([title, *(f"  {name:<9} {words}" for name, words in rows)])


def _place_rows(frame: Frame | None, line: Line | None) -> list[tuple[str, str]]:
    rows = [("module", f"{frame.path or '(the model)'} ({frame.kind})")] if frame is not None else []
    if line is not None:
        source = linecache.getline(line.file, line.number).strip()
        rows.append(("line", f"{line}" + (f":  {source}" if source else "")))
    return rows


def _path(frame: Frame | None) -> str | None:
    return None if frame is None else frame.path


def _kind(values: np.ndarray) -> str:
    return str(values.item()) if values.size == 1 else f"a tensor of shape {values.shape}"


def _shape(values: Any) -> str:
    values = np.asarray(values)
    return f"{values.shape} {values.dtype}" if values.ndim else f"a number of {values.dtype}"


def _node_shape(parent: Any) -> str:
    return f"{parent.shape} {parent.dtype}" if isinstance(parent, Node) else str(parent)


def _signature(op: str, operands: Sequence[Operand], y: np.ndarray) -> str:
    given = ", ".join(str(o.values) if o.who == "a number" else _shape(o.values) for o in operands)
    return f"{op}: {given} -> {_shape(y)}"


def _mask(values: Any, bad: str) -> np.ndarray:
    values = np.asarray(values)
    return np.isnan(values) if bad == "NaN" else np.isposinf(values) if bad == "inf" else np.isneginf(values)


def _count(values: Any, bad: str) -> str:
    mask = _mask(values, bad)
    if mask.size == 1:
        return f"which is {bad}"
    return f"{int(mask.sum())} of {mask.size} elements {bad}, the first at index {_first(mask)}"


def _first(mask: np.ndarray) -> tuple[int, ...] | None:
    mask = np.asarray(mask)
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape)) if mask.any() else None


def _first_bad(values: Any, bad: str) -> tuple[int, ...] | None:
    return _first(_mask(values, bad))


def _said(operand: Operand, index: tuple[int, ...] | None) -> str:
    values = None if operand.values is None else np.asarray(operand.values)
    if values is None or index is None or len(index) != values.ndim:
        return f"operand {operand.place} ({operand.who})"
    at = f" at index {index}" if index else ""
    return f"operand {operand.place} ({operand.who}) is {values[index]!s}{at}"


def _other_operands(
    operands: Sequence[Operand], i: int, index: tuple[int, ...] | None, cause: Cause | None
) -> list[tuple[str, str]]:
    """The other operand of a known cause, at the same place: the 0 above the 0, the inf that inf met."""
    rows = []
    for o in operands:
        values = np.asarray(o.values)
        if cause is not None and o.place != i and index is not None and values.ndim <= len(index):
            own = index[len(index) - values.ndim :]
            own = tuple(0 if n == 1 else k for k, n in zip(own, values.shape, strict=True))
            if all(k < n for k, n in zip(own, values.shape, strict=True)):
                rows.append(("and", _said(o, own)))
    return rows


def _widest(operands: Sequence[Operand], y: np.ndarray, bad: str) -> tuple[int, tuple[int, ...] | None]:
    """The operand with the largest number, and the place of that number."""
    best, place, at = -1.0, 0, None
    for o in operands:
        values = np.abs(np.asarray(o.values, np.float64))
        if values.size and float(np.max(values)) > best:
            best, place, at = float(np.max(values)), o.place, _first(values == np.max(values))
    return place, at


def _words_without_cause(op: str, operands: Sequence[Operand], y: np.ndarray, bad: str) -> str:
    if op in MEANS and (bad == "NaN" or not operands or not np.asarray(operands[0].values).size):
        return OF_NOTHING.format(op=op)
    if any(np.isinf(np.asarray(o.values)).any() for o in operands):
        return "an operand holds inf, and inf - inf, 0 * inf and inf / inf are not numbers"
    return overflow(y.dtype)


def _words_of_rule(inputs: tuple, bad: str, dtype: np.dtype) -> str:
    saved = [x for x in inputs[1:] if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    if any(np.isnan(x).any() for x in saved):
        return "a number that the rule reads was NaN already in the forward pass; run that inside detect_anomaly() too"
    if bad == "NaN" or any(np.isinf(x).any() for x in saved):
        return "a number that the rule reads is inf or 0: 0 * inf, 0 / 0 and inf - inf are not numbers"
    return overflow(dtype)


def _who(node: Node) -> str:
    if node.name:
        return f"the parameter {node.name!r}" if not node.parents and node.requires_grad else f"{node.name!r}"
    if not node.parents:
        return "a leaf that requires grad" if node.requires_grad else "an input or a constant"
    return f"op '{node.op}'"


def _parent(node: Node, i: int, values: Any) -> Operand:
    parent: Any = node.parents[i]
    if not isinstance(parent, Node):
        return Operand(i, np.asarray(parent), "a number")
    if parent.parents and not parent.name:
        return Operand(i, values, f"made by op '{parent.op}'" + (f" at {parent.line}" if parent.line else ""))
    return Operand(i, values, _who(parent))


def _spoilt_operands(node: Node, values: list[Any]) -> list[tuple[str, str]]:
    """The operands that the rule reads and that held NaN or inf in the forward pass."""
    rows = []
    for i, x in enumerate(values):
        if x is not None and not np.isfinite(x).all():
            rows.append(("it reads", _said(_parent(node, i, x), _first(~np.isfinite(x)))))
    return rows


def _kept_operand(node: Node, i: int) -> np.ndarray | None:
    """The values of an operand, if the rule saved it or the record has them."""
    parent = node.parents[i]
    for s in node.saved:
        if isinstance(s, Tensor) and s._node is parent:
            return s._data
    return parent.value if isinstance(parent, Node) else np.asarray(parent)


def _numbers(node: Node, part: Part, inputs: tuple, index: tuple[int, ...] | None) -> str:
    """What the rule read at the bad element: `g = 1.0, y = 0.0`, for inputs that line up with the result."""
    rules: Any = node.pullbacks
    rule = rules[part.operand] if isinstance(rules, tuple) else rules
    try:
        names = list(inspect.signature(rule).parameters)
    except (TypeError, ValueError):
        return ""
    if index is None or part.value.shape != np.shape(inputs[0]):
        return ""
    said = []
    for name, s, value in zip(names, (None, *node.saved), inputs, strict=False):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            said.append(f"{name} = {value}")
        elif isinstance(value, np.ndarray) and value.shape == part.value.shape and value.dtype.kind == "f":
            said.append(f"{name} = {value[index]!s}" + (" (the result)" if s is OUTPUT else ""))
    return "there " + ", ".join(said) if said else ""
