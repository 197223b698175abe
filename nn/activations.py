"""Activation functions as modules, for Sequential."""

from __future__ import annotations

from typing import Any

from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn.module import Module
from tinygrad_qkv.tensor import Tensor


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Any) -> Tensor:
        return F.relu(x)


class GELU(Module):
    """x * Phi(x), exact by erf, or by tanh for approximate="tanh"."""

    def __init__(self, approximate: str = "none"):
        self.approximate = approximate

    def forward(self, x: Any) -> Tensor:
        return F.gelu(x, self.approximate)


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Any) -> Tensor:
        return F.silu(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Any) -> Tensor:
        return F.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Any) -> Tensor:
        return F.sigmoid(x)
