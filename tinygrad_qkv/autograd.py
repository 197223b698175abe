"""The tape: every op records a node here, and backward walks the nodes from the latest to the earliest.

A `Node` knows the op that made a tensor, its parents, what its rules need, and one rule (pullback) per parent.
Nodes are numbered in the order of their creation, so the reverse of that order is a reverse topological one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tinygrad_qkv.locks import fork_safe_lock
from tinygrad_qkv.memory import Memory, tick
from tinygrad_qkv.modes import Frame, Line, grad_mode, module_frame, recording_mode, switched, user_line
from tinygrad_qkv.tensor import Tensor

_number = operator.attrgetter("number")
_deposit = fork_safe_lock()  # two threads may add to the gradient of one leaf


class _Output:
    """Stands in `saved` for the op's own result: a node must not hold the Tensor that holds the node."""

    def __repr__(self) -> str:
        return "OUTPUT"


OUTPUT = _Output()


class Node:
    """One recorded op, or one leaf: what made a tensor, from which parents, and how its gradient goes back.

    `parents` holds a Node per operand, or the number itself for a Python scalar.  `pullbacks` is a tuple with one
    rule per parent, or one function that returns the contributions to all of them; None once backward has freed it.
    """

    output: np.ndarray | None = None  # the result, where a rule reads it
    name: str | None = None
    line: Line | None = None  # this and the next two only under `recording()`
    value: np.ndarray | None = None
    grad: Tensor | None = None

    def __init__(
        self,
        op: str,
        array: np.ndarray,
        memory: Memory,
        requires_grad: bool,
        parents: tuple[Node | float, ...] = (),
        saved: tuple = (),
        pullbacks: tuple[Callable, ...] | Callable | None = (),
        formulas: tuple[str, ...] = (),
        frame: Frame | None = None,
    ):
        self.number = tick()
        self.op, self.shape, self.dtype, self.memory = op, array.shape, array.dtype, memory
        self.requires_grad, self.parents, self.frame = requires_grad, parents, frame
        self.saved, self.pullbacks, self.formulas = saved, pullbacks, formulas

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
        tensor._node = Node("leaf", tensor._data, tensor._memory, requires_grad)
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

    `saved` is what the rules read: parents, `OUTPUT` (which then stands first) for the result itself, and plain
    values such as masks, axes and shapes.  Every rule is called as `pullback(g, *saved)`, with arrays in an ordinary
    backward and with Tensors under `create_graph`; it must capture nothing differentiable.  `formulas` says the same
    rules as text, over the names of the rules' parameters.
    """
    if type(y) is not np.ndarray:
        y = np.asarray(y)
    out = Tensor.wrap(y)
    if y.base is not None:
        _share_memory(out, parents)
    for p in parents:
        if isinstance(p, Tensor) and p._node is not None and p._node.requires_grad:
            break
    else:
        return out
    if not grad_mode.get():
        return out
    nodes: list[Any] = []
    for p in parents:  # a number stands for itself
        nodes.append((p._node or leaf_node(p)) if isinstance(p, Tensor) else p)
    node = Node(op, y, out._memory, True, tuple(nodes), saved, pullbacks, formulas, module_frame.get())
    out._node = node
    if saved and saved[0] is OUTPUT:
        node.output = y
    if recording_mode.get():
        _keep_values(node, y, parents)
    return out


def _share_memory(out: Tensor, parents: tuple) -> None:
    """A view takes over the memory of the parent that it looks into, so that a write through either counts for both."""
    for p in parents:
        if isinstance(p, Tensor) and np.may_share_memory(out._data, p._data):
            out._memory = p._memory.share(p, out)
            return


def _keep_values(node: Node, y: np.ndarray, parents: tuple) -> None:
    """Under `recording()`: copies of the values (a later in-place step must not change the record) and the line."""
    node.value = y.copy()
    node.line = user_line()
    for p in parents:
        if isinstance(p, Tensor) and leaf_node(p).is_leaf:
            leaf_node(p).value = p._data.copy()


def ancestry(roots: Iterable[Node]) -> list[Node]:
    """All nodes that `roots` were made from, roots included, latest first: a reverse topological order."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        for parent in stack.pop().parents:
            if type(parent) is Node and parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return sorted(seen, key=_number, reverse=True)


