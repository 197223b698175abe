"""Writing in place: how `t[...] = x`, `t += x` and their like change the values of a tensor that exists already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_qkv.memory import memory_of
from tinygrad_qkv.modes import grad_mode
from tinygrad_qkv.tensor import Tensor


def write(target: Any, op: Callable[..., Tensor], *operands: Any) -> Tensor:
    """Write op(target, *operands) into the memory of `target`, and let it take over that result's history.

    Ops that saved the former values refuse in backward (the write is numbered). A leaf that requires grad refuses,
    and so does a recorded write through memory that other tensors share: their history would not know of it.
    """
    recording = grad_mode.get()
    if recording and target.is_leaf and target.requires_grad:
        raise RuntimeError(
            "a leaf that requires grad is not written in place while gradients are recorded; "
            "write under no_grad(), or assign t.data"
        )
    before = Tensor.wrap(target._data.copy(), None, target._node)
    result = op(before, *(before if x is target else x for x in operands))  # h *= h saves what h was
    if result.shape != target.shape or not np.can_cast(result.dtype, target.dtype, "same_kind"):
        raise ValueError(
            f"cannot write a result of shape {result.shape} and {result.dtype} into shape {target.shape} and "
            f"{target.dtype} in place; use an ordinary expression, which makes a new tensor"
        )
    if result.dtype != target.dtype:
        result = result.astype(target.dtype)
    if result.requires_grad and memory_of(target).seen_by_others(target):
        raise RuntimeError(
            "this tensor shares its memory with another one (a view, or detach()); a recorded write would change "
            "both while only one gets the history: write t[i] = t[i] + 1 for t[i] += 1, or write into t.clone()"
        )
    if not target._data.flags.writeable:
        raise ValueError("this tensor is a read-only view (broadcast, or of a read-only array); write into t.clone()")
    np.copyto(target._data, result._data)
    memory_of(target).write()
    if recording:
        name = target.name
        target._node = result._node
        if name is not None and target._node is None:
            target.name = name
    return target
