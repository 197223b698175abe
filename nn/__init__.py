"""Layers, attention, losses and optimisers; the import name of this folder is `tinygrad_qkv.nn`."""

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING

from tinygrad_qkv.hints import missing
from tinygrad_qkv.nn import functional, init, losses, optim
from tinygrad_qkv.nn.activations import GELU, ReLU, Sigmoid, SiLU, Tanh
from tinygrad_qkv.nn.attention import MultiHeadAttention, QKVProjection
from tinygrad_qkv.nn.checkpoint import load, save
from tinygrad_qkv.nn.containers import ModuleList, Sequential
from tinygrad_qkv.nn.dot_product import AttentionRecord
from tinygrad_qkv.nn.dropout import Dropout
from tinygrad_qkv.nn.embedding import Embedding
from tinygrad_qkv.nn.feed_forward import FeedForward
from tinygrad_qkv.nn.linear import Linear
from tinygrad_qkv.nn.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
)
from tinygrad_qkv.nn.module import Module, Parameter
from tinygrad_qkv.nn.normalisation import LayerNorm, RMSNorm
from tinygrad_qkv.nn.transformer import SinusoidalPositions, TransformerBlock

__all__ = [
    "GELU",
    "AttentionRecord",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "FeedForward",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "NLLLoss",
    "Parameter",
    "QKVProjection",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SinusoidalPositions",
    "Tanh",
    "TransformerBlock",
    "functional",
    "init",
    "load",
    "losses",
    "optim",
    "save",
]

if not TYPE_CHECKING:  # a type checker would take every name for a name of this module

    def __getattr__(name: str) -> None:
        """Names that PyTorch uses for what has another name here."""
        here = {
            "MultiheadAttention": "MultiHeadAttention",
            "TransformerEncoderLayer": "TransformerBlock",
            "TransformerDecoderLayer": "TransformerBlock (give it is_causal=True)",
            "SmoothL1Loss": "HuberLoss",
            "utils": "optim.clip_grad_norm, save and load",
        }
        raise missing(f"module {__name__!r}", name, here)


# `import nn` works in a checkout. The names that it finds are the canonical modules themselves, so that a class is one
# class however it was imported, and pickles by its canonical name.
if __name__ == "nn":
    sys.modules["nn"] = importlib.import_module("tinygrad_qkv.nn")
    for _module in pkgutil.iter_modules(__path__):
        sys.modules[f"nn.{_module.name}"] = importlib.import_module(f"tinygrad_qkv.nn.{_module.name}")
