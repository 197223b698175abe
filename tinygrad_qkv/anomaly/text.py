"""The words of a report: operands, shapes, places and numbers."""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.anomaly.causes import MEANS, OF_NOTHING, Cause, overflow
from tinygrad_qkv.autograd import OUTPUT, Node
from tinygrad_qkv.modes import Frame
from tinygrad_qkv.observers import Part
from tinygrad_qkv.records import Line
from tinygrad_qkv.tensor import Tensor

WIDTH = 78
HUGE = 1e6
_WRAP: dict[str, Any] = {"subsequent_indent": " " * 12, "break_long_words": False, "break_on_hyphens": False}


class Operand(NamedTuple):
    """An operand as a report calls it."""

    place: int
    values: Any
    who: str
    is_parameter: bool = False

    @property
    def largest(self) -> float:
        """Its largest absolute value."""
        return float(np.max(np.abs(self.values), initial=0.0))

    @property
    def is_huge(self) -> bool:
        """Whether it is a parameter that has grown far beyond what training makes."""
        return self.is_parameter and self.largest > HUGE

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
        parent: Any = node.parents[0] if op == "swapaxes" and node is not None and node.parents else None
        if isinstance(parent, Node) and parent.name and parent.is_leaf and parent.requires_grad:
            return cls(place, operand._data, f"the parameter {parent.name!r} (transposed)", True)
        if op:
            return cls(place, operand._data, f"made by op '{op}'" + (f" at {line}" if line else ""))
        kind = "a leaf that requires grad" if operand.requires_grad else "an input or a constant"
        return cls(place, operand._data, kind)


def text_of(title: str, rows: list[tuple[str, str]]) -> str:
    """The title, and a line for each row, wrapped but for source code."""
    lines = textwrap.wrap(title, WIDTH, **_WRAP)
    for name, words in rows:
        start = f"  {name:<9} "
        whole = name == "" or len(start + words) <= WIDTH
        lines += [start + words] if whole else textwrap.wrap(words, WIDTH, initial_indent=start, **_WRAP)
    return "\n".join(lines)


def place_rows(frame: Frame | None, line: Line | None) -> list[tuple[str, str]]:
    """The module and the line of an op, as rows of a report."""
    rows = [("module", f"{frame.path or '(the model)'} ({frame.kind})")] if frame is not None else []
    if line is not None:
        source = linecache.getline(line.file, line.number).strip()
        rows += [("line", str(line)), *([("", source)] if source else [])]
    return rows


def path_of(frame: Frame | None) -> str | None:
    """The path of a module call, None outside of modules."""
    return None if frame is None else frame.path


def short(values: np.ndarray) -> str:
    """A single number, or the shape of many."""
    return str(values.item()) if values.size == 1 else f"a tensor of shape {values.shape}"


def shape_of(values: Any) -> str:
    """Shape and dtype."""
    values = np.asarray(values)
    return f"{values.shape} {values.dtype}" if values.ndim else f"a number of {values.dtype}"


def shape_of_node(parent: Any) -> str:
    """Shape and dtype of a parent, or the number that it is."""
    return f"{parent.shape} {parent.dtype}" if isinstance(parent, Node) else str(parent)


def signature(op: str, operands: Sequence[Operand], y: np.ndarray) -> str:
    """`div: (2, 3) float32, 0.0 -> (2, 3) float32`."""
    given = ", ".join(str(o.values) if o.who == "a number" else shape_of(o.values) for o in operands)
    return f"{op}: {given} -> {shape_of(y)}"


def _mask(values: Any, bad: str) -> np.ndarray:
    values = np.asarray(values)
    return np.isnan(values) if bad == "NaN" else np.isposinf(values) if bad == "inf" else np.isneginf(values)


def count(values: Any, bad: str) -> str:
    """How many elements are bad, and where the first one is."""
    mask = _mask(values, bad)
    if mask.size == 1:
        return f"which is {bad}"
    return f"{int(mask.sum())} of {mask.size} elements {bad}, the first at index {first(mask)}"


