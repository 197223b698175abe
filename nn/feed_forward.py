"""The Transformer's feed-forward layer."""

from __future__ import annotations

from typing import Any

from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn.linear import Linear
from tinygrad_qkv.nn.module import Module
from tinygrad_qkv.ops.selection import probability
from tinygrad_qkv.tensor import Tensor


class FeedForward(Module):
    """x (..., d_model) -> down(activation(up(x))): each position alone, through a wider layer of d_hidden.

    `d_hidden` defaults to 4 * d_model; `activation` is "relu" (the paper's), "gelu", "gelu_tanh" or "silu".
    Source: Vaswani et al. 2017, section 3.3.
    """

    ACTIVATIONS = {  # noqa: RUF012, a constant table
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, "tanh"),
        "silu": F.silu,
    }

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
    ):
        if activation not in self.ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(self.ACTIVATIONS)}, got {activation!r}")
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        self.activation, self.dropout = activation, probability(dropout)
        self.up = Linear(d_model, d_hidden, bias)
        self.down = Linear(d_hidden, d_model, bias)

    def forward(self, x: Any) -> Tensor:
        hidden = self.ACTIVATIONS[self.activation](self.up(x))
        return self.down(F.dropout(hidden, self.dropout, self.training))

    def describe(self) -> str:
        return self.activation + (f", dropout={self.dropout}" if self.dropout else "")
