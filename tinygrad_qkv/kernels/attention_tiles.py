"""Building blocks of fused attention on tiles, the small matrices that stay in the cache.

A pass over a tile is a function of its own with one array in its inner loop: LLVM then keeps its constants in
registers over all rows, and need not fear that arrays overlap. Row by row, the constants alone cost 25 ns a row.
Sums may be reassociated, so that they run in vector lanes; their order depends on the tile's width alone.
"""

import numpy as np
from numba.core import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import JIT, kernel
from tinygrad_qkv.kernels.scalars import exp, of_rank, rank


@intrinsic
def _any_strides(typingctx, x):
    kind = types.Array(x.dtype, x.ndim, "A")
    return kind(x), lambda context, builder, sig, args: impl_ret_borrowed(context, builder, kind, args[0])


@intrinsic
def _close(typingctx, x):
    kind = types.Array(x.dtype, x.ndim, "C")
    return kind(x), lambda context, builder, sig, args: impl_ret_borrowed(context, builder, kind, args[0])


def _itself(x):
    return x


# The array as one of any strides that may be written: one type for all operands, so that what takes them is compiled
# once. Whoever calls it vouches that a read-only array is only read.
any_strides = _any_strides if JIT else _itself
# A row whose elements the caller knows to lie side by side, as an array of that type: its loops are vectorised.
close = _close if JIT else _itself
LANES = frozenset({"reassoc", "contract"})  # a sum in lanes; NaN and inf keep their meaning
# What tile_product does to its result. A literal True or False would be a type of its own, and another compilation.
ADD, SET = np.True_, np.False_


@kernel
def scratch(size, like):
    """`size` elements of the dtype of `like`, from the start of a cache line."""
    room = np.empty(size + 64 // like.itemsize, like.dtype)
    start = (-room.ctypes.data % 64) // like.itemsize
    return room[start : start + size]


@kernel
def matrix(room, rows, columns):
    """The first rows * columns elements of a flat array as a matrix."""
    return room[: rows * columns].reshape((rows, columns))


def _tile_max_plain(x, out):
    out[:] = x.max(1)


@kernel(plain=_tile_max_plain)
def tile_max(x, out):
    """out[i] = max(x[i]). NaN counts as any number may: the exponential of its row meets it again."""
    for i in range(x.shape[0]):
        top = rank(x[i, 0])
        for j in range(x.shape[1]):
            top = max(top, rank(x[i, j]))
        out[i] = of_rank(top)


@kernel(plain=np.subtract)
def _minus(a, b):
    """a - b, without the liberties of its caller: of a fused product the row's maximum, rounded, would not leave 0."""
    return a - b


def _tile_exp_plain(x, scale, shift, sums):
    exp(x * scale - shift[:, None], out=x)
    sums[:] = x.sum(1)


@kernel(plain=_tile_exp_plain, fastmath=LANES)
def tile_exp(x, scale, shift, sums):
    """x[i] = exp(x[i] * scale - shift[i]); sums[i] = sum(x[i])."""
    for i in range(x.shape[0]):
        s = shift[i]
        total = x.dtype.type(0)
        for j in range(x.shape[1]):
            e = exp(_minus(x[i, j] * scale, s))
            x[i, j] = e
            total += e
        sums[i] = total


def _tile_times_plain(x, factor):
    x *= factor


@kernel(plain=_tile_times_plain)
def tile_times(x, factor):
    """x *= factor."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] *= factor


@kernel
def rows_times(x, factors):
    """x[i] *= factors[i], rows with factor 1 left alone."""
    for i in range(x.shape[0]):
        if factors[i] != 1:
            _row_times(x[i], factors[i])


@kernel(plain=_tile_times_plain)
def _row_times(x, factor):
    for j in range(x.shape[0]):
        x[j] *= factor


def _softmax_pullback_plain(weights, x, mean):
    x[...] = weights * (x - mean[:, None])


@kernel(plain=_softmax_pullback_plain)
def tile_softmax_pullback(weights, x, mean):
    """x[i] = weights[i] * (x[i] - mean[i])."""
    for i in range(x.shape[0]):
        m = mean[i]
        for j in range(x.shape[1]):
            x[i, j] = weights[i, j] * (x[i, j] - m)
