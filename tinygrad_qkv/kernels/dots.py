"""Dot products of one vector with many contiguous rows, several rows at a time, so that a part of it serves all."""

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.simd import Lanes, as_bytes, index, multiply_add

ROWS = 8  # so many sums keep the multiply-adds busy


def _total(builder, lanes: Lanes, vector):
    """The sum of a vector's lanes, in an order that LLVM chooses once and for all."""
    element = lanes.vector.element
    name = f"llvm.vector.reduce.fadd.v{lanes.vector.count}f{8 * lanes.itemsize}"
    signature = ir.FunctionType(element, [element, lanes.vector])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, [ir.Constant(element, -0.0), vector], fastmath=("reassoc",))


@intrinsic
def _dots_of_block(typingctx, a, x, out, start):
    """out[r] = sum over k of a[r, k] * x[k], for the ROWS rows from `start`; rows past the end are not stored."""

    def codegen(context, builder, sig, args):
        matrix, vector, result = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(sig.args[:3], args[:3], strict=True)
        )
        element = context.get_data_type(out.dtype)
        lanes = Lanes(builder, element, context.get_abi_sizeof(element))
        count = index(lanes.vector.count)
        rows, length = cgutils.unpack_tuple(builder, matrix.shape)
        step = builder.extract_value(matrix.strides, 0)
        numbers = [builder.add(args[3], index(r)) for r in range(ROWS)]
        inside = [builder.icmp_signed("<", number, rows) for number in numbers]
        starts = []
        for number, valid in zip(numbers, inside, strict=True):
            row = builder.select(valid, number, args[3])
            starts.append(builder.gep(as_bytes(builder, matrix.data), [builder.mul(row, step)]))
        whole = builder.sub(length, builder.srem(length, count))
        sums = [cgutils.alloca_once_value(builder, lanes.zero) for _ in starts]  # LLVM keeps them in registers

        def add(k, mask=None):
            across = builder.mul(k, index(lanes.itemsize))
            part = lanes.load(lanes.at(builder.gep(as_bytes(builder, vector.data), [across]), 0), mask)
            for row, total in zip(starts, sums, strict=True):
                value = lanes.load(lanes.at(builder.gep(row, [across]), 0), mask)
                builder.store(multiply_add(builder, value, part, builder.load(total)), total)

        with cgutils.for_range_slice(builder, index(0), whole, count) as (k, _):
            add(k)
        with builder.if_then(builder.icmp_signed("<", whole, length)):
            add(whole, lanes.below(builder.sub(length, whole)))
        for number, valid, total in zip(numbers, inside, sums, strict=True):
            with builder.if_then(valid):
                builder.store(_total(builder, lanes, builder.load(total)), builder.gep(result.data, [number]))
        return context.get_dummy_value()

    return types.void(a, x, out, types.intp), codegen


def _dots_plain(a, x, out):
    out[...] = a @ x


@kernel(plain=_dots_plain)
def dots(a, x, out):
    """out[r] = sum over k of a[r, k] * x[k], for a (R, K), x (K,), out (R,); rows are contiguous, at any distance."""
    for r in range(0, a.shape[0], ROWS):
        _dots_of_block(a, x, out, r)
