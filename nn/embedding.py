"""Embedding: rows of a table, looked up by integer ids."""

from __future__ import annotations

from typing import Any

from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import init
from tinygrad_qkv.nn.arguments import sizes
from tinygrad_qkv.nn.module import Module, Parameter
from tinygrad_qkv.tensor import Tensor


class Embedding(Module):
    """Integer ids (...) -> rows of a table (..., width); weight (rows, width) starts normal with deviation 1.

    An id that is negative or not below `rows` raises IndexError.
    """

    def __init__(self, rows: int, width: int):
        self.rows, self.width = sizes("Embedding", rows=rows, width=width)
        self.weight = Parameter(init.normal((rows, width)))

    def forward(self, ids: Any) -> Tensor:
        return F.embedding(self.weight, ids)
