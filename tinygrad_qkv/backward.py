"""Backward: the rules of the recorded ops, run from the latest to the earliest, and their gradients added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tinygrad_qkv.autograd import OUTPUT, Node, between, leaf_node, tracked_ancestry
from tinygrad_qkv.hooks import pass_notes, run_hooks
from tinygrad_qkv.kernels import total
from tinygrad_qkv.kernels.buffers import empty, is_whole
from tinygrad_qkv.locks import fork_safe_lock
from tinygrad_qkv.memory import Memory
from tinygrad_qkv.modes import grad_mode, switched
from tinygrad_qkv.observers import Observer, Part, observers
from tinygrad_qkv.rule_faults import explain, misfit, refuse_cut, wrong_count
from tinygrad_qkv.seeds import seeded
from tinygrad_qkv.tensor import Tensor

COPIED_FREELY = 2**10  # elements: a gradient up to this size is copied before anyone asks whether it has to be
_nothing = object()
_deposit = fork_safe_lock()  # two threads may add to the gradient of one leaf


def backward(
    tensor: Tensor,
    gradient: Any = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    watch: Observer | None = None,
) -> None:
    """Add d tensor / d leaf, times `gradient`, to `.grad` of every leaf that `tensor` was made from.

    See `Tensor.backward`. `watch` is told of every rule that runs.
    """
    node, g = seeded(tensor, gradient, "backward()")
    order = tracked_ancestry([node])
    leaves = {n for n in order if not n.parents}
    found = sweep({node: g}, order, (leaves, leaves), create_graph, retain_graph, watch)
    with _deposit, switched(grad_mode, create_graph):
        for node, g in found.items():  # leaves, and inner nodes whose gradient is kept
            if node.grad is None or node.parents:
                node.grad = g
            elif create_graph:
                node.grad = node.grad + g
            else:  # no op, which observers would take for one of the user's
                node.grad = Tensor.wrap(np.asarray(node.grad._data + g._data))


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
    Several outputs add up. An input that no output depends on raises, or gives None under `allow_unused`. What the
    ops from the inputs to the outputs saved is freed, unless `retain_graph`, which defaults to `create_graph`.
    """
    outputs, inputs = _listed(outputs), _listed(inputs)
    gradients = [grad_outputs] if not isinstance(grad_outputs, (list, tuple)) else list(grad_outputs)
    if grad_outputs is None:
        gradients = [None] * len(outputs)
    if len(gradients) != len(outputs):
        raise ValueError(f"grad() got {len(outputs)} outputs and {len(gradients)} grad_outputs; give one for each")
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor):
            raise TypeError(f"grad(): input {i} is a {type(x).__name__}; inputs are one Tensor, or a list of them")
        if not x.requires_grad:
            raise RuntimeError(f"grad(): input {i} does not require grad; make it with requires_grad=True")
    seeds: dict[Node, Tensor] = {}
    for tensor, gradient in zip(outputs, gradients, strict=True):
        node, g = seeded(tensor, gradient, "grad()")
        seeds[node] = seeds[node] + g if node in seeds else g
    nodes = [leaf_node(x) for x in inputs]
    wanted = set(nodes)
    order = between(seeds, wanted)
    useful = set(order)
    for i, node in enumerate(nodes):
        if node not in useful and not allow_unused:  # asked before anything is freed
            raise RuntimeError(
                f"grad(): no output depends on input {i} of shape {node.shape}; pass allow_unused=True to get None"
            )
    ends = {node for node in wanted if useful.isdisjoint(node.parents)}  # nothing that is asked for lies beyond them
    found = sweep(seeds, order, (wanted, ends), create_graph, retain_graph)
    return tuple(found.get(node) for node in nodes)


def _listed(tensors: Any) -> list:
    return list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, Tensor) else [tensors]


def sweep(
    seeds: dict[Node, Tensor],
    order: list[Node],
    targets: tuple[set[Node], set[Node]],
    create_graph: bool,
    retain_graph: bool | None,
    watch: Observer | None = None,
) -> dict[Node, Tensor]:
    """Run the rules along `order` and return the gradients of `wanted`, where targets = (wanted, ends).

    `ends` are those of `wanted` whose own rules do not run. Gradients of inner nodes that are kept come along. With no
    `wanted`, those of `ends` come as they arrive, before the hooks of these nodes: another pass runs them.
    An ordinary pass works on arrays; under `create_graph` on Tensors, so that the rules are recorded themselves, and
    the graph is retained unless `retain_graph` says otherwise.
    """
    retain_graph = create_graph if retain_graph is None else retain_graph
    wanted, ends = targets
    hooked, written = False, Memory.latest
    for node in order:
        if (node.pullbacks is None or node.number < written) and node not in ends:
            _check_usable(node)
        if node.hooks is not None:
            hooked = True
    watching = observers.get() if watch is None else (*observers.get(), watch)
    with switched(grad_mode, create_graph), np.errstate(all="ignore"):
        if create_graph or hooked or watching:
            with switched(pass_notes, {}):
                return _run_watched(seeds, order, wanted, ends, retain_graph, create_graph, watching)
        return _run_on_arrays(seeds, order, wanted or ends, ends, retain_graph)


