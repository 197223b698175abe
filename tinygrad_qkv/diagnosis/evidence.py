"""What `diagnose` looks at: one forward and one backward pass, with every value, gradient and contribution in them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.autograd import Node, leaf_node, tracked_ancestry
from tinygrad_qkv.backward import grad
from tinygrad_qkv.observers import Part, Watch
from tinygrad_qkv.records import Line, recording, user_line
from tinygrad_qkv.tensor import Tensor


class Made(NamedTuple):
    """An op whose result is off the tape, so that no gradient passes it."""

    op: str
    line: Line | None
    parents: tuple[Node, ...]


class _Look(Watch):
    """Notes all ops that run, on the tape and off it, and all gradients."""

    def __init__(self) -> None:
        self.tape: list[Node] = []
        self.made: dict[Node, Made] = {}
        self.g: dict[Node, np.ndarray] = {}
        self.parts: dict[tuple[Node, int], np.ndarray] = {}

    def op_ran(self, out: Tensor, op: str, parents: tuple[Tensor | float, ...]) -> None:
        node = leaf_node(out)
        if node.parents:
            self.tape.append(node)
        else:
            self.made[node] = Made(op, user_line(), tuple(leaf_node(p) for p in parents if isinstance(p, Tensor)))

    def rules_ran(self, node: Node, inputs: tuple, parts: list[Part]) -> None:
        self.g[node] = inputs[0].copy()
        for part in parts:
            self.parts[node, part.operand] = part.value.copy()


class Evidence:
    """One pass over a loss, for the checks to read. The parameters keep their `.grad`s.

    `order` are the nodes with a gradient, latest first; `uses` of a node are pairs (node that reads it, operand);
    `g` is the gradient of a node's result, `parts[node, operand]` what the rule gave to an operand.
    """

    def __init__(self, loss: Tensor, parameters: dict[str, Tensor], look: _Look):
        self.loss, self.parameters, self.made = loss, parameters, look.made
        self.tape, self.g, self.parts = look.tape, look.g, look.parts
        self.names = {leaf_node(p): name for name, p in parameters.items()}
        self.order = tracked_ancestry([leaf_node(loss)]) if loss.requires_grad else []
        self.uses: dict[Node, list[tuple[Node, int]]] = {}
        for node in self.order:
            for i, parent in enumerate(node.parents):
                if isinstance(parent, Node):
                    self.uses.setdefault(parent, []).append((node, i))
        connected = set(self.order)
        wanted = {name: p for name, p in parameters.items() if p.requires_grad and leaf_node(p) in connected}
        found: tuple[Tensor | None, ...] = ()
        if wanted:
            with look:
                found = grad(loss, list(wanted.values()), allow_unused=True, retain_graph=True)
        self.gradients = {name: g._data for name, g in zip(wanted, found, strict=True) if g is not None}
        self.largest = max((most(g) for g in self.gradients.values()), default=0.0)
        self.steepest = max((most(g) for g in self.g.values()), default=0.0)

    def value(self, node: Any) -> np.ndarray | None:
        """The value of a node or number, if it is known: a parameter's, a recorded one, one that a rule saved."""
        if not isinstance(node, Node):
            return np.asarray(node)
        if node in self.names:
            return self.parameters[self.names[node]]._data
        if node.value is not None:
            return node.value
        saved = (s for child, _ in self.uses.get(node, ()) for s in child.saved if isinstance(s, Tensor))
        return next((s._data for s in saved if s._node is node), None)

    def after(self, node: Node, through: Container[str] | None = None) -> Iterator[tuple[Node, int]]:
        """All uses of a node, and the uses of what was made with it, nearest first.

        With `through`, beyond the first uses only of what ops of these names have made, and no product with another
        parameter.
        """
        first = {child for child, _ in self.uses.get(node, ())}

        def goes_on(child: Node) -> bool:
            meets = child.op != "add" and not self.names.keys().isdisjoint(child.parents)
            return through is None or child in first or (child.op in through and not meets)

        seen, level = {node}, [node]
        while level:
            following = []
            for n in level:
                for child, i in self.uses.get(n, ()):
                    yield child, i
                    if child not in seen and goes_on(child):
                        seen.add(child)
                        following.append(child)
            level = following

    def killers(self, node: Node) -> list[tuple[Node, int]]:
        """The ops at which a gradient that was not 0 became 0 on its ways to `node`."""
        found, seen, stack = [], {node}, [node]
        while stack:
            for child, i in self.uses.get(stack.pop(), ()):
                part = self.parts.get((child, i))
                if part is None:
                    continue
                if np.any(self.g[child]) and not np.any(part):
                    found.append((child, i))
                elif not np.any(self.g[child]) and child not in seen:
                    seen.add(child)
                    stack.append(child)
        return found

    def cut_before(self, node: Node) -> Made | None:
        """The op off the tape, nearest to `node`, through which alone the loss depends on it."""
        came_from: dict[Node, Node] = {}
        stack = [leaf_node(self.loss)]
        seen = set(stack)
        while stack:
            child = stack.pop()
            off = self.made[child].parents if child in self.made else child.cut_from
            for parent in (*child.parents, *off):
                if isinstance(parent, Node) and parent not in seen:
                    seen.add(parent)
                    came_from[parent] = child
                    stack.append(parent)
        while node in came_from:
            node = came_from[node]
            if not node.parents:
                return self.made.get(node) or Made(node.op, node.line, node.cut_from)
        return None

    def where(self, node: Node) -> str:
        """The op with its module and line, in words."""
        module = f" in {node.frame.path} ({node.frame.kind})" if node.frame is not None and node.frame.path else ""
        return f"op '{node.op}'{module}" + (f" at {node.line}" if node.line else "")


def gather(loss: Tensor | Callable[[], Tensor], parameters: dict[str, Tensor]) -> Evidence:
    """Run the loss (or take the recorded one), and its backward pass."""
    look = _Look()
    if isinstance(loss, Tensor):
        if loss._node is not None and loss._node.parents and loss._node.value is None:
            raise RuntimeError(
                "diagnose() reads the record of the forward pass: run that inside `with recording():`, or pass a "
                "function that computes the loss"
            )
        return Evidence(loss, parameters, look)
    with recording(), look:
        result = loss()
    if not isinstance(result, Tensor):
        raise TypeError(f"diagnose(): the function returned {type(result).__name__}; it returns the loss, a Tensor")
    if result.size != 1:
        raise ValueError(f"diagnose(): the loss has shape {result.shape}; it is one number: reduce it, e.g. .mean()")
    return Evidence(result, parameters, look)


def most(x: np.ndarray) -> float:
    """The largest absolute value; 0 of nothing."""
    return float(np.max(np.abs(x), initial=0.0))
