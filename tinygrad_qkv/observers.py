"""Who looks on while ops run, and while backward goes through their rules: recording, the ledger, the profiler."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from tinygrad_qkv.modes import Frame, Mode

if TYPE_CHECKING:
    from tinygrad_qkv.autograd import Node
    from tinygrad_qkv.tensor import Tensor


class Part(NamedTuple):
    """What one operand of an op gets from its rule: the operand's place among the parents, its node, the gradient."""

    operand: int
    parent: Node
    value: Any
    first: bool  # nothing had arrived at the operand before


class Observer:
    """Is told what the engine does, in the order in which it happens; does nothing about it by default.

    What it is given it may read and not change. An exception that it raises ends the forward or backward pass; the
    graph and all stored gradients are then as they were.
    """

    sees_second_runs = False  # whether it is told of what a checkpoint runs again in backward, beside the one rule

    def op_ran(self, out: Tensor, op: str, parents: tuple[Tensor | float, ...]) -> None:
        """An op made `out`; `out._node` is its node if it was put on the tape."""

    def module_entered(self, frame: Frame) -> None:
        """A module's forward begins."""

    def module_left(self, frame: Frame) -> None:
        """A module's forward has ended, or raised."""

    def root_given(self, root: Tensor, g: Tensor) -> None:
        """A backward pass from `root` with the gradient `g` is asked for; only observers of a block are told."""

    def backward_started(self, roots: dict[Node, Any]) -> None:
        """A backward pass begins with these gradients."""

    def hooks_ran(self, node: Node, g: Any) -> None:
        """The hooks of `node` saw its whole gradient, and `g` goes on; a kept gradient counts as a hook."""

    def rules_ran(self, node: Node, inputs: tuple, parts: list[Part]) -> None:
        """The rules of `node` were called as rule(*inputs), inputs = (g, *saved), and gave `parts`."""

    def backward_ended(self) -> None:
        """The pass is through."""


observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


class Watch(Mode, Observer):
    """An observer that looks on inside a `with` block."""

    variable = observers

    def inside(self, former: tuple[Observer, ...]) -> tuple[Observer, ...]:
        return (*former, self)
