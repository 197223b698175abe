"""The op to blame for a wrong derivative: every rule of a run beside differences of its own op alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tinygrad_qkv.autograd import OUTPUT, Node
from tinygrad_qkv.checks.differences import Tolerance, disagreement, furthest, gradients, worst_entry
from tinygrad_qkv.checks.trials import Pulled, Trial
from tinygrad_qkv.modes import switched
from tinygrad_qkv.observers import observers
from tinygrad_qkv.tensor import Tensor


def wrong_rule(f: Callable, leaves: list, weights: list[np.ndarray], tolerance: Tolerance) -> str:
    """In words: the first op of f whose rule disagrees with differences of that op, its operand, index and numbers.

    "" if there is none. One operand at a time is moved, with all others held, by running f again with those values
    put in the ops' way.
    """
    trial = Trial(f, leaves)
    pulled = _pulled(trial, weights)
    if fault := _written(pulled):
        return fault
    for node in _suspects(f, trial, pulled, tolerance):
        for parent, got in pulled.parts[node].items():
            fault = _fault(f, trial, node, parent, got, pulled.incoming[node], tolerance)
            if fault:
                return fault
    return ""


def writing_rule(f: Callable, leaves: list, weights: list[np.ndarray]) -> str:
    """In words: the first op of f whose rule changes what it was given, which others read too; "" if there is none."""
    return _written(_pulled(Trial(f, leaves), weights))


def two_faced_rule(trial: Trial, weights: list[np.ndarray], tolerance: Tolerance) -> str:
    """In words: the first op whose rule gives other numbers for Tensors than for arrays; "" if there is none."""
    on_arrays, on_tensors = (_pulled(trial, weights, create_graph) for create_graph in (False, True))
    for node, parts in on_arrays.parts.items():
        for parent, got in parts.items():
            other = on_tensors.parts[node][parent]
            if not tolerance.allows(other, got):
                index = furthest(other, got)
                return (
                    f"the rule of op '{node.op}' has two forms that differ: at index {index} of an operand of shape "
                    f"{parent.shape} it gives {got[index]:.8g} for arrays, and {other[index]:.8g} under create_graph"
                )
    return ""


def _pulled(trial: Trial, weights: list[np.ndarray], create_graph: bool = False) -> Pulled:
    """A backward pass through a trial, looked at."""
    pulled = Pulled(trial)
    with switched(observers, (*observers.get(), pulled)):
        gradients(trial.outputs, [trial.leaves[i] for i in trial.arguments], weights, create_graph)
    return pulled


def _written(pulled: Pulled) -> str:
    if pulled.writer is None:
        return ""
    node, what = pulled.writer
    return f"a rule of op '{node.op}' writes into what it was given: {what} changed during backward"


def _suspects(f: Callable, trial: Trial, pulled: Pulled, tolerance: Tolerance) -> Iterator[Node]:
    """The ops at which the books do not balance when all inputs move at once, earliest first: most need no closer look.

    What comes in, sum(g * move of the result), must equal what goes out, sum(gradient * move) over the operands.
    """
    random, eps = np.random.default_rng(2), tolerance.eps
    steps = {i: random.normal(size=trial.leaves[i].shape) for i in trial.arguments}
    sides = []
    for sign in (1, -1):
        leaves = list(trial.leaves)
        for i, step in steps.items():
            leaves[i] = Tensor(leaves[i].data + sign * eps * step, requires_grad=True)
        sides.append(Trial(f, leaves))
    up, down = sides
    if not trial.ops == up.ops == down.ops:  # f went another way, so every op has to be looked at by itself
        yield from (node for node in trial.made() if node in pulled.parts)
        return

    def move(node: Node) -> Any:
        place, argument = trial.places.get(node), trial.argument(node)
        if argument is not None:
            return steps.get(argument, 0)
        return 0 if place is None else (up.values[place] - down.values[place]) / (2 * eps)

    for node in trial.made():
        parts = pulled.parts.get(node, {})
        going_out = sum(np.sum(got * move(parent)) for parent, got in parts.items())
        if parts and not tolerance.allows(going_out, np.sum(pulled.incoming[node] * move(node))):
            yield node


def _fault(
    f: Callable, trial: Trial, node: Node, parent: Node, got: np.ndarray, g: np.ndarray, tolerance: Tolerance
) -> str:
    """What is wrong with the rule of `node` for `parent`, "" if nothing is or if it cannot be looked at alone."""
    operands = [i for i, p in enumerate(node.parents) if p is parent]
    v = np.random.default_rng(0).normal(size=parent.shape)
    expected = _own_slope(f, trial, node, parent, v, g, tolerance.eps)
    if expected is None or not np.isfinite(g).all() or tolerance.allows(np.sum(got * v), expected):
        return ""
    entry = worst_entry(got, lambda v: _own_slope(f, trial, node, parent, v, g, tolerance.eps) or 0.0)
    which = f"operand {operands[0]}" if len(operands) == 1 else f"operands {operands}, one tensor,"
    return f"the rule of op '{node.op}' is wrong by itself: for its {which} {entry}"


def _own_slope(
    f: Callable, trial: Trial, node: Node, parent: Node, v: np.ndarray, g: np.ndarray, eps: float
) -> float | None:
    """d sum(g * result of `node`) along v in its operand `parent`, all its other operands held; None if unknown."""
    here, start, argument = trial.places.get(node), trial.places.get(parent), trial.argument(parent)
    if here is None or (start is None and argument is None):
        return None
    others = (trial.places.get(p) for p in node.parents if isinstance(p, Node) and p is not parent)
    held = {i: trial.values[i] for i in others if i is not None}
    ends = []
    for sign in (1, -1):
        leaves, forced = list(trial.leaves), dict(held)
        if argument is not None:
            leaves[argument] = Tensor(leaves[argument].data + sign * eps * v, requires_grad=True)
        elif start is not None:
            forced[start] = trial.values[start] + sign * eps * v
        moved = Trial(f, leaves, forced)
        if moved.ops[here : here + 1] != [node.op] or moved.values[here].shape != node.shape:
            return None  # f went another way
        if any(p is not parent and moved.differs(trial, here, i) for i, p in enumerate(node.parents)):
            return None  # what f makes of a value without an op cannot be held
        ends.append(moved.values[here])
    return float(np.sum(g * (ends[0] - ends[1]))) / (2 * eps)


def unrecorded_rule(f: Callable, leaves: list, tolerance: Tolerance) -> str:
    """In words: the first op of f whose rule, as a function of g and of what it saved, is not what it records.

    "" if there is none. Such a rule reads an argument where the engine does not see it: by np.asarray, `.data`, a
    closure or a kernel.
    """
    for node in Trial(f, leaves).made():
        slots: list[Any] = [node.output if s is OUTPUT else s.data if isinstance(s, Tensor) else s for s in node.saved]
        places = [i for i, s in enumerate(node.saved) if s is OUTPUT or isinstance(s, Tensor)]
        places = [i for i in places if slots[i].dtype.kind == "f"]
        rule, random = _rule_of(node, slots, places), np.random.default_rng(1)
        points = [random.normal(size=node.shape), *(slots[i] for i in places)]
        trial = Trial(rule, [Tensor(x, requires_grad=True) for x in points])
        weights = [random.normal(size=y.shape) for y in trial.outputs]
        where = disagreement(rule, trial, weights, tolerance, _parameters(node, places))
        if where:
            return (
                f"the rule of op '{node.op}' does not record how it depends on {where}; "
                "make it of NumPy functions on its own arguments"
            )
    return ""


def _rule_of(node: Node, slots: list, places: list[int]) -> Callable:
    """What the rules of a node give, as a function of g and of the saved tensors."""

    def contributions(g: Tensor, *tensors: Tensor) -> list[Tensor]:
        inputs = list(slots)
        for i, t in zip(places, tensors, strict=True):
            inputs[i] = t
        rules: Any = node.pullbacks
        wanted = [i for i, p in enumerate(node.parents) if isinstance(p, Node) and p.requires_grad]
        values = [rules[i](g, *inputs) for i in wanted] if isinstance(rules, tuple) else rules(g, *inputs)
        chosen = values if isinstance(rules, tuple) else [values[i] for i in wanted]
        return [value if isinstance(value, Tensor) else Tensor(value) for value in chosen]

    return contributions


def _parameters(node: Node, places: list[int]) -> list[str]:
    """The names of g and of the saved tensors in the rules of a node."""
    rules: Any = node.pullbacks
    names = list(inspect.signature(rules[0] if isinstance(rules, tuple) else rules).parameters)
    return [f"its argument {names[i]!r}" for i in (0, *(1 + place for place in places))]
