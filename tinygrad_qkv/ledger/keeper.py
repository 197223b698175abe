"""The observer that writes the gradient ledger while backward runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_qkv.autograd import OUTPUT, Node, by_number
from tinygrad_qkv.formulas import names_read, rule_values
from tinygrad_qkv.kernels.attention_rules import AttentionRules
from tinygrad_qkv.ledger.entry import ADDS, REPLACES, STARTS, Entry, Factor
from tinygrad_qkv.ledger.ledger import Ledger
from tinygrad_qkv.observers import Observer, Part
from tinygrad_qkv.tensor import Tensor


@dataclass
class _Draft:
    """An entry before the tensors have their labels: nodes stand in their place."""

    op: str
    result: Node | None
    operand: int | None
    into: Node
    effect: str
    formula: str | None
    factors: Mapping[str, tuple[Any, Node | None]]
    value: np.ndarray


class LedgerKeeper(Observer):
    """Looks on at one backward pass, and keeps a copy of everything that its rules read and gave."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._arrived: dict[Node, list[np.ndarray]] = {}
        self._copies: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}  # the live arrays stay alive, and so in place

    def ledger(self) -> Ledger:
        """The entries so far; tensors without a name are numbered in the order in which the forward pass made them."""
        nodes = {draft.into for draft in self._drafts}
        labels = _labels(sorted(nodes, key=by_number))
        entries = [_entry(i, draft, labels) for i, draft in enumerate(self._drafts)]
        return Ledger(entries, weakref.WeakKeyDictionary(labels))

    # ---- what the engine tells

    def backward_started(self, roots: dict[Node, Any]) -> None:
        """The first entries: the gradients that the pass begins with."""
        for node, g in roots.items():
            value = self._copy(g)
            one = value.size == 1 and value.item() == 1
            factors = {} if one else {"gradient": (value, None)}
            self._write("backward", None, None, node, "dL = 1" if one else "dL = gradient", factors, value)

    def hooks_ran(self, node: Node, g: np.ndarray) -> None:
        """An entry where a hook changed the gradient."""
        values = self._arrived[node]
        before = values[0]
        for value in values[1:]:
            before = before + value
        if not np.array_equal(before, g, equal_nan=True):
            after = self._copy(g)
            self._write("hook", None, None, node, None, {"before": (before, node)}, after, REPLACES)
            self._arrived[node] = [after]

    def rules_ran(self, node: Node, inputs: tuple, parts: list[Part]) -> None:
        """An entry for every operand that gets a gradient."""
        sources = [node, *(_source(s, node) for s in node.saved)]
        for i, parent, value, _ in parts:
            rule: Any = node.pullbacks[i] if isinstance(node.pullbacks, tuple) else node.pullbacks
            formula = node.formulas[i] if i < len(node.formulas) else None
            values = _named_inputs(rule, inputs)
            read = set(values) if formula is None else {*names_read(formula), next(iter(values))}  # g in any case
            factors = {
                name: (self._kept(x), source)
                for (name, x), source in zip(values.items(), sources, strict=True)
                if name in read
            }
            self._write(node.op, node, i, parent, formula, factors, self._copy(value))

    # ---- how it is written down

    def _write(
        self,
        op: str,
        result: Node | None,
        operand: int | None,
        into: Node,
        formula: str | None,
        factors: Mapping[str, tuple[Any, Node | None]],
        value: np.ndarray,
        effect: str | None = None,
    ) -> None:
        effect = effect or (ADDS if into in self._arrived else STARTS)
        self._arrived.setdefault(into, []).append(value)
        self._drafts.append(_Draft(op, result, operand, into, effect, formula, factors, value))

    def _kept(self, x: Any) -> Any:
        """What a rule read, such that nobody can change it later."""
        if isinstance(x, Tensor):
            x = x._data
        if isinstance(x, np.ndarray):
            return self._copy(x)
        if isinstance(x, AttentionRules):
            return AttentionRules(*map(self._kept, x))
        if type(x) in (tuple, list):
            return type(x)(map(self._kept, x))
        if isinstance(x, (bool, int, float, str, slice, np.generic)) or x is None or x is Ellipsis:
            return x
        return repr(x)

    def _copy(self, array: Any) -> np.ndarray:
        """A read-only copy; the same one for an array that was copied before and is as it was."""
        array = array._data if isinstance(array, Tensor) else np.asarray(array)
        key = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str
        _, copy = self._copies.get(key, (None, None))
        if copy is None or not np.array_equal(copy, array, equal_nan=True):
            copy = np.array(array, order="C")
            copy.flags.writeable = False
            self._copies[key] = array, copy
        return copy


def _named_inputs(rule: Callable, inputs: tuple) -> dict[str, Any]:
    """What the rule was called with, by the names of its parameters; numbered where it gives none."""
    try:
        return rule_values(rule, inputs[0], inputs[1:])
    except (TypeError, ValueError, KeyError):  # `*saved`, or a function of NumPy's that has no signature
        return {f"saved{i}" if i else "g": x for i, x in enumerate(inputs)}


def _source(saved: Any, node: Node) -> Node | None:
    """The node whose value was saved."""
    if saved is OUTPUT:
        return node
    return saved._node if isinstance(saved, Tensor) else None


def _labels(nodes: list[Node]) -> dict[Node, str]:
    """A label for each node: its name, or what made it, its number and its shape."""
    times = Counter(node.name for node in nodes)
    labels = {}
    for i, node in enumerate(nodes):
        only = node.name if node.name and times[node.name] == 1 else None
        labels[node] = only or f"{node.name or node.op}#{i} {node.shape}"
    return labels


def _entry(number: int, draft: _Draft, labels: dict[Node, str]) -> Entry:
    def label(node: Node | None) -> str | None:
        return None if node is None else labels.get(node, node.name)

    made = draft.result
    return Entry(
        number=number,
        op=draft.op,
        result=label(made),
        operand=draft.operand,
        into=labels[draft.into],
        effect=draft.effect,
        formula=draft.formula,
        factors={name: Factor(value, label(source)) for name, (value, source) in draft.factors.items()},
        value=draft.value,
        path=made.frame.path if made is not None and made.frame is not None else None,
        line=str(made.line) if made is not None and made.line is not None else None,
    )
