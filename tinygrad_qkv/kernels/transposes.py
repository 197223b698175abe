"""Transposed copies of tiles, square by square in vector registers."""

from numba.core import cgutils, types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.simd import (
    VECTOR_BYTES,
    as_bytes,
    below,
    index,
    itemsize_of,
    load,
    register_of,
    shuffle,
    store,
)


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


@intrinsic
def _transpose_square(typingctx, source, out, i, k):
    """out[k + c, i + r] = source[i + r, k + c] for r and c below the number of lanes, as far as both arrays reach."""

    def codegen(context, builder, sig, args):
        vector = register_of(context.get_data_type(out.dtype))
        count, itemsize = vector.count, index(itemsize_of(vector))
        arrays = [context.make_array(kind)(context, builder, x) for kind, x in zip(sig.args[:2], args[:2], strict=True)]
        rows, columns = cgutils.unpack_tuple(builder, arrays[0].shape)
        steps = [builder.extract_value(x.strides, 0) for x in arrays]

        def place(n, line, across):
            """Element `across` of the line of array n."""
            offset = builder.add(builder.mul(line, steps[n]), builder.mul(across, itemsize))
            return builder.gep(as_bytes(builder, arrays[n].data), [offset])

        def emit(whole):
            inside_row = None if whole else below(builder, builder.sub(columns, args[3]), vector)
            lines = []
            for r in range(count):
                row = builder.add(args[2], index(r))
                if not whole:  # rows past the end repeat the last one, and are not stored
                    row = builder.select(builder.icmp_signed("<", row, rows), row, builder.sub(rows, index(1)))
                lines.append(load(builder, place(0, row, args[3]), vector, inside_row))
            inside_column = None if whole else below(builder, builder.sub(rows, args[2]), vector)
            for c, line in enumerate(_transposed(builder, lines)):
                column = builder.add(args[3], index(c))
                if whole:
                    store(builder, line, place(1, column, args[2]))
                else:
                    with builder.if_then(builder.icmp_signed("<", column, columns)):
                        store(builder, line, place(1, column, args[2]), inside_column)

        fits = [
            builder.icmp_signed("<=", builder.add(start, index(count)), end)
            for start, end in ((args[2], rows), (args[3], columns))
        ]
        with builder.if_else(builder.and_(*fits), likely=True) as (whole, edge):
            with whole:
                emit(True)
            with edge:
                emit(False)
        return context.get_dummy_value()

    return types.void(source, out, types.intp, types.intp), codegen


def _transpose_plain(source, out):
    out[...] = source.T


@kernel(plain=_transpose_plain)
def transpose(source, out):
    """out[k, i] = source[i, k], for source (n, m) and out (m, n), the rows of both contiguous at any distance."""
    lanes = VECTOR_BYTES // source.itemsize
    for i in range(0, source.shape[0], lanes):
        for k in range(0, source.shape[1], lanes):
            _transpose_square(source, out, i, k)
