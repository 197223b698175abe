"""The gradient ledger: every contribution to every gradient of one backward pass, in the order in which it was made."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from tinygrad_qkv.autograd import Node
from tinygrad_qkv.checks.gradient_checks import GradientError
from tinygrad_qkv.ledger.entry import REPLACES, Entry
from tinygrad_qkv.ledger.json_text import entries_from_json, entries_to_json
from tinygrad_qkv.ledger.text import table
from tinygrad_qkv.tensor import Tensor

TOLERANCE = {"float64": 1e-12, "float32": 1e-4}  # of an entry's scale


class Ledger(Sequence[Entry]):
    """What `loss.backward(trace=True)` returns: a sequence of `Entry`s, one for each contribution.

    `print(ledger)` shows it as a table and `print(ledger[3])` one entry with all its numbers. A tensor is named by its
    label (`attn.W_Q`, `mul#12`), by the end of its path (`W_Q`, which may mean several), or given itself. Filters
    return a Ledger again. The numbers are copies: what happens to the tensors later does not change them.
    """

    def __init__(self, entries: Iterable[Entry], nodes: Mapping[Node, str] | None = None, whole: bool = True):
        self._entries = tuple(entries)
        self._nodes = nodes if nodes is not None else {}
        self._whole = whole  # nothing was filtered out

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> Ledger: ...

    def __getitem__(self, index: int | slice) -> Entry | Ledger:
        return self._part(self._entries[index]) if isinstance(index, slice) else self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    # ---- what arrived where

    @property
    def tensors(self) -> tuple[str, ...]:
        """The labels of the tensors that a gradient arrived at, in the order in which it did."""
        return tuple(dict.fromkeys(entry.into for entry in self))

    def total(self, tensor: str | Tensor) -> np.ndarray:
        """The whole gradient that arrived at one tensor: its contributions, added in the order of their arrival.

        For a leaf it is, bit for bit, what the pass added to `.grad`.
        """
        found = self._find(tensor)
        if len(found) > 1:
            raise ValueError(f"{tensor!r} may be {', '.join(found)}; total() is of one tensor: name it in full")
        return _sum(entry for entry in self if entry.into == found[0])

    def totals(self) -> dict[str, np.ndarray]:
        """The total of every tensor, by label."""
        arrived: dict[str, list[Entry]] = {}
        for entry in self:
            arrived.setdefault(entry.into, []).append(entry)
        return {label: _sum(entries) for label, entries in arrived.items()}

    # ---- filters

    def for_(self, tensor: str | Tensor) -> Ledger:
        """The contributions to the gradient of a tensor."""
        found = set(self._find(tensor))
        return self._part(entry for entry in self if entry.into in found)

    def way_to(self, tensor: str | Tensor) -> Ledger:
        """All contributions on the ways from the loss to a tensor: what its gradient was made of, step by step."""
        reached = set(self._find(tensor))
        way = []
        for entry in reversed(self):
            if entry.into in reached:
                way.append(entry)
                if entry.result is not None:
                    reached.add(entry.result)
        return self._part(reversed(way))

    def of_op(self, op: str) -> Ledger:
        """The contributions that the rules of an op made, e.g. "matmul"."""
        self._known(op, {entry.op for entry in self}, "op")
        return self._part(entry for entry in self if entry.op == op)

    def in_module(self, path: str) -> Ledger:
        """The contributions of ops that ran in a module or in one inside it, e.g. "blocks.3.attn"; "" is the model."""
        paths = {entry.path for entry in self if entry.path is not None}
        above = {".".join(p.split(".")[:n]) for p in paths for n in range(p.count(".") + 2)}
        self._known(path, above, "module")
        inside = {p for p in paths if path == "" or p == path or p.startswith(path + ".")}
        return self._part(entry for entry in self if entry.path in inside)

    def _part(self, entries: Iterable[Entry]) -> Ledger:
        return Ledger(entries, self._nodes, whole=False)

    def _find(self, tensor: str | Tensor) -> list[str]:
        """The labels that a name, the end of a name, or a Tensor means."""
        if isinstance(tensor, Tensor):
            label = None if tensor._node is None else self._nodes.get(tensor._node)
            if label is None or label not in self.tensors:
                raise ValueError(
                    f"no gradient arrived at this tensor of shape {tensor.shape} here; a ledger that was read from "
                    f"JSON knows tensors by their labels only: {_some(self.tensors)}"
                )
            return [label]
        labels = self.tensors
        for means in _MEANINGS:
            if found := [label for label in labels if means(label, tensor)]:
                return found
        self._known(tensor, {part for label in labels for part in (label, label.rsplit(".", 1)[-1])}, "tensor")
        return []

    def _known(self, name: str, names: set[str], kind: str) -> None:
        """Refuse a name that does not occur, with those that are like it."""
        if name not in names:
            lower: dict[str, list[str]] = {}
            for known in sorted(names):
                lower.setdefault(known.lower(), []).append(known)
            near = [x for match in difflib.get_close_matches(name.lower(), lower, 5, 0.4) for x in lower[match]]
            raise ValueError(f"no {kind} {name!r} in this ledger; it has {_some(near or sorted(names))}")

    # ---- checks

    def check(self) -> float:
        """Check every entry by its own numbers, and return the largest error, as a share of an entry's scale.

        Each formula, run on the recorded factors, gives the contribution (to 1e-12 in float64, 1e-4 in float32). In a
        whole ledger also: each op's g is, bit for bit, the sum of what had arrived at its result, and nothing arrives
        there later, so that the order is a reverse topological one. Raises GradientError. Entries without a formula
        (hooks, ops that state none) only take part in the sums.
        """
        worst = 0.0
        for entry in self:
            if entry.formula is not None:
                error = entry.error()
                worst = max(worst, error)
                if error > TOLERANCE.get(entry.value.dtype.name, 1e-4):
                    raise GradientError(
                        f"{entry!r}: the formula gives numbers that differ by {error:.3g} of their scale"
                    )
        if self._whole:
            self._check_order()
        return worst

    def _check_order(self) -> None:
        arrived: dict[str, np.ndarray] = {}
        used: set[str] = set()
        for entry in self:
            if entry.result is not None:
                used.add(entry.result)
                g, before = next(iter(entry.factors.values())).value, arrived.get(entry.result)
                if before is None or not np.array_equal(np.ravel(g), np.ravel(before), equal_nan=True):
                    raise GradientError(f"{entry!r}: its g is not the sum of what had arrived at {entry.result}")
            if entry.into in used:
                raise GradientError(f"{entry!r}: comes after the gradient of {entry.into} was used")
            arrived[entry.into] = _sum([entry], arrived.get(entry.into))

    # ---- to read and to keep

    def table(self, width: int = 120, limit: int = 40) -> str:
        """One line for each contribution; of more than `limit` the ones in the middle are left out."""
        return table(self, width, limit)

    def to_json(self) -> str:
        """The ledger as JSON text: numbers are exact, and every array stands in it once."""
        return entries_to_json(self._entries, self._whole)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The ledger that `to_json()` wrote; its entries evaluate as before."""
        entries, whole = entries_from_json(text)
        return cls(entries, whole=whole)

    def __str__(self) -> str:
        return self.table()

    def __reduce__(self) -> tuple:
        """Pickled, a ledger knows tensors by their labels only."""
        return Ledger, (self._entries, None, self._whole)

    def __deepcopy__(self, memo: dict) -> Ledger:
        """It does not change, and its numbers are copies already."""
        return self

    def __repr__(self) -> str:
        return f"<Ledger of {len(self)} contributions to {len(self.tensors)} tensors>"


# What a name may mean, the most exact first; a name that several tensors have is numbered in their labels.
_MEANINGS: tuple[Callable[[str, str], bool], ...] = (
    lambda label, name: label == name,
    lambda label, name: label.startswith(name + " ("),
    lambda label, name: label.endswith("." + name),
    lambda label, name: f".{label.rsplit('#', 1)[0]}".endswith("." + name),
)


def _sum(entries: Iterable[Entry], total: Any = None) -> np.ndarray:
    """The contributions added to `total` as backward adds them."""
    with np.errstate(all="ignore"):
        for entry in entries:
            total = entry.value if total is None or entry.effect == REPLACES else total + entry.value
    return np.asarray(total)


def _some(names: Sequence[str]) -> str:
    if not any(names):
        return "none"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
