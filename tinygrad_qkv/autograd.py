"""The tape: every op records a node here; backward.py walks the nodes from the latest to the earliest.

A `Node` knows the op that made a tensor, its parents, what its rules need, and one rule (pullback) per parent.
Nodes are numbered in the order of their creation, so the reverse of that order is a reverse topological one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tinygrad_qkv.memory import Memory, memory_of, tick
from tinygrad_qkv.modes import Frame, grad_mode, module_frame
from tinygrad_qkv.observers import observers
from tinygrad_qkv.tensor import Tensor

if TYPE_CHECKING:
    from tinygrad_qkv.hooks import Hooks
    from tinygrad_qkv.records import Line

by_number = operator.attrgetter("number")
_blank = object.__new__


class _Output:
    """Stands in `saved` for the op's own result: a node must not hold the Tensor that holds the node."""

    def __repr__(self) -> str:
        return "OUTPUT"


OUTPUT = _Output()


class Node:
    """One recorded op, or one leaf: what made a tensor, from which parents, and how its gradient goes back.

    `parents` holds a Node per operand, or the number itself for a Python scalar. `pullbacks` is a tuple with one
    rule per parent, or one function that returns the contributions to all of them; None once backward has freed it.
    """

    __slots__ = (
        *("number", "op", "shape", "dtype", "requires_grad", "parents", "saved", "pullbacks", "formulas", "frame"),
        *("output", "memory", "name", "grad", "hooks", "line", "value", "cut_from", "__weakref__"),
    )

    def __init__(
        self,
        op: str,
        array: np.ndarray,
        requires_grad: bool,
        parents: tuple[Node | float, ...] = (),
        saved: tuple = (),
        pullbacks: tuple[Callable, ...] | Callable | None = (),
        formulas: tuple[str, ...] = (),
        frame: Frame | None = None,
    ):
        self.number = tick()
        self.op, self.shape, self.dtype = op, array.shape, array.dtype
        self.requires_grad, self.parents, self.frame = requires_grad, parents, frame
        self.saved, self.pullbacks, self.formulas = saved, pullbacks, formulas
        self.output: np.ndarray | None = None  # the result and its memory, where a rule reads it
        self.memory: Memory | None = None
        self.name: str | None = None
        self.grad: Tensor | None = None
        self.hooks: Hooks | None = None
        self.line: Line | None = None  # this and the next two only under `recording()`
        self.value: np.ndarray | None = None
        self.cut_from: tuple[Node, ...] = ()  # what a leaf without gradients was made from

    @property
    def is_leaf(self) -> bool:
        """True for a tensor that no recorded op made."""
        return not self.parents

    def __repr__(self) -> str:
        label = f" {self.name!r}" if self.name else ""
        return f"<Node {self.number} {self.op}{label} {self.shape} {self.dtype}>"


def leaf_node(tensor: Tensor, requires_grad: bool = False) -> Node:
    """The node of `tensor`; a tensor without one becomes a leaf of the graph."""
    if tensor._node is None:
        tensor._node = Node("leaf", tensor._data, requires_grad)
    return tensor._node


def recorded_node(tensor: Tensor, caller: str) -> Node:
    """The node of a tensor that has a graph; RuntimeError, in the name of `caller`, for one that has none."""
    if not tensor.requires_grad:
        raise RuntimeError(
            f"{caller}: this tensor of shape {tensor.shape} has no graph: nothing that it was made from requires grad "
            "(set requires_grad=True on a leaf), or it was made under no_grad() or detached"
        )
    return leaf_node(tensor)


