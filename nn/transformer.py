"""The parts of a Transformer: the block of attention and feed-forward layers, and sinusoidal positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn.arguments import sizes
from tinygrad_qkv.nn.attention import MultiHeadAttention
from tinygrad_qkv.nn.feed_forward import FeedForward
from tinygrad_qkv.nn.masks import MaskWords
from tinygrad_qkv.nn.module import Module
from tinygrad_qkv.nn.normalisation import LayerNorm
from tinygrad_qkv.ops.selection import probability
from tinygrad_qkv.tensor import Tensor


class TransformerBlock(Module):
    """x (B, T, d_model) -> the same shape, through attention and then a feed-forward layer, each beside a residual.

    norm="pre" normalises what enters each part: x + attn(norm1(x)), then x + feed(norm2(x)) (GPT-2's way).
    norm="post" normalises what comes out: norm1(x + attn(x)), then norm2(x + feed(x)) (the paper's).
    `dropout` acts on the weights, inside the feed-forward layer and on both parts' results, in training only.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_hidden: int | None = None,
        *,
        norm: str = "pre",
        activation: str = "relu",
        num_kv_heads: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        if norm not in ("pre", "post"):
            raise ValueError(f"norm is 'pre' or 'post', got {norm!r}")
        self.norm, self.dropout = norm, probability(dropout)
        self.norm1 = LayerNorm(d_model)
        self.attn = MultiHeadAttention(d_model, num_heads, num_kv_heads=num_kv_heads, bias=bias, dropout=dropout)
        self.norm2 = LayerNorm(d_model)
        self.feed = FeedForward(d_model, d_hidden, activation=activation, bias=bias, dropout=dropout)

    def forward(self, x: Any, *, path: str | None = None, need: Iterable[str] = (), **masks: Unpack[MaskWords]) -> Any:
        """Masks, `path` and `need` go to the attention; with `need` it returns (output, record)."""
        x = ops.tensor(x)
        pre = self.norm == "pre"
        result = self.attn(self.norm1(x) if pre else x, path=path, need=need, **masks)
        attended, record = result if isinstance(result, tuple) else (result, None)
        x = x + F.dropout(attended, self.dropout, self.training)
        x = x if pre else self.norm1(x)
        fed = self.feed(self.norm2(x) if pre else x)
        x = x + F.dropout(fed, self.dropout, self.training)
        x = x if pre else self.norm2(x)
        return x if record is None else (x, record)

    def describe(self) -> str:
        return f"norm={self.norm}" + (f", dropout={self.dropout}" if self.dropout else "")


class SinusoidalPositions(Module):
    """x (..., T, d_model) plus a sine and cosine wave per pair of columns, from wavelength 2 pi to 10000 * 2 pi.

    Column 2 i of position t is sin(t / 10000^(2 i / d_model)), column 2 i + 1 its cosine. Nothing is learned and
    nothing stored. Source: Vaswani et al. 2017, section 3.5.
    """

    def __init__(self, d_model: int):
        (self.d_model,) = sizes("SinusoidalPositions", d_model=d_model)

    def forward(self, x: Any, offset: int = 0) -> Tensor:
        """`offset` is the position of the first row, e.g. the number of positions in a cache."""
        x = ops.tensor(x)
        if x.ndim < 2 or x.shape[-1] != self.d_model:
            raise ValueError(f"x has shape (..., T, d_model) with d_model = {self.d_model}, got {x.shape}")
        return x + self.table(x.shape[-2], offset).astype(x.dtype if x.dtype.char in "fd" else np.float32)

    def table(self, length: int, offset: int = 0) -> np.ndarray:
        """(length, d_model) float64: the waves at the positions offset .. offset + length - 1."""
        columns = np.arange(self.d_model)
        wavelengths = 10000.0 ** (columns // 2 * 2 / max(self.d_model, 1))
        angles = (offset + np.arange(length))[:, None] / wavelengths
        return np.where(columns % 2 == 0, np.sin(angles), np.cos(angles))

    def describe(self) -> str:
        return f"d_model={self.d_model}"
