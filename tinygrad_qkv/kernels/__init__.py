"""Numerical kernels: NumPy arrays in, NumPy arrays out.

They know no Tensor and no gradient tape. Importing this package compiles nothing: a kernel is compiled (or loaded from
its disk cache) when it is first called with a dtype.
"""

from tinygrad_qkv.kernels.adam import adam_step
from tinygrad_qkv.kernels.cross_entropy import cross_entropy, cross_entropy_pullback
from tinygrad_qkv.kernels.dropout import dropout
from tinygrad_qkv.kernels.layer_norm import layer_norm, layer_norm_pullback
from tinygrad_qkv.kernels.matmul import matmul
from tinygrad_qkv.kernels.scatter import scatter_add
from tinygrad_qkv.kernels.softmax import log_softmax, log_softmax_pullback, softmax, softmax_pullback
from tinygrad_qkv.kernels.special import erf
from tinygrad_qkv.kernels.threads import get_num_threads, set_num_threads

__all__ = [
    "adam_step",
    "cross_entropy",
    "cross_entropy_pullback",
    "dropout",
    "erf",
    "get_num_threads",
    "layer_norm",
    "layer_norm_pullback",
    "log_softmax",
    "log_softmax_pullback",
    "matmul",
    "scatter_add",
    "set_num_threads",
    "softmax",
    "softmax_pullback",
]