def first(mask: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True; None if there is none."""
    mask = np.asarray(mask)
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape)) if mask.any() else None


def first_bad(values: Any, bad: str) -> tuple[int, ...] | None:
    """The index of the first bad element; None if there is none."""
    return first(_mask(values, bad))


def said(operand: Operand, index: tuple[int, ...] | None) -> str:
    """An operand with its number at an index."""
    values = None if operand.values is None else np.asarray(operand.values)
    if values is None or index is None or len(index) != values.ndim:
        return f"operand {operand.place} ({operand.who})"
    at = f" at index {index}" if index else ""
    return f"operand {operand.place} ({operand.who}) is {values[index]!s}{at}"


def other_operands(
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
                rows.append(("and", said(o, own)))
    return rows


def widest(operands: Sequence[Operand]) -> tuple[int, tuple[int, ...] | None]:
    """The operand with the largest number, and the place of that number."""
    best, place, at = -1.0, 0, None
    for o in operands:
        values = np.abs(np.asarray(o.values, np.float64))
        if values.size and float(np.max(values)) > best:
            best, place, at = float(np.max(values)), o.place, first(values == np.max(values))
    return place, at


def words_without_cause(op: str, operands: Sequence[Operand], y: np.ndarray, bad: str) -> str:
    """The cause, where the table of causes knows none."""
    if op in MEANS and (bad == "NaN" or not operands or not np.asarray(operands[0].values).size):
        return OF_NOTHING.format(op=op)
    if any(np.isinf(np.asarray(o.values)).any() for o in operands):
        return "an operand holds inf, and inf - inf, 0 * inf and inf / inf are not numbers"
    return overflow(y.dtype)


def words_of_rule(inputs: tuple, bad: str, dtype: np.dtype) -> str:
    """The cause, where the rule is none of those whose slope is known to be infinite somewhere."""
    saved = [x for x in inputs[1:] if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    if any(np.isnan(x).any() for x in saved):
        return "a number that the rule reads was NaN already in the forward pass; run that inside detect_anomaly() too"
    if bad == "NaN" or any(np.isinf(x).any() for x in saved):
        return "a number that the rule reads is inf or 0: 0 * inf, 0 / 0 and inf - inf are not numbers"
    return overflow(dtype)


def who_is(node: Node) -> str:
    """A node as a report calls it."""
    if node.name:
        return f"the parameter {node.name!r}" if not node.parents and node.requires_grad else f"{node.name!r}"
    if not node.parents:
        return "a leaf that requires grad" if node.requires_grad else "an input or a constant"
    return f"op '{node.op}'"


def operand_of(node: Node, i: int, values: Any) -> Operand:
    """Operand i of a node, with its values where they are known."""
    parent: Any = node.parents[i]
    if not isinstance(parent, Node):
        return Operand(i, np.asarray(parent), "a number")
    if parent.parents and not parent.name:
        return Operand(i, values, f"made by op '{parent.op}'" + (f" at {parent.line}" if parent.line else ""))
    return Operand(i, values, who_is(parent))


def spoilt_operands(node: Node, values: list[Any]) -> list[tuple[str, str]]:
    """The operands that the rule reads and that held NaN or inf in the forward pass."""
    rows = []
    for i, x in enumerate(values):
        if x is not None and not np.isfinite(x).all():
            rows.append(("it reads", said(operand_of(node, i, x), first(~np.isfinite(x)))))
    return rows


def kept_operand(node: Node, i: int) -> np.ndarray | None:
    """The values of an operand, if the rule saved it or the record has them."""
    parent = node.parents[i]
    for s in node.saved:
        if isinstance(s, Tensor) and s._node is parent:
            return s._data
    return parent.value if isinstance(parent, Node) else np.asarray(parent)


def numbers_read(node: Node, part: Part, inputs: tuple, index: tuple[int, ...] | None) -> str:
    """What the rule read at the bad element: `g = 1.0, y = 0.0`, for inputs that line up with the result."""
    rules: Any = node.pullbacks
    rule = rules[part.operand] if isinstance(rules, tuple) else rules
    try:
        names = list(inspect.signature(rule).parameters)
    except (TypeError, ValueError):
        return ""
    if index is None or part.value.shape != np.shape(inputs[0]):
        return ""
    found = []
    for name, s, value in zip(names, (None, *node.saved), inputs, strict=False):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(f"{name} = {value}")
        elif isinstance(value, np.ndarray) and value.shape == part.value.shape and value.dtype.kind == "f":
            found.append(f"{name} = {value[index]!s}" + (" (the result)" if s is OUTPUT else ""))
    return "there " + ", ".join(found) if found else ""
