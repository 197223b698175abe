"""Dot products of one vector with many contiguous rows, several rows at a time, so that a part of it serves all."""

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.simd import (
    as_bytes,
    below,
    constant,
    index,
    itemsize_of,
    load,
    multiply_add,
    register_of,
    store,
)
from tinygrad_qkv.kernels.vectors import across

ROWS = 8  # so many sums keep the multiply-adds busy


@intrinsic
def _dots_of_block(typingctx, a, x, out, start):
    """out[r] = sum over k of a[r, k] * x[k], for the ROWS rows from `start`; rows past the end are not stored."""

    def codegen(context, builder, sig, args):
        matrix, vector, result = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(sig.args[:3], args[:3], strict=True)
        )
        kind = register_of(context.get_data_type(out.dtype))
        count = index(kind.count)
        rows, length = cgutils.unpack_tuple(builder, matrix.shape)
        step = builder.extract_value(matrix.strides, 0)
        starts = []
        for number in (builder.add(args[3], index(r)) for r in range(ROWS)):
            row = builder.select(builder.icmp_signed("<", number, rows), number, args[3])
            starts.append(builder.gep(as_bytes(builder, matrix.data), [builder.mul(row, step)]))
        whole = builder.sub(length, builder.srem(length, count))
        sums = [cgutils.alloca_once_value(builder, constant(kind, 0.0)) for _ in starts]  # LLVM keeps them in registers

        def add(k, mask=None):
            offset = builder.mul(k, index(itemsize_of(kind)))
            part = load(builder, builder.gep(as_bytes(builder, vector.data), [offset]), kind, mask)
            for row, total in zip(starts, sums, strict=True):
                value = load(builder, builder.gep(row, [offset]), kind, mask)
                builder.store(multiply_add(builder, value, part, builder.load(total)), total)

        with cgutils.for_range_slice(builder, index(0), whole, count) as (k, _):
            add(k)
        with builder.if_then(builder.icmp_signed("<", whole, length)):
            add(whole, below(builder, builder.sub(length, whole), kind))
        totals = across(builder, np.add, [builder.load(total) for total in sums])
        inside = below(builder, builder.sub(rows, args[3]), totals.type)
        store(builder, totals, builder.gep(result.data, [args[3]]), inside)
        return context.get_dummy_value()

    return types.void(a, x, out, types.intp), codegen


def _dots_plain(a, x, out):
    out[...] = a @ x


@kernel(plain=_dots_plain)
def dots(a, x, out):
    """out[r] = sum over k of a[r, k] * x[k], for a (R, K), x (K,), out (R,); rows are contiguous, at any distance."""
    for r in range(0, a.shape[0], ROWS):
        _dots_of_block(a, x, out, r)
