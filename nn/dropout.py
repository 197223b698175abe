"""Dropout: random zeros in training."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn.module import Module
from tinygrad_qkv.ops.selection import probability
from tinygrad_qkv.tensor import Tensor


class Dropout(Module):
    """In training, zero each element with probability p and scale the others by 1 / (1 - p); in eval x itself."""

    def __init__(self, p: float = 0.5, generator: np.random.Generator | None = None):
        self.p, self.generator = probability(p), generator

    def forward(self, x: Any) -> Tensor:
        return F.dropout(x, self.p, self.training, self.generator)

    def describe(self) -> str:
        return f"p={self.p}"
