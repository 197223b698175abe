"""The buffers that tensors share, and the one count of nodes and of writes that tells which came first."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from tinygrad_qkv.locks import fork_safe_lock

if TYPE_CHECKING:
    from tinygrad_qkv.tensor import Tensor

tick = itertools.count(1).__next__
_changing = fork_safe_lock()


class Memory:
    """A buffer as its tensors see it: when the library last wrote to it, and which tensors look into it.

    Few tensors need one, so it is made late: by a write, by a view, or by an op whose rules read its own result.
    """

    written = 0  # in the numbering of the nodes
    latest = 0  # the last write to any memory: backward looks closer only at nodes that are older
    room = 8  # how many viewers are noted before those that are gone are forgotten

    def __init__(self, tensor: Tensor):
        self.viewers = [weakref.ref(tensor)]

    def write(self) -> None:
        """Number a write that has just changed the buffer."""
        with _changing:  # two threads must not set `latest` back
            self.written = Memory.latest = tick()

    def share(self, view: Tensor) -> None:
        """Note that `view` looks into this buffer too."""
        with _changing:  # two threads must not lose each other's view
            if len(self.viewers) >= self.room:
                self.viewers = [viewer for viewer in self.viewers if viewer() is not None]
                self.room = 2 * len(self.viewers) + 8
            self.viewers.append(weakref.ref(view))
        view._memory = self

    def seen_by_others(self, tensor: Tensor) -> bool:
        """Whether a tensor other than this one sees the buffer."""
        others = (viewer() for viewer in self.viewers)
        return any(other is not None and other is not tensor for other in others)  # `in` compares element by element


def memory_of(tensor: Tensor) -> Memory:
    """The memory of a tensor, made now if nothing needed it before."""
    if tensor._memory is None:
        with _changing:  # two threads must not make two
            if tensor._memory is None:
                tensor._memory = Memory(tensor)
    return tensor._memory
