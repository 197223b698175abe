"""Heads side by side in the last axis, or along an axis of their own: one op each way, where shapes would take two.

They are no public ops; multi-head attention calls them.
"""

from __future__ import annotations

import numpy as np

from tinygrad_qkv.autograd import record
from tinygrad_qkv.tensor import Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(..., positions, heads * width) -> (..., heads, positions, width), a view where strides allow it."""
    shape = x.shape
    y = x._data.reshape(*shape[:-1], heads, shape[-1] // heads).swapaxes(-2, -3)
    return record(y, "split_heads", (x,), (shape,), SPLIT_RULES, ("dx = reshape(swapaxes(g, -2, -3), shape)",))


SPLIT_RULES = (lambda g, shape: np.reshape(np.swapaxes(g, -2, -3), shape),)


def merge_heads(x: Tensor) -> Tensor:
    """(..., heads, positions, width) -> (..., positions, heads * width)."""
    apart = x._data.swapaxes(-2, -3)  # (..., positions, heads, width)
    shape = apart.shape
    y = apart.reshape(*shape[:-2], shape[-2] * shape[-1])
    return record(y, "merge_heads", (x,), (shape,), MERGE_RULES, ("dx = swapaxes(reshape(g, shape), -2, -3)",))


MERGE_RULES = (lambda g, shape: np.swapaxes(np.reshape(g, shape), -2, -3),)
