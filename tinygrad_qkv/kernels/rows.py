"""Passes over one contiguous row, from which the row kernels are made.

Each is a function of its own: inside a larger one LLVM must assume that the arrays overlap, and vectorises nothing.
Sums may be reassociated, so that they run in vector lanes; their order then depends on the length alone.
"""

import numpy as np

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.scalars import exp, of_rank, rank

LANES = frozenset({"reassoc", "contract"})  # a sum in lanes; NaN and inf keep their meaning


@kernel(plain=lambda x: x.max())
def row_max(x):
    """max(x), x (n,) with n >= 1. NaN counts as any number may: whoever uses x next meets it again."""
    top = rank(x[0])
    for i in range(x.shape[0]):
        top = max(top, rank(x[i]))
    return of_rank(top)


@kernel(plain=lambda x: x.sum(), fastmath=LANES)
def row_sum(x):
    """sum(x)."""
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        total += x[i]
    return total


@kernel(plain=np.subtract)
def _minus(a, b):
    """a - b, a function of its own because it must not be reassociated: the sum below would take `shift` off last."""
    return a - b


@kernel(plain=lambda x, shift: (x - shift).sum(), fastmath=LANES)
def row_sum_above(x, shift):
    """sum(x - shift)."""
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        total += _minus(x[i], shift)
    return total


@kernel(plain=lambda x, y: (x * y).sum(), fastmath=LANES)
def row_dot(x, y):
    """sum(x * y)."""
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        total += x[i] * y[i]
    return total


@kernel(plain=lambda x, shift: exp(x - shift).sum(), fastmath=LANES)
def row_sum_exp(x, shift):
    """sum(exp(x - shift))."""
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        total += exp(x[i] - shift)
    return total


def _exp_into_plain(x, shift, out):
    exp(x - shift, out=out)
    return out.sum()


@kernel(plain=_exp_into_plain, fastmath=LANES)
def row_exp_into(x, shift, out):
    """out = exp(x - shift); returns its sum."""
    total = x.dtype.type(0)
    for i in range(x.shape[0]):
        e = exp(x[i] - shift)
        out[i] = e
        total += e
    return total


@kernel(plain=lambda x, out: np.add(out, x, out=out))
def row_add(x, out):
    """out += x."""
    for i in range(x.shape[0]):
        out[i] += x[i]
