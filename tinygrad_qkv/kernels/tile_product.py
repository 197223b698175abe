"""The product of tiles that stay in the cache: blocks of sums in registers, fed by fused multiply-adds."""

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.simd import (
    BLOCK_ROWS,
    BLOCK_VECTORS,
    VECTOR_BYTES,
    as_bytes,
    below,
    block_columns,
    constant,
    index,
    itemsize_of,
    load,
    multiply_add,
    register_of,
    spread,
    store,
)

ROW_VECTORS = 8  # of a block when there is one row alone: so many sums keep the multiply-adds busy
# Fewer rows at an edge are computed by the smallest of these that holds them.
EDGE_ROWS = (4, 8, 12)[: BLOCK_ROWS // 4] if BLOCK_ROWS % 4 == 0 else (2, 4, 6)


class _Operands:
    """a, b and c of a block product as pointers to bytes at the block's first elements, with their strides."""

    def __init__(self, context, builder, sig, args):
        a, b, c = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(sig.args[:3], args[:3], strict=True)
        )
        i, j, self.add = args[3:]
        self.depth = builder.extract_value(a.shape, 0)
        self.a_step, self.a_row = cgutils.unpack_tuple(builder, a.strides)
        self.b_step, self.c_row = (builder.extract_value(x.strides, 0) for x in (b, c))
        rows, columns = cgutils.unpack_tuple(builder, c.shape)
        self.rows, self.columns = builder.sub(rows, i), builder.sub(columns, j)  # from the block to c's end
        element = context.get_data_type(sig.args[2].dtype)
        self.vector = register_of(element)
        across = builder.mul(j, index(itemsize_of(element)))
        self.a = builder.gep(as_bytes(builder, a.data), [builder.mul(i, self.a_row)])
        self.b = builder.gep(as_bytes(builder, b.data), [across])
        self.c = builder.gep(as_bytes(builder, c.data), [builder.add(builder.mul(i, self.c_row), across)])


def _vector_at(builder, start, v: int):
    """The place of the v-th vector from `start`, a pointer to bytes."""
    return builder.gep(start, [index(v * VECTOR_BYTES)])


def _prefetch(builder, place):
    """Ask for the cache line at `place`, which will be written."""
    i32 = ir.IntType(32)
    byte = as_bytes(builder, place)
    signature = ir.FunctionType(ir.VoidType(), [byte.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [byte, i32(1), i32(3), i32(1)])


def _leave_as_it_is(builder, jump) -> None:
    """Keep LLVM from unrolling a loop that fills the registers as it stands: it would only take longer to compile."""
    module = builder.module
    node = module.add_metadata([ir.Constant(ir.IntType(64), len(module.metadata))])  # a number, so that it is a new one
    node.operands = [node, module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])]
    jump.set_metadata("llvm.loop", node)


def _sums(builder, x: _Operands, a_rows: list, masks: list) -> list:
    """sums[i, v] = sum over k of a[k, i] * b[k, v], each sum a phi node of the loop and so a register."""
    before = builder.block
    loop, after = builder.append_basic_block("k"), builder.append_basic_block("summed")
    builder.cbranch(builder.icmp_signed("<", index(0), x.depth), loop, after)
    builder.position_at_end(loop)
    k, a_at, b_at = (builder.phi(x.depth.type) for _ in range(3))
    sums = [builder.phi(x.vector) for _ in range(len(a_rows) * len(masks))]
    start = builder.gep(x.b, [b_at])
    line = [load(builder, _vector_at(builder, start, v), x.vector, mask) for v, mask in enumerate(masks)]
    grown: list[ir.Value] = []
    for row in a_rows:
        place = builder.bitcast(builder.gep(row, [a_at]), x.vector.element.as_pointer())
        value = spread(builder, builder.load(place, align=itemsize_of(x.vector)), x.vector)
        grown += [multiply_add(builder, value, part, sums[len(grown) + v]) for v, part in enumerate(line)]
    after_k = [builder.add(k, index(1)), builder.add(a_at, x.a_step), builder.add(b_at, x.b_step)]
    zero = constant(x.vector, 0.0)
    starts = [index(0)] * 3 + [zero] * len(sums)
    for phi, first, following in zip([k, a_at, b_at, *sums], starts, after_k + grown, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)
    _leave_as_it_is(builder, builder.cbranch(builder.icmp_signed("<", after_k[0], x.depth), loop, after))
    builder.position_at_end(after)
    totals = [builder.phi(x.vector) for _ in grown]
    for phi, value in zip(totals, grown, strict=True):
        phi.add_incoming(zero, before)
        phi.add_incoming(value, loop)
    return totals


def _write(builder, add, places: list, totals: list, masks: list) -> None:
    """c = totals, or c += totals."""
    with builder.if_else(cgutils.is_not_null(builder, add)) as (with_old, alone):
        with with_old:
            for place, total, mask in zip(places, totals, masks, strict=True):
                store(builder, builder.fadd(load(builder, place, total.type, mask), total), place, mask)
        with alone:
            for place, total, mask in zip(places, totals, masks, strict=True):
                store(builder, total, place, mask)


