"""Hooks: functions that see, and may replace, the gradient that arrives at a tensor during backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from tinygrad_qkv.autograd import Node
from tinygrad_qkv.tensor import Tensor

_next_key = itertools.count().__next__


class Hooks:
    """What is done with the gradient of one node when it is complete."""

    def __init__(self) -> None:
        self.functions: dict[int, Callable] = {}
        self.keep = False  # whether an inner node's gradient stays in `node.grad`


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
        node.hooks = Hooks()
    return node.hooks


def run_hooks(node: Node, g: Tensor) -> Tensor:
    """The gradient `g` of `node` after its hooks: each sees what the one before it left."""
    hooks = hooks_of(node)
    for function in list(hooks.functions.values()):
        replaced = function(g)
        if replaced is not None:
            g = _checked(replaced, node, function)
    if hooks.keep:
        node.grad = Tensor.wrap(g._data.copy())
    return g


def _checked(replaced: Any, node: Node, function: Callable) -> Tensor:
    """What a hook returned, as the gradient that goes on."""
    place = f"the hook {getattr(function, '__name__', function)!r} on op '{node.op}'"
    if not isinstance(replaced, (Tensor, np.ndarray)):
        raise TypeError(f"{place} returned {type(replaced).__name__}; it returns None or the new gradient")
    g = replaced if isinstance(replaced, Tensor) else Tensor(replaced)
    if g.shape != node.shape or g.dtype.kind != "f":
        raise ValueError(
            f"{place} returned {g.dtype} of shape {g.shape}; a gradient here has shape {node.shape} and is made of "
            f"floats ({node.dtype})"
        )
    return g if g.dtype == node.dtype else g.astype(node.dtype)