def _check_usable(node: Node) -> None:
    """Refuse a freed node, and one whose saved values were written to since."""
    if node.pullbacks is None:
        raise RuntimeError(
            f"backward ran through op '{node.op}' already and freed what it had saved; a second time needs "
            "retain_graph=True at the first, or a new forward pass"
        )
    changed = "its result" if node.memory is not None and node.memory.written > node.number else ""
    for s in node.saved:
        if isinstance(s, Tensor) and s._memory is not None and s._memory.written > node.number:
            changed = "an operand"
    if changed:
        where = f" (recorded at {node.line})" if node.line else ""
        raise RuntimeError(
            f"op '{node.op}' with result shape {node.shape}{where} saved {changed} for backward, and that tensor was "
            "changed in place since; write after backward, or into a copy: t.clone()"
        )


def _run_on_arrays(
    seeds: dict[Node, Tensor], order: list[Node], wanted: set[Node], ends: set[Node], retain_graph: bool
) -> dict[Node, Tensor]:
    """The ordinary pass. This loop is half of what a small op costs, so it calls little."""
    found: dict[Node, Tensor] = {}
    grads: dict[Any, Any] = dict.fromkeys(order)  # what has arrived at each node so far
    grads.update((node, g._data) for node, g in seeds.items() if node in grads)
    owned: set[Node] = set()  # nodes whose gradient buffer nobody else holds
    parent: Any
    inputs: list = []
    parts: Any = None
    try:
        for node in order:
            g = grads.pop(node)
            if node in wanted:
                found[node] = Tensor.wrap(g if node in owned and g.flags.c_contiguous else _copy(g))
                if node in ends:
                    continue
            inputs = _inputs(node, g) if node.saved else [g]
            rules: Any = node.pullbacks
            parts = None if type(rules) is tuple else rules(*inputs)
            for i, parent in enumerate(node.parents):
                held = grads.get(parent, _nothing)
                if held is _nothing:  # it needs no gradient
                    continue
                part = rules[i](*inputs) if parts is None else parts[i]
                if type(part) is not np.ndarray or part.shape != parent.shape or part.dtype is not parent.dtype:
                    part = _fit(part, node, i, parent)
                if held is None:
                    grads[parent] = part
                    if part.size > COPIED_FREELY:
                        passed_on = node in owned and node not in wanted and len(node.parents) == 1
                        if _is_ours(part, inputs, parts, passed_on):
                            owned.add(parent)
                elif parent in owned:
                    held += part
                else:
                    grads[parent] = np.add(held, part, out=empty(part.shape, part.dtype))
                    owned.add(parent)
            if not retain_graph:
                node.saved, node.pullbacks, node.output = (), None, None
    except Exception as error:
        explain(error, node, inputs, parts)
        raise
    return found


def _inputs(node: Node, g: np.ndarray) -> list[Any]:
    """What the rules of a node are called with in an ordinary pass."""
    inputs: list[Any] = [g]
    for s in node.saved:
        inputs.append(s._data if isinstance(s, Tensor) else node.output if s is OUTPUT else s)
    return inputs


def _run_watched(
    seeds: dict[Node, Tensor],
    order: list[Node],
    wanted: set[Node],
    ends: set[Node],
    retain_graph: bool,
    on_tensors: bool,
    watching: tuple[Observer, ...],
) -> dict[Node, Tensor]:
    """The pass with hooks and observers, and under `create_graph`: then the rules get Tensors, and are recorded.

    On arrays it calls the same rules and adds in the same order as the ordinary pass, so it gives the same bits. What
    the ops saved is freed at the end, so that nothing is lost when a hook or an observer raises.
    """
    found: dict[Node, Tensor] = {}
    useful = set(order)
    grads: dict[Node, Any] = {node: g if on_tensors else g._data for node, g in seeds.items() if node in useful}
    for observer in watching:
        observer.backward_started(seeds)
    for node in order:
        g = grads.pop(node)
        if node.hooks is not None and (wanted or node not in ends):
            g = run_hooks(node, g) if on_tensors else run_hooks(node, Tensor.wrap(g))._data
            for observer in watching:
                observer.hooks_ran(node, _array(g))
        if node in (wanted or ends) or (node.hooks is not None and node.hooks.keep):
            found[node] = g.clone() if on_tensors else Tensor.wrap(_copy(g))
            if node in ends:
                continue
        if node.pullbacks is None or node.number < Memory.latest:  # a hook may have freed it, or written to it
            _check_usable(node)
        inputs = _tensor_inputs(node, g) if on_tensors else _inputs(node, g)
        parts = []
        for i, parent, value in _contributions(node, inputs, useful, on_tensors):
            parts.append(Part(i, parent, _array(value), parent not in grads))
            grads[parent] = _sum(grads[parent], value) if parent in grads else value
        for observer in watching:
            observer.rules_ran(node, tuple(map(_array, inputs)), parts)
    for observer in watching:
        observer.backward_ended()
    if not retain_graph:
        for node in order:
            if node not in ends:
                node.saved, node.pullbacks, node.output = (), None, None
    return found


