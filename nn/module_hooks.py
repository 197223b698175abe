"""What the hooks of a module see and may replace: its arguments, its output, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tinygrad_qkv.hooks import checked, in_place, name_of, pass_notes, passed_on
from tinygrad_qkv.modes import grad_mode, module_frame
from tinygrad_qkv.nested import with_each
from tinygrad_qkv.tensor import Tensor

if TYPE_CHECKING:
    from tinygrad_qkv.nn.module import Module


class ModuleHooks:
    """The hooks of one module."""

    def __init__(self) -> None:
        self.before: dict[int, Callable] = {}
        self.after: dict[int, Callable] = {}
        self.backward: dict[int, Callable] = {}

    def call(self, module: Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's forward, with its hooks around it."""
        for hook in in_place(self.before):
            replaced = hook(module, args)
            if replaced is not None:
                args = _arguments(replaced, args, _place("forward pre-hook", hook, module))
        crossing = Crossing(module, self.backward) if self.backward and grad_mode.get() else None
        if crossing is not None:
            args, kwargs = crossing.enter(args, kwargs)
        output = module.forward(*args, **kwargs)
        for hook in in_place(self.after):
            replaced = hook(module, args, output)
            if replaced is not None:
                _check_output(replaced, output, _place("forward hook", hook, module))
                output = replaced
        return output if crossing is None else crossing.leave(output)


class Crossing:
    """One call of a module whose gradients hooks want to see, and the gates through which they pass.

    Each tensor that goes in passes two identity ops, and so does each that comes out. The inner row of gates notes the
    gradients that arrive; backward reaches the outer row when the inner one is complete, and there the hooks run, once,
    and what they leave goes on. Where no argument has a gradient, the row before the outputs lets the hooks run.
    """

    def __init__(self, module: Module, hooks: dict[int, Callable]):
        self.module, self.hooks = module, hooks
        self.path = _path_here()
        self.arguments = self.outputs = 0
        self.gated = False

    def enter(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments behind their gates."""
        values = [*args, *kwargs.values()]
        self.arguments = len(values)
        tracked = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]
        self.gated = bool(tracked)
        for i in tracked:
            values[i] = passed_on(values[i], partial(self._deliver, i))
        for i in tracked:
            values[i] = passed_on(values[i], partial(self._note, "inputs", i))
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def leave(self, output: Any) -> Any:
        """The output behind its gates."""
        output = with_each(output, Tensor, lambda t: passed_on(t, self._pass) if t.requires_grad else t)
        return with_each(output, Tensor, self._last_gate)

    def _last_gate(self, t: Tensor) -> Tensor:
        place = self.outputs
        self.outputs += 1
        return passed_on(t, partial(self._note, "outputs", place)) if t.requires_grad else t

    def _notes(self) -> dict[str, Any]:
        """What arrived in this backward pass."""
        notes = pass_notes.get()
        assert notes is not None, "gates open in a backward pass only"
        return notes.setdefault(self, {"inputs": {}, "outputs": {}, "left": None})

    def _note(self, kind: str, place: int, g: Tensor) -> None:
        self._notes()[kind][place] = g

    def _pass(self, g: Tensor) -> None:
        if not self.gated:
            self._run()

    def _deliver(self, place: int, g: Tensor) -> Tensor | None:
        left = self._run()[place]
        return left if left is not self._notes()["inputs"][place] else None

    def _run(self) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments after the hooks, which run at the first call in a pass."""
        notes = self._notes()
        if notes["left"] is None:
            grad_inputs = tuple(notes["inputs"].get(i) for i in range(self.arguments))
            grad_outputs = tuple(notes["outputs"].get(i) for i in range(self.outputs))
            called = self.hooks if notes["outputs"] else {}  # what came another way is no business of theirs
            for hook in in_place(called):
                replaced = hook(self.module, grad_inputs, grad_outputs)
                if replaced is not None:
                    grad_inputs = self._checked(replaced, grad_inputs, hook)
            notes["left"] = grad_inputs
        return notes["left"]

    def _checked(self, replaced: Any, former: tuple, hook: Callable) -> tuple:
        """What a hook returned, as gradients of the arguments."""
        place = _place("backward hook", hook, self.module, self.path)
        if isinstance(replaced, (Tensor, np.ndarray)) and len(former) == 1:
            replaced = (replaced,)
        if not isinstance(replaced, (tuple, list)):
            raise TypeError(f"{place} returned {type(replaced).__name__}; it returns None or a tuple of grad_inputs")
        if len(replaced) != len(former):
            raise ValueError(f"{place} returned {len(replaced)} gradients for {len(former)} arguments")
        for i, (new, old) in enumerate(zip(replaced, former, strict=True)):
            if (new is None) != (old is None):
                wrong = "a gradient, but none arrives there" if old is None else "None; give zeros to stop a gradient"
                raise ValueError(f"{place} returned for argument {i} {wrong}")
        pairs = zip(replaced, former, strict=True)
        return tuple(
            old if new is old or old is None else checked(new, old.shape, old.dtype, f"{place}, argument {i},")
            for i, (new, old) in enumerate(pairs)
        )


def _place(kind: str, hook: Callable, module: Module, path: str | None = None) -> str:
    """A hook as messages call it, with its module."""
    if path is None:
        path = _path_here()
    return f"the {kind} {name_of(hook)} on {type(module).__name__}" + (f" {path!r}" if path else "")


def _path_here() -> str:
    """The path of the module whose forward runs."""
    frame = module_frame.get()
    return frame.path if frame is not None else ""


def _arguments(replaced: Any, former: tuple, place: str) -> tuple:
    """What a pre-hook returned, as the positional arguments."""
    if isinstance(replaced, tuple):
        return replaced
    if len(former) != 1 or isinstance(former[0], Tensor) > isinstance(replaced, (Tensor, np.ndarray)):
        raise TypeError(
            f"{place} returned {type(replaced).__name__}; it returns None or the positional arguments as a tuple, "
            f"of which there were {len(former)}"
        )
    return (replaced,)


def _check_output(replaced: Any, former: Any, place: str) -> None:
    """Refuse an output of another kind or shape than the module's own."""
    if isinstance(former, Tensor):
        if not isinstance(replaced, Tensor):
            raise TypeError(f"{place} returned {type(replaced).__name__}; it returns None or a Tensor")
        if replaced.shape != former.shape:
            raise ValueError(f"{place} returned shape {replaced.shape}; the output has shape {former.shape}")
    elif isinstance(former, tuple):
        if not isinstance(replaced, tuple) or len(replaced) != len(former):
            raise TypeError(f"{place} returned {type(replaced).__name__}; the output is a tuple of {len(former)}")
        for new, old in zip(replaced, former, strict=True):
            if new is not old:
                _check_output(new, old, place)
