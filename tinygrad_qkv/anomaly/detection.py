"""The first culprit: `with detect_anomaly():` stops at the first op or rule that makes a NaN or an inf."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.anomaly.origins import first_bad_value
from tinygrad_qkv.anomaly.report import (
    backward_report,
    forward_report,
    leaf_report,
    pass_report,
    root_report,
    sum_report,
)
from tinygrad_qkv.anomaly.text import Operand
from tinygrad_qkv.autograd import Node
from tinygrad_qkv.hooks import pass_notes
from tinygrad_qkv.modes import module_frame
from tinygrad_qkv.observers import Observer, Part, Watch
from tinygrad_qkv.records import Line, user_line
from tinygrad_qkv.tensor import Tensor


class _Made(NamedTuple):
    """How a tensor came to be inside the block; `carried` is what brought NaN into it."""

    tensor: weakref.ref[Tensor]
    op: str
    line: Line | None
    carried: Operand | None


class detect_anomaly(Watch):  # noqa: N801, named like the functions beside it
    """Raise `AnomalyError` at the first op, forward or backward, that makes a NaN or an inf of numbers that were none.

    A `with` block, or a decorator. The error names the op (or its rule), shapes, the module, the user's line, the
    operand with its value and place, and the usual cause; all `.grad`s and the graph are then as they were. A loss
    that is NaN does not pass, also when only its backward runs inside; which op made it then depends on what the graph
    has kept, so run the forward pass inside too. With `inf=False` only NaN is looked for.

    inf that comes from outside, such as a mask of -inf, is no anomaly. A parameter that holds NaN is named at once; NaN
    in any other leaf when it reaches a number (shape ()), a gradient, or the last result of the block: behind a mask
    it does no harm. Every result is read once more, and a small op takes about 9 us longer, forward and backward.
    """

    sees_second_runs = True

    def __new__(cls, function: Any = None, *, inf: bool = True) -> Any:
        return super().__new__(cls, function)

    def __init__(self, function: Any = None, *, inf: bool = True):
        self.inf = bool(inf)
        self._made: dict[int, _Made] = {}
        self._last: weakref.ref[Tensor] | None = None

    def inside(self, former: tuple[Observer, ...]) -> tuple[Observer, ...]:
        """The innermost one counts."""
        return (*(o for o in former if not isinstance(o, detect_anomaly)), self)

    def again(self) -> detect_anomaly:
        """The same choice for each call of a decorated function."""
        return detect_anomaly(inf=self.inf)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        last = self._last and self._last()
        self._last = None
        if exc[0] is None and last is not None:
            made = self._made.get(id(last))
            if made is not None and made.carried is not None:
                raise leaf_report(made.carried, "NaN", f"op '{made.op}', whose result leaves the block", made.line)

    # ---- forward

    def op_ran(self, out: Tensor, op: str, parents: tuple[Tensor | float, ...]) -> None:
        """Judge a result by its operands. In a backward pass `rules_ran` judges what the ops of a rule make."""
        node, line = out._node, None
        if node is None or node.line is None:
            line = user_line()
            if node is not None:
                node.line = line
        if pass_notes.get() is not None:
            return
        self._last = weakref.ref(out)
        kinds = kinds_in(out._data)
        if not kinds and node is not None:
            return
        carried = self._judge(out, op, parents, kinds) if kinds else None
        line = node.line if node is not None else line
        self._made[id(out)] = _Made(weakref.ref(out, self._forgetting(id(out))), op, line, carried)

    def _forgetting(self, key: int) -> Callable[[Any], None]:
        """What takes a tensor out of the memory of this object when it is gone; it does not keep the object alive."""
        made = self._made

        def forget(_: Any) -> None:
            made.pop(key, None)

        return forget

    def _judge(self, out: Tensor, op: str, parents: tuple, kinds: set[str]) -> Operand | None:
        """Raise if `op` made what is bad in its result; else what brought NaN in, which may still do no harm."""
        before: set[str] = set().union(*(kinds_in(values_of(p)) for p in parents))
        if op == "cross_entropy":
            before -= {"-inf"}  # a mask of classes does no harm, unless it closes the target
        made = made_of(kinds, before, self.inf)
        if made:
            operands = [self._described(i, p) for i, p in enumerate(parents)]
            raise forward_report(op, out, operands, made, (module_frame.get(), user_line()))
        for i, p in enumerate(parents):
            held = kinds_in(values_of(p))
            if isinstance(p, Tensor) and p.is_leaf and p.requires_grad and p.name and (bad := self._spoilt(held)):
                raise leaf_report(self._described(i, p), bad, f"op '{op}'", user_line())
        if "NaN" not in kinds:
            return None
        i = next(i for i, p in enumerate(parents) if "NaN" in kinds_in(values_of(p)))
        known = self._known(parents[i])
        carried = known.carried if known and known.carried else self._described(i, parents[i])
        if out.ndim == 0 and op != "getitem":  # a number that was picked out may still be left out
            raise leaf_report(carried, "NaN", f"op '{op}', whose result is a number", user_line())
        return carried

    def _spoilt(self, held: set[str]) -> str:
        """What a parameter must not hold; -inf may be a mask."""
        return "NaN" if "NaN" in held else "inf" if self.inf and "inf" in held else ""

    def _known(self, tensor: Any) -> _Made | None:
        made = self._made.get(id(tensor))
        return made if made is not None and made.tensor() is tensor else None

    def _described(self, place: int, operand: Any) -> Operand:
        known = self._known(operand)
        return Operand.of(place, operand, known and known.op, known and known.line)

    # ---- backward

    def root_given(self, root: Tensor, g: Tensor) -> None:
        """A loss that is NaN or inf must not pass; what gets no gradient may be behind a mask."""
        kinds = kinds_in(root._data)
        kinds = kinds and kinds_in(root._data[g._data != 0])
        bad = "NaN" if "NaN" in kinds else "inf" if kinds and self.inf else ""
        if bad:
            known = self._known(root)
            found = first_bad_value(root._node, bad)
            raise root_report(root, bad, found, known and known.carried)

    def backward_started(self, roots: dict[Node, Any]) -> None:
        """Note the gradients that the pass begins with."""
        sums: dict[Node, Any] = {node: values_of(g) for node, g in roots.items()}
        for node, g in sums.items():
            if bad := self._first_of(kinds_in(g)):
                raise pass_report(node, bad, "the gradient that backward() was given", g)
        _notes()[self] = sums

    def hooks_ran(self, node: Node, g: Any) -> None:
        """What arrives was judged before, so a hook has made what is bad now."""
        if bad := self._first_of(kinds_in(g)):
            raise pass_report(node, bad, "the gradient that a hook returned", g)

    def rules_ran(self, node: Node, inputs: tuple, parts: list[Part]) -> None:
        """Judge each contribution, and the sum that it goes into."""
        sums = _notes()[self]
        sums.pop(node, None)
        g = kinds_in(inputs[0])
        for part in parts:
            if bad := made_of(kinds_in(part.value), g, self.inf):
                raise backward_report(node, part, inputs, bad)
            if part.first or part.parent not in sums:
                sums[part.parent] = part.value
                continue
            before, sums[part.parent] = sums[part.parent], sums[part.parent] + part.value
            if bad := made_of(kinds_in(sums[part.parent]), kinds_in(before) | kinds_in(part.value), self.inf):
                raise sum_report(node, part, before, sums[part.parent], bad)

    def _first_of(self, kinds: set[str]) -> str:
        return made_of(kinds, set(), self.inf)


def _notes() -> dict[Any, Any]:
    notes = pass_notes.get()
    assert notes is not None, "observers are told of a pass inside of it"
    return notes


def values_of(operand: Any) -> Any:
    """The array in a Tensor, anything else as it is."""
    return operand._data if isinstance(operand, Tensor) else operand


def kinds_in(values: Any) -> set[str]:
    """Which of "NaN", "inf" and "-inf" stand in an array or a number of floats."""
    if not isinstance(values, np.ndarray):
        values = np.asarray(values)
    if values.dtype.kind != "f" or not values.size:
        return set()
    with np.errstate(all="ignore"):
        if math.isfinite(float(np.add.reduce(values, axis=None))):  # one sum is cheap; it may overflow
            return set()
    found = {"NaN"} if np.isnan(values).any() else set()
    found |= {"inf"} if np.isposinf(values).any() else set()
    return found | ({"-inf"} if np.isneginf(values).any() else set())


def made_of(kinds: set[str], before: set[str], inf: bool) -> str:
    """What an op has made that none of its operands had: "NaN", "inf" or "-inf"; "" for nothing."""
    if "NaN" in kinds and "NaN" not in before:
        return "NaN"
    new = sorted(kinds - {"NaN"}, reverse=True)
    return new[0] if inf and new and not before else ""
