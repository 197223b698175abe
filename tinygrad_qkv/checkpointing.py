"""Checkpointing: a function whose inner results are not kept, but computed again when backward needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextvars import copy_context
from itertools import accumulate
from typing import Any

import numpy as np

from tinygrad_qkv.autograd import Node, by_number, leaf_node, record
from tinygrad_qkv.backward import sweep
from tinygrad_qkv.hooks import pass_notes
from tinygrad_qkv.memory import tick
from tinygrad_qkv.modes import grad_mode, switched
from tinygrad_qkv.nested import tensors_in, with_each
from tinygrad_qkv.observers import Observer, Watch, observers
from tinygrad_qkv.random import Generators, noted_draws, repeated_draws
from tinygrad_qkv.tensor import Tensor


def checkpoint(f: Callable, *args: Any, **kwargs: Any) -> Any:
    """f(*args, **kwargs), without keeping what its ops save for backward: backward runs f again.

    That saves memory and costs a second forward pass: 24 Transformer blocks on (2, 256, 32) take 3.1 MB at the peak of
    a step instead of 20.2. Results and gradients have the same bits, for dropout draws the same masks again; higher
    orders work. Tensors that f reads from elsewhere, such as a module's parameters, get their gradients too. f returns
    a Tensor, or tuples, lists and dicts with Tensors in them.

    f must do the same each time, as all in it runs twice, hooks of modules too: it must not write to tensors from
    outside (RuntimeError), and draw its random numbers from this library or from a `numpy.random.Generator` that it
    hands to an op. If its results differ the second time, backward raises RuntimeError.
    """
    if not callable(f):
        raise TypeError(f"checkpoint() takes a function and its arguments, got {type(f).__name__}; write f, not f(x)")
    if not grad_mode.get():
        return f(*args, **kwargs)
    start = tick()
    again, reads, shell, arrays = _first_run(f, args, kwargs, start)
    if not arrays:  # no gradient flows through f
        return shell
    given = tensors_in([args, kwargs])
    outside = {id(t): t for t in [*given, *reads.still_there()]}.values()
    _refuse_writes(outside, start)
    outputs = _outputs(arrays, again.parents, (*outside, again), again.sizes)
    return with_each(shell, _Place, outputs.__getitem__)


def _first_run(f: Callable, args: tuple, kwargs: dict[str, Any], start: int) -> tuple[_Again, _Reads, Any, list]:
    """Run f; gives what runs it again, what it read, and its result in two parts, with places in place of Tensors.

    When this has returned, what the ops saved is gone, and with it the tensors that f alone had seen.
    """
    context = copy_context()
    with _Reads() as reads, noted_draws() as draws:
        result = f(*args, **kwargs)
    made = _made_since(start, result)
    ends = _between(list(made), start)[1]
    candidates = [*tensors_in([args, kwargs]), *reads.tracked.values()]
    parents = tuple({t._node: t for t in candidates if t._node in ends}.values())
    places = {node: _Place(place) for place, node in enumerate(made)}
    shell = with_each(result, Tensor, lambda t: places.get(t._node, t))
    again = _Again(f, args, kwargs, (context, draws, parents), list(made.values()))
    return again, reads, shell, [t._data for t in made.values()]


class _Place(int):
    """Stands in a result for the Tensor that comes there."""


class _Reads(Watch):
    """Notes the tensors that ops read and that no op inside has made."""

    def __init__(self) -> None:
        self.start = tick()
        self.made: dict[int, weakref.ref[Tensor]] = {}
        self.tracked: dict[int, Tensor] = {}
        self.constants: dict[int, weakref.ref[Tensor]] = {}  # or were constants until f wrote to them

    def __enter__(self) -> _Reads:
        super().__enter__()
        return self

    def op_ran(self, out: Tensor, op: str, parents: tuple[Tensor | float, ...]) -> None:
        for p in parents:
            if isinstance(p, Tensor) and not self._is_made(p):
                if p.requires_grad and (p.is_leaf or leaf_node(p).number < self.start):
                    self.tracked[id(p)] = p
                else:
                    self.constants[id(p)] = weakref.ref(p)
        self.made[id(out)] = weakref.ref(out)

    def _is_made(self, tensor: Tensor) -> bool:
        return id(tensor) in self.made and self.made[id(tensor)]() is tensor

    def still_there(self) -> list[Tensor]:
        """Those tensors that somebody else holds, who may write to them."""
        constants = [constant() for constant in self.constants.values()]
        return [*self.tracked.values(), *(t for t in constants if t is not None)]


class _Again:
    """Runs a function a second time, as it ran the first time, and takes gradients through it."""

    def __init__(
        self,
        f: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        setting: tuple[Any, Generators, tuple],
        made: list[Tensor],
    ):
        self.f, self.args, self.kwargs = f, args, kwargs
        self.context, self.draws, self.parents = setting
        self.sizes = [t.size for t in made]
        self.fingerprints = [_fingerprint(t._data) for t in made]

    def gradients(self, gs: list[Any]) -> list[Any]:
        """The gradients of all parents, from one gradient (or None) for each output: arrays, or Tensors for Tensors."""
        on_tensors = any(isinstance(g, Tensor) for g in gs)
        looking = tuple(o for o in observers.get() if o.sees_second_runs)  # to the others this is one rule
        with switched(observers, looking):
            start = tick()
            made = list(self.context.copy().run(self._run, start, looking))
            order, ends = _between(made, start)
            if not {n for n in ends if n.number < start} <= {t._node for t in self.parents}:
                raise RuntimeError(
                    f"{self._name()} read other tensors when backward ran it again than the first time; it must do the "
                    "same each time"
                )
            seeds: dict[Node, Tensor] = {}
            for node, g in zip(made, gs, strict=True):
                if g is not None:
                    g = g if on_tensors else Tensor.wrap(g)
                    seeds[node] = g if g.dtype == node.dtype else g.astype(node.dtype)
            reached = _below(seeds, order, ends)
            found = sweep(seeds, reached, (set(), ends), on_tensors, None)
        for node in found.keys() - ends:  # inner tensors whose gradient is kept
            node.grad = found[node]
        return [
            (found[t._node] if on_tensors else found[t._node]._data) if t._node in found else np.zeros(t.shape, t.dtype)
            for t in self.parents
        ]

    def _run(self, start: int, looking: tuple[Observer, ...]) -> dict[Node, Tensor]:
        """The outputs of the second run, checked against those of the first."""
        inside = switched(pass_notes, {})  # of the backward pass, for whoever looks on
        with switched(observers, looking), inside, np.errstate(all="ignore"), repeated_draws(self.draws):
            made = _made_since(start, self.f(*self.args, **self.kwargs))
        if [_fingerprint(t._data) for t in made.values()] != self.fingerprints:
            raise RuntimeError(
                f"{self._name()} gave another result when backward ran it again than the first time: it must not "
                "depend on anything that changes, such as np.random, a counter, or an array that was written to"
            )
        return made

    def _name(self) -> str:
        return f"checkpoint(): the function {getattr(self.f, '__name__', type(self.f).__name__)!r}"


def _made_since(start: int, result: Any) -> dict[Node, Tensor]:
    """The Tensors of a result that ops since `start` have made and that a gradient can flow to, by node."""
    nodes = {t._node: t for t in tensors_in(result) if t._node is not None and not t.is_leaf}
    return {node: t for node, t in nodes.items() if node.number > start}


def _between(roots: list[Node], start: int) -> tuple[list[Node], set[Node]]:
    """The tracked nodes that `roots` were made from, and those of them where the way ends: older ones, and leaves."""
    ends: set[Node] = set()
    order = list(roots)
    seen = set(order)
    for node in order:  # grows on the way
        if node.number < start or node.is_leaf:
            ends.add(node)
            continue
        for parent in node.parents:
            if isinstance(parent, Node) and parent.requires_grad and parent not in seen:
                seen.add(parent)
                order.append(parent)
    return sorted(order, key=by_number, reverse=True), ends


def _below(seeds: dict[Node, Tensor], order: list[Node], ends: set[Node]) -> list[Node]:
    """Those nodes of `order` that get a gradient when `seeds` have one."""
    reached = set(seeds)
    for node in order:
        if node in reached and node not in ends:
            reached.update(parent for parent in node.parents if isinstance(parent, Node) and parent.requires_grad)
    return [node for node in order if node in reached]


def _outputs(arrays: list[np.ndarray], parents: tuple[Tensor, ...], saved: tuple, sizes: list[int]) -> list[Tensor]:
    """The results as Tensors whose history is one op, and one more for each where there are several.

    The op's own result then has the gradients of all outputs side by side: each with a 1 behind it if it has arrived.
    """
    if len(arrays) == 1:
        return [record(arrays[0], "checkpoint", parents, saved, _rule_of_one)]
    ends = list(accumulate(size + 1 for size in sizes))
    packed = np.broadcast_to(np.zeros((), np.result_type(*arrays)), (ends[-1],))
    joint = record(packed, "checkpoint", parents, (*saved, tuple(a.shape for a in arrays)), _rule_of_several)
    return [
        record(y, "checkpoint_output", (joint,), (end - y.size - 1, ends[-1] - end), (_packed,))
        for y, end in zip(arrays, ends, strict=True)
    ]


def _rule_of_one(g: Any, *saved: Any) -> list[Any]:
    return saved[-1].gradients([g])


def _packed(g: Any, before: int, behind: int) -> Any:
    """The gradient of one output among the zeros of the others, with a 1 behind it."""
    zeros = np.zeros(before, g.dtype), np.zeros(behind, g.dtype)
    return np.concatenate([zeros[0], np.reshape(g, -1), np.ones(1, g.dtype), zeros[1]])


def _rule_of_several(g: Any, *saved: Any) -> list[Any]:
    again, shapes = saved[-2:]
    gs: list[Any] = []
    start = 0
    for shape, size in zip(shapes, again.sizes, strict=True):
        arrived = g[start + size].item() != 0
        gs.append(np.reshape(g[start : start + size], shape) if arrived else None)
        start += size + 1
    return again.gradients(gs)


def _refuse_writes(outside: Iterable[Tensor], start: int) -> None:
    for t in outside:
        if t._memory is not None and t._memory.written > start:
            raise RuntimeError(
                f"checkpoint(): the function wrote to a tensor of shape {t.shape} that it did not make, and would do "
                "so again in backward; write into t.clone()"
            )


def _fingerprint(array: np.ndarray) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype and the sum of the bits of an array."""
    bits = array.view(np.uint32 if array.itemsize == 4 else np.uint64)
    return array.shape, array.dtype.char, int(np.add.reduce(bits, axis=None, dtype=np.uint64))