def record(
    y: np.ndarray,
    op: str,
    parents: tuple[Tensor | float, ...],
    saved: tuple = (),
    pullbacks: tuple[Callable, ...] | Callable = (),
    formulas: tuple[str, ...] = (),
) -> Tensor:
    """Wrap an op's result as a Tensor and, where a parent requires grad, put the op on the tape.

    Every op of the library is made by this function, and so is one of your own: the value, a name, the operands, what
    the rule reads, and the rule.

        def softsign(x):
            rule = lambda g, x: g / (1 + np.abs(x)) ** 2
            return record(x.data / (1 + np.abs(x.data)), "softsign", (x,), (x,), (rule,))

        check_grad(softsign, np.array([-2.0, 0.5])), and check_grad_grad and check_jvp, tell whether it is right

    `y` is a new array, or a view of an operand's. NOTE: that array itself is neither: backward could not see a write
    through one of the two (return `x.data.copy()`). `parents` are Tensors or Python numbers. `saved` is what the
    rules read: parents, `OUTPUT` (which then stands first) for the result itself, and plain values such as masks,
    axes and shapes. `pullbacks` is a tuple with one rule for each parent, or one function that returns a tuple of
    gradients. Each is called as `rule(g, *saved)`, must change none of these, and returns what its parent gets; where
    broadcasting had stretched a parent, the engine sums.

    A rule gets arrays in an ordinary backward, and Tensors under `create_graph`, in jvp and in hessian: made of NumPy
    functions (not methods) of its own arguments it serves every order. NOTE: it must not reach around them (a closure
    over an array, np.asarray, `.data`): higher orders would miss that, and only check_grad_grad notices. A rule that
    calls compiled code branches on `isinstance(g, np.ndarray)` and says the same in NumPy functions for Tensors.

    `formulas` may say the rules as text, over the names of the rules' parameters: see formulas.py.
    """
    if type(y) is not np.ndarray:
        y = np.asarray(y)
    out = _blank(Tensor)  # Tensor.wrap(y) without the call
    out._data, out._memory, out._node = y, None, None
    if y.base is not None:
        _share_memory(out, parents)
    nodes: list[Any] = []
    needed, known = False, True
    for p in parents:
        if isinstance(p, Tensor):
            node = p._node
            if node is None:
                known = False
            elif node.requires_grad:
                needed = True
            nodes.append(node)
        else:
            nodes.append(p)  # a number stands for itself
    if needed and grad_mode.get():
        if not known:  # constants become leaves
            nodes = [leaf_node(p) if isinstance(p, Tensor) else p for p in parents]
        node = out._node = Node(op, y, True, tuple(nodes), saved, pullbacks, formulas, module_frame.get())
        if saved and saved[0] is OUTPUT:
            node.output, node.memory = y, out._memory or Memory(out)
            out._memory = node.memory
    for observer in observers.get():
        observer.op_ran(out, op, parents)
    return out


def _share_memory(out: Tensor, parents: tuple) -> None:
    """A view takes over the memory of the parent that it looks into, so that a write through either counts for both."""
    owner = _owner(out._data)
    for p in parents:
        if isinstance(p, Tensor) and _owner(p._data) is owner:
            memory_of(p).share(out)
            return


def _owner(array: Any) -> Any:
    """The array, or the foreign object, whose buffer an array looks into."""
    while (base := getattr(array, "base", None)) is not None:
        array = base
    return array


def ancestry(roots: Iterable[Node]) -> list[Node]:
    """All nodes that `roots` were made from, roots included, latest first: a reverse topological order."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        for parent in stack.pop().parents:
            if type(parent) is Node and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return sorted(seen, key=by_number, reverse=True)


def tracked_ancestry(roots: Iterable[Node]) -> list[Node]:
    """The nodes that get a gradient when `roots` have one, latest first: a reverse topological order."""
    order = list(roots)
    seen = set(order)
    for node in order:  # grows on the way
        for parent in node.parents:
            if type(parent) is Node and parent.requires_grad and parent not in seen:
                seen.add(parent)
                order.append(parent)
    order.sort(key=by_number, reverse=True)
    return order


def leading_to(wanted: set[Node], order: list[Node]) -> list[Node]:
    """Those nodes of `order` through which a gradient reaches `wanted`."""
    useful: set[Node] = set()
    for node in reversed(order):
        if node in wanted or not useful.isdisjoint(node.parents):
            useful.add(node)
    return [node for node in order if node in useful]


def between(roots: Iterable[Node], wanted: set[Node]) -> list[Node]:
    """The nodes through which a gradient goes from `roots` to `wanted`, latest first.

    A node is younger than all that it was made from, so nothing older than the oldest of `wanted` is looked at: a
    derivative of the last step of a long run does not cost the length of the run.
    """
    oldest = min(map(by_number, wanted), default=0)
    order = list(roots)
    seen = set(order)
    for node in order:  # grows on the way
        for parent in node.parents:
            if type(parent) is Node and parent.requires_grad and parent.number >= oldest and parent not in seen:
                seen.add(parent)
                order.append(parent)
    order.sort(key=by_number, reverse=True)
    return leading_to(wanted, order)
