"""Numerical kernels: NumPy arrays in, NumPy arrays out.

They know no Tensor and no gradient tape. Importing this package compiles nothing: a kernel is compiled (or loaded from
its disk cache) when it is first called with a dtype.
"""

from tinygrad_qkv.kernels.activations import (
    relu,
    relu_pullback,
    sigmoid,
    sigmoid_pullback,
    silu,
    silu_pullback,
    softplus,
    softplus_pullback,
    tanh,
    tanh_pullback,
)
from tinygrad_qkv.kernels.adam import adam_step
from tinygrad_qkv.kernels.attention import attention, attention_pullback
from tinygrad_qkv.kernels.cross_entropy import cross_entropy, cross_entropy_pullback
from tinygrad_qkv.kernels.dropout import dropout
from tinygrad_qkv.kernels.gather import gather
from tinygrad_qkv.kernels.gelu import gelu, gelu_pullback, gelu_tanh, gelu_tanh_pullback
from tinygrad_qkv.kernels.layer_norm import layer_norm, layer_norm_pullback
from tinygrad_qkv.kernels.matmul import matmul
from tinygrad_qkv.kernels.reductions import largest, smallest, total
from tinygrad_qkv.kernels.rms_norm import rms_norm, rms_norm_pullback
from tinygrad_qkv.kernels.scatter import scatter_add
from tinygrad_qkv.kernels.select import select
from tinygrad_qkv.kernels.softmax import log_softmax, log_softmax_pullback, softmax, softmax_pullback
from tinygrad_qkv.kernels.special import erf
from tinygrad_qkv.kernels.threads import get_num_threads, set_num_threads

__all__ = [
    "adam_step",
    "attention",
    "attention_pullback",
    "cross_entropy",
    "cross_entropy_pullback",
    "dropout",
    "erf",
    "gather",
    "gelu",
    "gelu_pullback",
    "gelu_tanh",
    "gelu_tanh_pullback",
    "get_num_threads",
    "largest",
    "layer_norm",
    "layer_norm_pullback",
    "log_softmax",
    "log_softmax_pullback",
    "matmul",
    "relu",
    "relu_pullback",
    "rms_norm",
    "rms_norm_pullback",
    "scatter_add",
    "select",
    "set_num_threads",
    "sigmoid",
    "sigmoid_pullback",
    "silu",
    "silu_pullback",
    "smallest",
    "softmax",
    "softmax_pullback",
    "softplus",
    "softplus_pullback",
    "tanh",
    "tanh_pullback",
    "total",
]