def _contributions(
    node: Node, inputs: Sequence, useful: set[Node], on_tensors: bool
) -> Iterator[tuple[int, Node, Any]]:
    """What the rules of a node give, as (operand, its node, gradient), for the operands that need one."""
    values = _rule_values(node, inputs, useful)
    for i, parent in enumerate(node.parents):
        if parent not in useful:
            continue
        value = _fit(values[i], node, i, parent)
        if on_tensors and not isinstance(value, Tensor):
            refuse_cut(node, i, inputs)
            value = Tensor.wrap(value)
        yield i, parent, value


def _rule_values(node: Node, inputs: Sequence, useful: set[Node]) -> Sequence[Any]:
    """What the rules of a node give to its operands, None to those that need nothing."""
    rules: Any = node.pullbacks
    try:
        if type(rules) is tuple:
            return [rules[i](*inputs) if p in useful else None for i, p in enumerate(node.parents)]
        values = rules(*inputs)
    except Exception as error:
        explain(error, node, inputs)
        raise
    if fault := wrong_count(node, values):
        raise ValueError(fault)
    return values


def _array(value: Any) -> Any:
    """The array in a Tensor, anything else as it is."""
    return value._data if isinstance(value, Tensor) else value


def _sum(held: Any, part: Any) -> Any:
    """Two contributions to one gradient, as arrays or as Tensors."""
    return held + part if isinstance(held, Tensor) else np.add(held, part, out=empty(part.shape, part.dtype))


def _tensor_inputs(node: Node, g: Tensor) -> list[Any]:
    """What the rules of a node are called with under `create_graph`."""
    output = Tensor.wrap(np.asarray(node.output), node.memory, node)
    return [g, *(output if s is OUTPUT else s for s in node.saved)]


def _copy(g: np.ndarray) -> np.ndarray:
    """The same numbers in C order."""
    copy = empty(g.shape, g.dtype)
    np.copyto(copy, g)
    return copy


def _is_ours(part: np.ndarray, inputs: list[Any], parts: Sequence | None, passed_on: bool) -> bool:
    """Whether nobody else sees the memory of what a rule returned, so that it may be added into in place.

    The rule made it for itself, or turned and reshaped its g, which under `passed_on` nobody needs any more.
    """
    whole = _whole(part)
    if whole.size != part.size or not is_whole(whole) or not part.flags.writeable:
        return False
    for other in inputs[1:] if passed_on else inputs:
        if isinstance(other, np.ndarray) and _whole(other) is whole:
            return False
    if parts is not None:
        return sum(isinstance(other, np.ndarray) and _whole(other) is whole for other in parts) == 1
    return True


def _whole(array: np.ndarray) -> np.ndarray:
    """The array that this one is a view of, or itself."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _fit(part: Any, node: Node, i: int, parent: Node) -> Any:
    """One contribution, brought to the shape and dtype of the parent: the one place where broadcasting is undone."""
    if not isinstance(part, Tensor):
        part = np.asarray(part)
    if part.shape != parent.shape:
        extra = len(part.shape) - len(parent.shape)
        padded = (1,) * extra + parent.shape
        if extra < 0 or any(want not in (1, got) for want, got in zip(padded, part.shape, strict=True)):
            raise misfit(part, node, i)
        axes = tuple(k for k, want in enumerate(padded) if want == 1 and (part.shape[k] != 1 or k < extra))
        part = np.reshape(np.sum(part, axis=axes) if isinstance(part, Tensor) else total(part, axes), parent.shape)
    if part.dtype != parent.dtype:
        if part.dtype.kind != "f":
            raise misfit(part, node, i)
        part = part.astype(parent.dtype)
    return part
