"""The learned maps around attention: the projections W_Q, W_K, W_V, and multi-head attention on top of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import init
from tinygrad_qkv.nn.arguments import sizes
from tinygrad_qkv.nn.dot_product import AttentionRecord
from tinygrad_qkv.nn.fused_path import all_finite
from tinygrad_qkv.nn.masks import MaskWords, refuse_unknown, seen_keys
from tinygrad_qkv.nn.module import Module, Parameter
from tinygrad_qkv.ops.heads import merge_heads, split_heads
from tinygrad_qkv.ops.products import affine
from tinygrad_qkv.ops.selection import probability
from tinygrad_qkv.tensor import Tensor


class QKVProjection(Module):
    """Queries, keys and values of an input: x @ W_Q + b_Q, x @ W_K + b_K, x @ W_V + b_V.

    W_Q (d_model, num_heads * d_k), W_K (kdim, num_kv_heads * d_k), W_V (vdim, num_kv_heads * d_v): (in, out), as in
    the paper. The heads stand side by side in the columns. Each matrix starts Xavier-uniform, biases (or None) at 0.
    """

    def __init__(
        self,
        d_model: int,
        d_k: int,
        d_v: int | None = None,
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
    ):
        self.d_model, self.num_heads, self.d_k = sizes("attention", d_model=d_model, num_heads=num_heads, d_k=d_k)
        self.d_v, self.num_kv_heads, self.kdim, self.vdim = sizes(
            "attention",
            d_v=d_k if d_v is None else d_v,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            kdim=d_model if kdim is None else kdim,
            vdim=d_model if vdim is None else vdim,
        )
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} query heads cannot share num_kv_heads={self.num_kv_heads} evenly; "
                "the second must divide the first"
            )
        widths = self.num_heads * self.d_k, self.num_kv_heads * self.d_k, self.num_kv_heads * self.d_v
        self.W_Q = Parameter(init.xavier_uniform((self.d_model, widths[0])))
        self.W_K = Parameter(init.xavier_uniform((self.kdim, widths[1])))
        self.W_V = Parameter(init.xavier_uniform((self.vdim, widths[2])))
        self.b_Q = Parameter(init.zeros((widths[0],))) if bias else None
        self.b_K = Parameter(init.zeros((widths[1],))) if bias else None
        self.b_V = Parameter(init.zeros((widths[2],))) if bias else None

    def forward(self, query: Any, key: Any = None, value: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """query (..., T, d_model), key (..., S, kdim), value (..., S, vdim) -> q, k, v with the heads in the last axis.

        `key` defaults to `query` (self-attention), `value` to `key`.
        """
        return self.project(*self.inputs(query, key, value))

    def inputs(self, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The three inputs with their defaults, after their shapes were checked."""
        if key is None and value is not None:
            raise ValueError("attention got value= without key=; pass both, or only the query for self-attention")
        query = ops.tensor(query)
        key = query if key is None else ops.tensor(key)
        value = key if value is None else ops.tensor(value)
        for name, width, x, W in (
            ("query", "d_model", query, self.W_Q),
            ("key", "kdim", key, self.W_K),
            ("value", "vdim", value, self.W_V),
        ):
            if x.ndim < 2 or x.shape[-1] != W.shape[0]:
                raise ValueError(f"{name} has shape (B, positions, {width}) with {width} = {W.shape[0]}, got {x.shape}")
        if not query.ndim == key.ndim == value.ndim or key.shape[-2] != value.shape[-2]:
            raise ValueError(
                f"query (B, T, d_model) = {query.shape}, key (B, S, kdim) = {key.shape} and value (B, S, vdim) = "
                f"{value.shape} need the same number of axes, and key and value the same S"
            )
        return query, key, value

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three products with the learned matrices."""
        q = _mapped(query, self.W_Q, self.b_Q)  # (..., T, heads * d_k)
        k = _mapped(key, self.W_K, self.b_K)  # (..., S, kv_heads * d_k)
        v = _mapped(value, self.W_V, self.b_V)  # (..., S, kv_heads * d_v)
        return q, k, v

    def describe(self) -> str:
        heads = f"heads={self.num_heads}" if self.num_heads > 1 else ""
        shared = f"kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        return ", ".join(part for part in (heads, shared, f"d_k={self.d_k}", f"d_v={self.d_v}") if part)


class MultiHeadAttention(QKVProjection):
    """Attention in num_heads subspaces at once, joined by W_O: concat(head_1, ..., head_H) @ W_O + b_O.

    `d_k` and `d_v` are the widths of one head; both default to d_model / num_heads, which must then be whole.
    W_O (num_heads * d_v, d_model). `num_kv_heads` fewer heads for keys and values are shared by neighbouring query
    heads. `dropout` drops weights, in training only. Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_k: int | None = None,
        d_v: int | None = None,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        sizes("MultiHeadAttention", d_model=d_model, num_heads=num_heads)
        if num_heads < 1 or (d_k is None and d_model % num_heads):
            raise ValueError(
                f"d_model={d_model} does not divide into num_heads={num_heads} equal heads; "
                "change one of them, or give the width of a head: d_k="
            )
        super().__init__(
            d_model,
            d_model // num_heads if d_k is None else d_k,
            d_v,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            kdim=kdim,
            vdim=vdim,
            bias=bias,
        )
        self.dropout = probability(dropout)
        self.W_O = Parameter(init.xavier_uniform((num_heads * self.d_v, d_model)))
        self.b_O = Parameter(init.zeros((d_model,))) if bias else None

    def forward(
        self,
        query: Any,
        key: Any = None,
        value: Any = None,
        *,
        path: str | None = None,
        need: Iterable[str] = (),
        **masks: Unpack[MaskWords],
    ) -> Any:
        """query (B, T, d_model), key (B, S, kdim), value (B, S, vdim) -> (B, T, d_model); without B too.

        `key` defaults to `query` (self-attention), `value` to `key`. Masks are those of
        `F.scaled_dot_product_attention` for scores (B, H, T, S), and so is `path`; the products with W_Q, W_K, W_V
        and W_O are matrix products on every path. With `need` it returns (output, record), where record.weights is
        (B, H, T, S), q (B, H, T, d_k), k (B, H, S, d_k), v (B, H, S, d_v).
        """
        unknown = {word: mask for word, mask in masks.items() if word not in MaskWords.__annotations__}
        refuse_unknown(unknown, "path", "need")
        query, key, value = self.inputs(query, key, value)
        if masks:
            key, value = self._without_nan_behind(masks, query, key, value)
        q, k, v = self.project(query, key, value)
        lone = query.ndim == 2  # no batch axis: make one, so that heads are axis -3 of four
        if lone:
            q, k, v = ops.unsqueeze(q, 0), ops.unsqueeze(k, 0), ops.unsqueeze(v, 0)
        wanted = tuple(need) if not isinstance(need, str) else need
        result = F.scaled_dot_product_attention(
            split_heads(q, self.num_heads),  # (B, H, T, d_k)
            split_heads(k, self.num_kv_heads),
            split_heads(v, self.num_kv_heads),
            dropout_p=self.dropout if self.training else 0.0,
            path=path,
            need=wanted,
            **masks,
        )
        heads, record = result if wanted else (result, None)
        output = _mapped(merge_heads(heads), self.W_O, self.b_O)
        if lone:
            output = output.squeeze(0)
            record = record and AttentionRecord(*(t if t is None else t.squeeze(0) for t in record))
        return (output, record) if wanted else output

    def _without_nan_behind(self, masks: MaskWords, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value inputs with zeros in rows that no query may see, if they are not finite.

        Such a row gives its key and value no gradient, but 0 * NaN would put NaN into that of W_K and W_V.
        """
        if all_finite(key) and all_finite(value):
            return key, value
        lead, S = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]), key.shape[-2]
        seen = seen_keys((*(lead or (1,)), self.num_heads, query.shape[-2], S), masks)
        if seen is None:
            return key, value
        seen = seen.reshape(*lead, S, 1)
        return ops.where(seen, key, 0), ops.where(seen, value, 0)

    def describe(self) -> str:
        return super().describe() + (f", dropout={self.dropout}" if self.dropout else "")


def _mapped(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """x @ W + b, or x @ W without a bias."""
    return x @ W if b is None else affine(x, W, b)
