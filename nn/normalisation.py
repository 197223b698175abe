"""Layers that bring each row to a common scale."""

from __future__ import annotations

from typing import Any

from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import init
from tinygrad_qkv.nn.arguments import sizes
from tinygrad_qkv.nn.module import Module, Parameter
from tinygrad_qkv.tensor import Tensor


class LayerNorm(Module):
    """Each row of x (..., width) with mean 0 and variance 1, times weight plus bias, both (width,).

    The variance is biased and `eps` stands inside the root. Source: Ba, Kiros, Hinton 2016.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        (self.width,) = sizes("LayerNorm", width=width)
        self.eps = eps
        self.weight = Parameter(init.ones((width,)))
        self.bias = Parameter(init.zeros((width,)))

    def forward(self, x: Any) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """Each row of x (..., width) divided by the root of its mean square, times weight (width,).

    `eps` stands inside the root. Source: Zhang, Sennrich 2019.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        (self.width,) = sizes("RMSNorm", width=width)
        self.eps = eps
        self.weight = Parameter(init.ones((width,)))

    def forward(self, x: Any) -> Tensor:
        return F.rms_norm(x, self.weight, self.eps)
