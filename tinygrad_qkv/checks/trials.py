"""One run of a function with every op noted: its values, its rules' gradients, and values put in the ops' way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tinygrad_qkv.autograd import Node, ancestry, leaf_node
from tinygrad_qkv.modes import grad_mode, switched
from tinygrad_qkv.nested import listed
from tinygrad_qkv.observers import Observer, Part, observers
from tinygrad_qkv.rule_faults import wrong_count
from tinygrad_qkv.tensor import Tensor


class Trial(Observer):
    """f(*leaves), and what its ops made on the way, in the order in which they ran.

    `forced` gives, by the number of an op in that order, a value that goes on in place of what the op made: the only
    way to move one operand of an op, and nothing else, in a function whose inside is not known.
    """

    def __init__(self, f: Callable, leaves: list, forced: Mapping[int, np.ndarray] | None = None):
        self.leaves, self.forced = leaves, forced or {}
        self.ops: list[str] = []
        self.tensors: list[Tensor] = []
        self.operands: list[tuple] = []
        self.values: list[np.ndarray] = []  # as they were made
        self.nodes: list[Node | None] = []
        self.arguments = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        self.before = [x.data.copy() if isinstance(x, Tensor) else None for x in leaves]
        with switched(observers, (*observers.get(), self)), switched(grad_mode, True):
            self.outputs = listed(f(*leaves))
        for output in self.outputs:
            if not isinstance(output, Tensor):
                raise TypeError(f"f returns a Tensor or a list of them, got {type(output).__name__}")

    def op_ran(self, out: Tensor, op: str, parents: tuple[Tensor | float, ...]) -> None:
        """Note the op, and put the forced value in its result's place: a new array, which no view looks into."""
        value = self.forced.get(len(self.ops))
        if value is not None:
            out._data = value.copy()
        self.ops.append(op)
        self.tensors.append(out)
        self.operands.append(parents)
        self.values.append(out.data.copy())
        self.nodes.append(out._node)

    def made(self) -> list[Node]:
        """The nodes between the leaves and the outputs, earliest first."""
        known = set(self.nodes)
        roots = [y._node for y in self.outputs if y.requires_grad]
        return [node for node in reversed(ancestry(filter(None, roots))) if node in known and not node.is_leaf]

    @functools.cached_property
    def places(self) -> dict[Node | None, int]:
        """The number of the op that made a node, in the order of this run; results without history too."""
        late = [tensor._node if own is None else own for own, tensor in zip(self.nodes, self.tensors, strict=True)]
        return {node: i for i, node in reversed(list(enumerate(late))) if node is not None}

    def differs(self, other: Trial, place: int, i: int) -> bool:
        """Whether operand `i` of the op number `place` has another value in another run."""
        mine, theirs = (run.operands[place][i] for run in (self, other))
        return isinstance(mine, Tensor) and not _same(mine.data, theirs.data)

    def argument(self, node: Node) -> int | None:
        """The number of the leaf with this node among the arguments of f."""
        for i, x in enumerate(self.leaves):
            if isinstance(x, Tensor) and leaf_node(x) is node:
                return i
        return None

    def refuse_miscounted_rules(self) -> None:
        """Raise ValueError for an op with more or fewer rules than operands: some go unread, and others are missed."""
        for node in self.made():
            fault = wrong_count(node)
            if fault:
                raise ValueError(fault)

    def written(self) -> str:
        """What holds other numbers than when it was made; "" if nothing does."""
        for i, (x, before) in enumerate(zip(self.leaves, self.before, strict=True)):
            if before is not None and not _same(x.data, before):
                return f"argument {i}"
        for tensor, value, node, op in zip(self.tensors, self.values, self.nodes, self.ops, strict=True):
            if tensor._node is node and not _same(tensor.data, value):  # else f itself wrote in place
                return f"the result of op '{op}'"
        return ""


class Pulled(Observer):
    """What arrived at each node in one backward pass, and what its rules gave to each operand."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.writer: tuple[Node, str] | None = None  # the first node whose rules changed what they were given
        self.incoming: dict[Node, np.ndarray] = {}
        self.parts: dict[Node, dict[Node, np.ndarray]] = {}

    def backward_started(self, roots: dict[Node, Any]) -> None:
        """The gradients that the pass begins with."""
        self.incoming.update((node, np.array(g)) for node, g in roots.items())

    def hooks_ran(self, node: Node, g: Any) -> None:
        """What goes on from here."""
        self.incoming[node] = np.array(g)

    def rules_ran(self, node: Node, inputs: tuple, parts: list[Part]) -> None:
        """Add up the contributions to an operand that stands twice: a move of it moves both."""
        own = self.parts[node] = {}
        for part in parts:
            own[part.parent] = own.get(part.parent, 0) + np.array(part.value)
            self.incoming[part.parent] = self.incoming.get(part.parent, 0) + np.array(part.value)
        if self.writer is None:
            changed = "" if _same(self.incoming[node], inputs[0]) else "g, the gradient of the result,"
            if what := changed or self.trial.written():
                self.writer = node, what


def _same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
