"""One line of the gradient ledger: what one rule gave to one tensor, by which formula, from which numbers."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_qkv.formulas import evaluate, renamed
from tinygrad_qkv.ledger.formula_latex import latex
from tinygrad_qkv.ledger.text import entry_text

STARTS, ADDS, REPLACES = "starts", "accumulates into", "replaces"


@dataclass(frozen=True)
class Factor:
    """What one name of a formula stood for: `value` is a read-only copy of an array, a number, a mask, an axis, ...

    `tensor` is the label of the tensor that it was the value of, or for the first name, g, the gradient of.
    """

    value: Any
    tensor: str | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of an array, None for anything else."""
        return self.value.shape if isinstance(self.value, np.ndarray) else None


@dataclass(frozen=True, eq=False)
class Entry:
    """One contribution to the gradient of one tensor, as it was made.

    number        its place in the backward pass, from 0
    op            whose rule made it; "backward" is the gradient that the pass began with, "hook" a hook that changed it
    result        the label of the tensor that the op made, whose gradient is the factor g
    operand       the place of the tensor among the op's operands, and `operand_name` its name in the formula
    into          the label of the tensor: its name (`attn.W_Q`), or op, number and shape (`mul#12 (2, 5)`)
    effect        "starts" the tensor's gradient, "accumulates into" it, or "replaces" it (a hook)
    formula       the rule as text (see formulas.py), None where the op states none
    factors       what the names in the formula stood for
    value         the contribution, in the tensor's shape
    path, line    the module and the user's line (under `recording()`) in which the op ran, where known
    """

    number: int
    op: str
    result: str | None
    operand: int | None
    into: str
    effect: str
    formula: str | None
    factors: Mapping[str, Factor]
    value: np.ndarray
    path: str | None = None
    line: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.value.shape

    @property
    def norm(self) -> float:
        """The root of the sum of the contribution's squares."""
        largest = float(np.max(np.abs(self.value), initial=0))
        if not 0 < largest < np.inf:
            return largest
        return largest * float(np.sqrt(np.sum(np.square(self.value.astype(np.float64) / largest))))

    @property
    def operand_name(self) -> str | None:
        """The operand's name in the formula: b of `db = a.T @ g`."""
        return None if self.target is None else self.target.removeprefix("d") or None

    @property
    def target(self) -> str | None:
        """What the formula calls the contribution: db of `db = a.T @ g`."""
        return None if self.formula is None else self.formula.split(";")[-1].split("=")[0].strip()

    @property
    def named(self) -> str | None:
        """The formula with the names that the tensors have, e.g. `dW_Q = X.T @ dQ` for `db = a.T @ g`."""
        if self.formula is None or self.target is None:
            return None
        names = {self.target: _short(self.into, "d")}
        for i, (name, factor) in enumerate(self.factors.items()):
            if type(factor.value) in (int, float):
                names[name] = _number(factor.value)
            elif factor.tensor is not None:
                names[name] = _short(factor.tensor, "d" if i == 0 else "")
        return renamed(self.formula, {name: new for name, new in names.items() if new is not None})

    @property
    def latex(self) -> str | None:
        """The formula as LaTeX, with the names that the tensors have."""
        return None if self.named is None else latex(self.named)

    def evaluate(self) -> np.ndarray:
        """What the formula gives for the recorded factors: the contribution again, up to rounding."""
        if self.formula is None:
            why = "a hook is code of its own" if self.op == "hook" else f"op '{self.op}' states no formula"
            raise ValueError(
                f"entry {self.number} cannot be evaluated: {why}; its number is in entry.value. An op states its rules "
                "as text in record(..., formulas=(...,))"
            )
        return evaluate(self.formula, {name: factor.value for name, factor in self.factors.items()}, self.shape)

    def error(self) -> float:
        """How far formula and contribution lie apart, as a share of their scale; inf where only one is NaN or inf.

        The scale is that of the contribution and of g, whichever is larger: a sum of large numbers that cancel is
        not exact.
        """
        text, given = np.broadcast_arrays(self.evaluate(), self.value)
        finite = np.isfinite(given)
        if not np.array_equal(text[~finite], given[~finite], equal_nan=True) or not np.isfinite(text[finite]).all():
            return float("inf")
        distance = float(np.max(np.abs(text[finite] - given[finite]), initial=0))
        factors = [next(iter(self.factors.values())).value] if self.factors else []
        scale = max(float(np.max(np.abs(x), where=np.isfinite(x), initial=0)) for x in (given, *factors))
        return distance / scale if distance else 0.0

    def show(self, digits: int = 4, full: int = 64) -> None:
        """Print the formula, the numbers of every factor, and the contribution; arrays up to `full` elements whole."""
        print(entry_text(self, digits, full))

    def __str__(self) -> str:
        return entry_text(self)

    def __repr__(self) -> str:
        return f"<Entry {self.number} {self.op}: {self.named or 'no formula'}, {self.effect} {self.into}>"


def _short(label: str, prefix: str) -> str | None:
    """The last part of a tensor's name, where a formula may use it."""
    name = label.rsplit(".", 1)[-1]
    return prefix + name if name.isidentifier() and not keyword.iskeyword(name) else None


def _number(x: float) -> str | None:
    """A number of up to four digits; a longer one keeps its name, and a negative one, which would need brackets."""
    text = f"{x:.4g}"
    return text if x >= 0 and float(text) == x and "inf" not in text else None