def backward(
    tensor: Tensor, gradient: Any = None, *, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """Add d tensor / d leaf, times `gradient`, to `.grad` of every leaf that `tensor` was made from.

    See `Tensor.backward`.
    """
    node, g = _seed(tensor, gradient, "backward()")
    order = ancestry([node])
    leaves = {n for n in order if n.is_leaf and n.requires_grad}
    found = _sweep({node: g}, order, leaves, create_graph, retain_graph)
    with _deposit, switched(grad_mode, create_graph):
        for leaf, g in found.items():
            leaf.grad = g if leaf.grad is None else leaf.grad + g


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Any = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of `outputs` with respect to `inputs` (leaves or inner tensors), as a tuple; no `.grad` changes.

    `grad_outputs` gives one gradient per output, each of its output's shape; None means 1 and is for scalars.
    Several outputs add up.  An input that no output depends on raises, or gives None under `allow_unused`.  What the
    ops from the inputs to the outputs saved is freed, unless `retain_graph`, which defaults to `create_graph`.
    """
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    gradients = [grad_outputs] if not isinstance(grad_outputs, (list, tuple)) else list(grad_outputs)
    if grad_outputs is None:
        gradients = [None] * len(outputs)
    if len(gradients) != len(outputs):
        raise ValueError(f"grad() got {len(outputs)} outputs and {len(gradients)} grad_outputs; give one for each")
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor) or not x.requires_grad:
            raise RuntimeError(f"grad(): input {i} does not require grad; make it with requires_grad=True")
    seeds: dict[Node, Tensor] = {}
    for tensor, gradient in zip(outputs, gradients, strict=True):
        node, g = _seed(tensor, gradient, "grad()")
        seeds[node] = seeds[node] + g if node in seeds else g
    nodes = [leaf_node(x) for x in inputs]
    wanted = set(nodes)
    order = _leading_to(wanted, ancestry(seeds))
    found = _sweep(seeds, order, wanted, create_graph, retain_graph)
    for i, node in enumerate(nodes):
        if node not in found and not allow_unused:
            raise RuntimeError(
                f"grad(): no output depends on input {i} of shape {node.shape}; pass allow_unused=True to get None"
            )
    return tuple(found.get(node) for node in nodes)


def _seed(tensor: Tensor, gradient: Any, caller: str) -> tuple[Node, Tensor]:
    """The node of `tensor` and the gradient that it starts with, checked."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{caller} needs a Tensor, got {type(tensor).__name__}")
    node = recorded_node(tensor, caller)
    if gradient is None:
        if tensor._data.size != 1:
            raise ValueError(
                f"{caller} without a gradient needs a scalar, got shape {tensor.shape}; "
                "reduce it first, e.g. .sum(), or pass a gradient of that shape"
            )
        return node, Tensor.wrap(np.ones_like(tensor._data))
    g = gradient if isinstance(gradient, Tensor) else Tensor(gradient)
    if g.shape != tensor.shape:
        raise ValueError(f"{caller}: gradient of shape {g.shape} for a tensor of shape {tensor.shape}; they must agree")
    return node, g if g.dtype == tensor.dtype else g.astype(tensor.dtype)


def _leading_to(wanted: set[Node], order: list[Node]) -> list[Node]:
    """Those nodes of `order` through which a gradient reaches `wanted`."""
    useful = set()
    for node in reversed(order):
        if node in wanted or any(type(p) is Node and p in useful for p in node.parents):
            useful.add(node)
    return [node for node in order if node in useful]


def _sweep(
    seeds: dict[Node, Tensor], order: list[Node], wanted: set[Node], create_graph: bool, retain_graph: bool | None
) -> dict[Node, Tensor]:
    """Run the rules along `order` and return the gradients of the `wanted` nodes.

    An ordinary pass works on arrays; under `create_graph` on Tensors, so that the rules are recorded themselves, and
    the graph is retained unless `retain_graph` says otherwise.
    """
    retain_graph = create_graph if retain_graph is None else retain_graph
    useful = {node for node in order if node.requires_grad}
    ends = {node for node in wanted if useful.isdisjoint(node.parents)}  # nothing that is asked for lies beyond them
    for node in order:
        if (node.pullbacks is None or node.number < Memory.latest) and node not in ends:
            _check_usable(node)
    grads: dict[Node, Any] = {node: g if create_graph else g._data for node, g in seeds.items()}
    owned: set[Node] = set()  # nodes whose gradient buffer nobody else holds
    found: dict[Node, Tensor] = {}
    with switched(grad_mode, create_graph), np.errstate(all="ignore"):
        for node in order:
            g = grads.pop(node, None)
            if g is None:
                continue
            if node in wanted:
                found[node] = g.clone() if create_graph else Tensor.wrap(g if node in owned else np.array(g, order="C"))
            if node.value is not None and node.parents:
                node.grad = g.detach() if create_graph else Tensor.wrap(g.copy())
            if node not in ends:
                _pull(node, g, grads, owned, useful, create_graph)
                if not retain_graph:
                    node.saved, node.pullbacks, node.output = (), None, None
    return found


