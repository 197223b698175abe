"""Hooks: functions that see, and may replace, the gradient that arrives at a tensor during backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Self

import numpy as np

from tinygrad_qkv.autograd import Node, record
from tinygrad_qkv.locks import fork_safe_lock
from tinygrad_qkv.tensor import Tensor

_next_key = itertools.count().__next__
_making = fork_safe_lock()

# What hooks note for each other in one backward pass; None outside of one. It ends with the pass, also when a hook
# raises, and a pass that a hook starts, or another thread, has its own.
pass_notes: ContextVar[dict[Any, Any] | None] = ContextVar("pass_notes", default=None)


class Hooks:
    """What is done with the gradient of one node when it is complete."""

    def __init__(self) -> None:
        self.functions: dict[int, Callable] = {}
        self.keep = False  # whether backward leaves an inner node's gradient in `node.grad`


class HookHandle:
    """A hook that is in place; `remove()`, or the end of `with t.register_hook(f):`, takes it away."""

    def __init__(self, functions: dict[int, Callable], function: Callable):
        if not callable(function):
            raise TypeError(f"a hook is a function, got {type(function).__name__}")
        self._functions, self._key = functions, _next_key()
        functions[self._key] = function

    def remove(self) -> None:
        """Take the hook away; a second time does nothing."""
        self._functions.pop(self._key, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def hooks_of(node: Node) -> Hooks:
    """The hooks of a node, made now if it had none."""
    if node.hooks is None:
        with _making:  # two threads must not make two
            if node.hooks is None:
                node.hooks = Hooks()
    return node.hooks


def in_place(functions: dict[int, Callable]) -> Iterator[Callable]:
    """The hooks in the order in which they came, without those that an earlier one takes away or adds."""
    for key, function in list(functions.items()):
        if key in functions:
            yield function


def run_hooks(node: Node, g: Tensor) -> Tensor:
    """The gradient `g` of `node` after its hooks: each sees what the one before it left.

    They see it read-only: the rule of an op may have given one array to several operands.
    """
    for function in in_place(hooks_of(node).functions):
        seen = _read_only(g)
        replaced = function(seen)
        if replaced is not None and replaced is not seen:
            g = checked(replaced, node.shape, node.dtype, f"the hook {name_of(function)} on {_place(node)}")
    return g


def checked(replaced: Any, shape: tuple[int, ...], dtype: np.dtype, place: str) -> Tensor:
    """What the hook at `place` returned, as the gradient of this shape and dtype that goes on."""
    if not isinstance(replaced, (Tensor, np.ndarray)):
        raise TypeError(f"{place} returned {type(replaced).__name__}; it returns None or the new gradient")
    g = replaced if isinstance(replaced, Tensor) else Tensor(replaced)
    if g.shape != shape or g.dtype.kind != "f":
        raise ValueError(
            f"{place} returned {g.dtype} of shape {g.shape}; a gradient here has shape {shape} and is made of "
            f"floats ({dtype})"
        )
    return g if g.dtype == dtype else g.astype(dtype)


def name_of(function: Callable) -> str:
    """A hook as messages call it."""
    return repr(getattr(function, "__name__", function))


def passed_on(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The same values as the result of an op of their own, with `hook` on the gradient that arrives here alone."""
    out = record(tensor._data.view(), "identity", (tensor,), (), (lambda g: g,), ("dx = g",))
    out.register_hook(hook)
    return out


def _place(node: Node) -> str:
    return f"op '{node.op}'" if node.name is None else repr(node.name)


def _read_only(g: Tensor) -> Tensor:
    values = g._data.view()
    values.flags.writeable = False
    return Tensor.wrap(values, g._memory, g._node)