def _whole_block(builder, x: _Operands, height: int, vectors: int) -> None:
    """A block of exactly so many rows and vectors."""
    rows = range(height)
    c_rows = [builder.gep(x.c, [builder.mul(x.c_row, index(i))]) for i in rows]
    places = [_vector_at(builder, row, v) for row in c_rows for v in range(vectors)]
    for place in places:
        _prefetch(builder, place)
    a_rows = [builder.gep(x.a, [builder.mul(x.a_row, index(i))]) for i in rows]
    totals = _sums(builder, x, a_rows, [None] * vectors)
    _write(builder, x.add, places, totals, [None] * len(places))


def _edge_block(builder, x: _Operands, height: int, vectors: int) -> None:
    """At most `height` rows and `vectors` vectors: rows past c's end repeat the last one and are not stored."""
    masks = [below(builder, builder.sub(x.columns, index(v * x.vector.count)), x.vector) for v in range(vectors)]
    last = builder.sub(x.rows, index(1))
    a_rows, places, inside = [], [], []
    for i in range(height):
        row = builder.select(builder.icmp_signed("<", index(i), x.rows), index(i), last)
        a_rows.append(builder.gep(x.a, [builder.mul(x.a_row, row)]))
        c_row = builder.gep(x.c, [builder.mul(x.c_row, row)])
        places += [_vector_at(builder, c_row, v) for v in range(vectors)]
        counts = spread(builder, builder.icmp_signed("<", index(i), x.rows), masks[0].type)
        inside += [builder.and_(mask, counts) for mask in masks]
    _write(builder, x.add, places, _sums(builder, x, a_rows, masks), inside)


def _smallest_edge_block(builder, x: _Operands) -> None:
    """The edge block with the fewest rows and vectors that hold what is left of c."""

    def choose(sizes: list[tuple[int, ir.Value]], emit: Callable[[int], None]) -> None:
        (size, enough), *larger = sizes
        if not larger:
            return emit(size)
        with builder.if_else(enough) as (this, others):
            with this:
                emit(size)
            with others:
                choose(larger, emit)

    width = x.vector.count
    heights = [(height, builder.icmp_signed("<=", x.rows, index(height))) for height in EDGE_ROWS]
    vectors = [(v, builder.icmp_signed("<=", x.columns, index(v * width))) for v in range(1, BLOCK_VECTORS + 1)]
    choose(heights, lambda height: choose(vectors, lambda v: _edge_block(builder, x, height, v)))


@intrinsic
def _row_product(typingctx, a, b, c, j, add):
    """ROW_VECTORS vectors of c's first row, from column j on."""

    def codegen(context, builder, sig, args):
        x = _Operands(context, builder, sig, [*args[:3], index(0), *args[3:]])
        _whole_block(builder, x, 1, ROW_VECTORS)
        return context.get_dummy_value()

    return types.void(a, b, c, types.intp, types.boolean), codegen


@intrinsic
def _block_product(typingctx, a, b, c, i, j, add):
    def codegen(context, builder, sig, args):
        x = _Operands(context, builder, sig, args)
        high = builder.icmp_signed(">=", x.rows, index(BLOCK_ROWS))
        wide = builder.icmp_signed(">=", x.columns, index(BLOCK_VECTORS * x.vector.count))
        with builder.if_else(builder.and_(high, wide), likely=True) as (whole, edge):
            with whole:
                _whole_block(builder, x, BLOCK_ROWS, BLOCK_VECTORS)
            with edge:
                _smallest_edge_block(builder, x)
        return context.get_dummy_value()

    return types.void(a, b, c, types.intp, types.intp, types.boolean), codegen


def _tile_product_plain(a, b, c, add):
    product = a[:, : c.shape[0]].T @ b[:, : c.shape[1]]
    c[...] = c + product if add else product


@kernel(plain=_tile_product_plain)
def tile_product(a, b, c, add):
    """c = a^T b, or c += a^T b, for a (depth, M), b (depth, N) and c (M, N) that stay in the cache.

    a and b may be wider than that, as packed panels are at an edge: what c does not ask for is not read.

    for j in steps of `block_columns`: for i in steps of BLOCK_ROWS:
        c[i : i + BLOCK_ROWS, j : j + block_columns] = or += sum over k of a[k, i : ...] * b[k, j : ...], in registers
    a has any strides, so a transposed operand costs nothing; the rows of b and of c are contiguous, at any distance.
    Every element is summed up in the order of k, whatever the blocks; c's old value is added last.
    """
    done = 0
    if c.shape[0] == 1:
        wide = ROW_VECTORS * VECTOR_BYTES // c.itemsize
        done = c.shape[1] // wide * wide
        for j in range(0, done, wide):
            _row_product(a, b, c, j, add)
    for j in range(done, c.shape[1], block_columns(c.itemsize)):
        for i in range(0, c.shape[0], BLOCK_ROWS):
            _block_product(a, b, c, i, j, add)