def _check_usable(node: Node) -> None:
    """Refuse a freed node, and one whose saved values were written to since."""
    if node.pullbacks is None:
        raise RuntimeError(
            f"backward ran through op '{node.op}' already and freed what it had saved; a second time needs "
            "retain_graph=True at the first, or a new forward pass"
        )
    changed = "its result" if node.output is not None and node.memory.written > node.number else ""
    for s in node.saved:
        if isinstance(s, Tensor) and s._memory.written > node.number:
            changed = "an operand"
    if changed:
        where = f" (recorded at {node.line})" if node.line else ""
        raise RuntimeError(
            f"op '{node.op}' with result shape {node.shape}{where} saved {changed} for backward, and that tensor was "
            "changed in place since; write after backward, or into a copy: t.clone()"
        )


def _pull(node: Node, g: Any, grads: dict, owned: set[Node], useful: set[Node], create_graph: bool) -> None:
    """Run the rules of one node and add what they give to the gradients of its parents."""
    saved: Any = node.saved
    if create_graph:
        saved = [Tensor.wrap(np.asarray(node.output), node.memory, node) if s is OUTPUT else s for s in saved]
    elif saved:
        saved = [s._data if isinstance(s, Tensor) else node.output if s is OUTPUT else s for s in saved]
    rules: Any = node.pullbacks
    together = None if type(rules) is tuple else rules(g, *saved)
    for i, parent in enumerate(node.parents):
        if type(parent) is not Node or parent not in useful:
            continue
        part = raw = together[i] if together is not None else rules[i](g, *saved)
        if create_graph or type(raw) is not np.ndarray or raw.shape != parent.shape or raw.dtype is not parent.dtype:
            part = _fit(raw, node, i, parent, create_graph)
        if parent not in grads:
            grads[parent] = part
            if not create_graph and part.base is None and _is_fresh(raw, g, saved, together):
                owned.add(parent)
        elif parent in owned:
            grads[parent] += part
        elif create_graph:
            grads[parent] = grads[parent] + part
        else:
            grads[parent] = np.asarray(grads[parent] + part)
            owned.add(parent)


def _is_fresh(part: Any, g: Any, saved: Sequence, together: Sequence | None) -> bool:
    """Whether a rule made this array for itself, so that adding into it in place changes nothing else."""
    if part is g:
        return False
    for value in saved:  # by identity: == compares element by element
        if part is value:
            return False
    return together is None or sum(part is other for other in together) == 1


def _fit(part: Any, node: Node, i: int, parent: Node, create_graph: bool) -> Any:
    """One contribution, brought to the shape and dtype of the parent: the one place where broadcasting is undone."""
    if create_graph:
        part = part if isinstance(part, Tensor) else Tensor.wrap(np.asarray(part))
    elif type(part) is not np.ndarray:
        part = np.asarray(part)
    if part.shape != parent.shape:
        extra = len(part.shape) - len(parent.shape)
        padded = (1,) * extra + parent.shape
        if extra < 0 or any(want not in (1, got) for want, got in zip(padded, part.shape, strict=True)):
            raise ValueError(
                f"the rule of op '{node.op}' for its operand {i} returned shape {part.shape}; "
                f"the operand has shape {parent.shape}"
            )
        axes = tuple(k for k, want in enumerate(padded) if want == 1 and (part.shape[k] != 1 or k < extra))
        part = np.reshape(np.sum(part, axis=axes, keepdims=True), parent.shape)
    if part.dtype != parent.dtype:
        if part.dtype.kind != "f":
            got = f"returned {part.dtype}; a gradient is made of floats, here {parent.dtype}"
            raise TypeError(f"the rule of op '{node.op}' for its operand {i} {got}")
        part = part.astype(parent.dtype)
    return part
