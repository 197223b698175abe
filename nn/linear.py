"""Linear: a matrix product and a bias."""

from __future__ import annotations

import math
from typing import Any

from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import init
from tinygrad_qkv.nn.arguments import sizes
from tinygrad_qkv.nn.module import Module, Parameter
from tinygrad_qkv.tensor import Tensor


class Linear(Module):
    """x (..., in_features) -> x @ weight.T + bias (..., out_features).

    weight (out_features, in_features) as in PyTorch, bias (out_features,) or None; both start uniform within
    1 / sqrt(in_features) of 0.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        self.in_features, self.out_features = sizes("Linear", in_features=in_features, out_features=out_features)
        bound = 1 / math.sqrt(max(in_features, 1))
        self.weight = Parameter(init.uniform((out_features, in_features), -bound, bound))
        self.bias = Parameter(init.uniform((out_features,), -bound, bound)) if bias else None

    def forward(self, x: Any) -> Tensor:
        return F.linear(x, self.weight, self.bias)
