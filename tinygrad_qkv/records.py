"""`with recording():` keeps values, gradients and source lines beside the graph."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

from tinygrad_qkv.autograd import leaf_node
from tinygrad_qkv.hooks import hooks_of
from tinygrad_qkv.observers import Observer, Watch
from tinygrad_qkv.tensor import Tensor


class Line(NamedTuple):
    """The user's source line that called an op; as text its file is named from the working directory on."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file.removeprefix(os.getcwd() + os.sep)}:{self.number}"


class recording(Watch):  # noqa: N801, named like the functions beside it
    """Every node recorded inside also keeps its value, its gradient and the user's source line.

    Drawings of values and gradients, `t.gradient()` and `diagnose` read this record. The values are copies, so the
    memory of a forward pass about doubles; off, it costs nothing.
    """

    def inside(self, former: tuple[Observer, ...]) -> tuple[Observer, ...]:
        """Once is enough."""
        return former if any(isinstance(observer, recording) for observer in former) else (*former, self)

    def op_ran(self, out: Tensor, op: str, parents: tuple[Tensor | float, ...]) -> None:
        """Copy the values (a later in-place step must not change the record), and note where a graph was cut."""
        node = out._node
        if node is None:
            nodes = (p._node for p in parents if isinstance(p, Tensor) and p._node is not None)
            cut = tuple(n for n in nodes if n.requires_grad or n.cut_from)
            if not cut:
                return
            node = leaf_node(out)
            node.op, node.cut_from = op, cut
        else:
            hooks_of(node).keep = True
        node.value = out._data.copy()
        node.line = user_line()
        for p in parents:
            if isinstance(p, Tensor) and leaf_node(p).is_leaf:
                leaf_node(p).value = p._data.copy()


def user_line() -> Line | None:
    """The innermost line of the call stack that lies outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tinygrad_qkv."):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
