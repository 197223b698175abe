"""Everything that a layer computes, as functions: `from tinygrad_qkv.nn import functional as F`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.hints import missing
from tinygrad_qkv.nn.dot_product import scaled_dot_product_attention
from tinygrad_qkv.nn.losses import bce_with_logits, cross_entropy, huber, kl_div, l1, mse, nll
from tinygrad_qkv.nn.scalar_path import attention_node_count
from tinygrad_qkv.ops import (
    elu,
    embedding,
    gelu,
    layer_norm,
    leaky_relu,
    log_softmax,
    one_hot,
    pad,
    relu,
    rms_norm,
    sigmoid,
    silu,
    softmax,
    softplus,
    tanh,
)
from tinygrad_qkv.ops.products import affine
from tinygrad_qkv.ops.selection import probability
from tinygrad_qkv.tensor import Tensor

__all__ = [
    "attention_node_count",
    "bce_with_logits",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "gelu",
    "huber",
    "kl_div",
    "l1",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "mse",
    "nll",
    "one_hot",
    "pad",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
]


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """x @ weight.T + bias: x (..., in), weight (out, in), bias (out,) -> (..., out)."""
    x, weight = ops.tensor(x), ops.tensor(weight)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x (..., in) = {x.shape} does not fit weight (out, in) = {weight.shape}")
    if bias is None:
        return x @ weight.mT
    bias = ops.tensor(bias)
    if bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear: bias {bias.shape} does not fit weight (out, in) = {weight.shape}; it has shape (out,)"
        )
    return affine(x, weight.mT, bias)


def dropout(x: Any, p: float = 0.5, training: bool = True, generator: np.random.Generator | None = None) -> Tensor:
    """In training, zero each element with probability p and scale the others by 1 / (1 - p); else x itself."""
    probability(p)
    return ops.dropout(x, p, generator) if training else ops.tensor(x)


def __getattr__(name: str) -> Any:
    """Names that PyTorch uses and that are shorter here."""
    here = {
        "mse_loss": "mse",
        "l1_loss": "l1",
        "huber_loss": "huber",
        "nll_loss": "nll",
        "binary_cross_entropy_with_logits": "bce_with_logits",
    }
    raise missing(f"module {__name__!r}", name, here)
