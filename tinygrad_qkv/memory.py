"""The buffers that tensors share, and the one count of nodes and of writes that tells which came first."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from tinygrad_qkv.locks import fork_safe_lock

if TYPE_CHECKING:
    from tinygrad_qkv.tensor import Tensor

tick = itertools.count(1).__next__
_writing = fork_safe_lock()


class Memory:
    """A tensor's buffer as its views see it: when the library last wrote to it, and which tensors share it."""

    written = 0  # in the numbering of the nodes
    latest = 0  # the last write to any memory: backward looks closer only at nodes that are older
    sharers: weakref.WeakValueDictionary[int, Tensor] | None = None  # by id: == compares element by element

    def write(self) -> None:
        """Number a write that has just changed the buffer."""
        with _writing:  # two threads must not set `latest` back
            self.written = Memory.latest = tick()

    def share(self, *tensors: Tensor) -> Memory:
        """Note that these tensors see the same buffer, for as long as they live."""
        if self.sharers is None:
            self.sharers = weakref.WeakValueDictionary()
        for tensor in tensors:
            self.sharers[id(tensor)] = tensor
        return self

    def seen_by_others(self, tensor: Tensor) -> bool:
        """Whether a tensor other than this one sees the buffer."""
        return self.sharers is not None and any(other is not tensor for other in self.sharers.values())
