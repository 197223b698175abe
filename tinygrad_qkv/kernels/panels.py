"""Packing: operands of a matrix product copied into panels, in the order in which the register block reads them.

A panel (depth, width) holds `depth` lines of `width` neighbouring rows of the left operand, or columns of the right.
Two intrinsics move what memory order allows at a vector's speed; the loops beside them take edges and odd strides.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.simd import BLOCK_ROWS, VECTOR_BYTES, as_bytes, block_columns, index, shuffle


def _packer(width_for: Callable[[int], int]) -> Any:
    """The function that packs panels of `width_for(itemsize)` lines: the width is a constant in the machine code."""

    @intrinsic
    def copy_line(typingctx, source, panel, k):
        """panel[k, :] = source[k, :], where source[k, :] is contiguous."""

        def codegen(context, builder, sig, args):
            element = context.get_data_type(panel.dtype)
            itemsize = context.get_abi_sizeof(element)
            width = width_for(itemsize)
            line = ir.VectorType(element, width).as_pointer()
            source_array = context.make_array(sig.args[0])(context, builder, args[0])
            panel_array = context.make_array(sig.args[1])(context, builder, args[1])
            offset = builder.mul(args[2], builder.extract_value(source_array.strides, 0))
            place = builder.gep(as_bytes(builder, source_array.data), [offset])
            value = builder.load(builder.bitcast(place, line), align=itemsize)
            place = builder.gep(panel_array.data, [builder.mul(args[2], index(width))])
            builder.store(value, builder.bitcast(place, line), align=itemsize)
            return context.get_dummy_value()

        return types.void(source, panel, types.intp), codegen

    @intrinsic
    def copy_transposed(typingctx, source, panel, k):
        """panel[k : k + lanes, :] = source[k : k + lanes, :], where each source[:, i] is contiguous."""

        def codegen(context, builder, sig, args):
            element = context.get_data_type(panel.dtype)
            itemsize = context.get_abi_sizeof(element)
            width, lanes = width_for(itemsize), VECTOR_BYTES // itemsize
            vector = ir.VectorType(element, lanes)
            source_array = context.make_array(sig.args[0])(context, builder, args[0])
            panel_array = context.make_array(sig.args[1])(context, builder, args[1])
            stride = builder.extract_value(source_array.strides, 1)
            start = as_bytes(builder, builder.gep(source_array.data, [args[2]]))
            for first in range(0, width, lanes):
                count = min(lanes, width - first)
                rows = []
                for i in range(first, first + count):
                    place = builder.gep(start, [builder.mul(stride, index(i))])
                    rows.append(builder.load(builder.bitcast(place, vector.as_pointer()), align=itemsize))
                rows += [ir.Constant(vector, ir.Undefined)] * (lanes - count)
                for j, line in enumerate(_transposed(builder, rows)):
                    part = shuffle(builder, line, line, range(count))
                    at = builder.add(builder.mul(builder.add(args[2], index(j)), index(width)), index(first))
                    place = builder.bitcast(builder.gep(panel_array.data, [at]), part.type.as_pointer())
                    builder.store(part, place, align=itemsize)
            return context.get_dummy_value()

        return types.void(source, panel, types.intp), codegen

    @kernel(plain=_pack_plain)
    def pack(source, panel):
        """panel[k, i] = source[k, i]; lines past the operand's edge are zero."""
        depth, width = panel.shape
        whole = source.shape[1] == width
        done = 0
        if whole and source.strides[1] == source.itemsize:
            for k in range(depth):
                copy_line(source, panel, k)
            done = depth
        elif whole and source.strides[0] == source.itemsize:
            lanes = VECTOR_BYTES // source.itemsize
            done = depth - depth % lanes
            for k in range(0, done, lanes):
                copy_transposed(source, panel, k)
        for k in range(done, depth):
            for i in range(source.shape[1]):
                panel[k, i] = source[k, i]
            for i in range(source.shape[1], width):
                panel[k, i] = 0

    return pack


def _pack_plain(source, panel):
    panel[:, : source.shape[1]] = source
    panel[:, source.shape[1] :] = 0


def _transposed(builder, rows):
    """The square matrix whose rows are these vectors, transposed: each step swaps one bit of row and lane number."""
    lanes = len(rows)
    distance = 1
    while distance < lanes:
        swapped = list(rows)
        for i in (i for i in range(lanes) if not i & distance):
            # Numbers below `lanes` choose a lane of row i, the others one of its partner.
            low = [lanes + (j ^ distance) if j & distance else j for j in range(lanes)]
            high = [lanes + j if j & distance else j | distance for j in range(lanes)]
            swapped[i] = shuffle(builder, rows[i], rows[i | distance], low)
            swapped[i | distance] = shuffle(builder, rows[i], rows[i | distance], high)
        rows = swapped
        distance *= 2
    return rows


pack_left = _packer(lambda itemsize: BLOCK_ROWS)
pack_right = _packer(block_columns)
