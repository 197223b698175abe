"""Vector building blocks, written in LLVM IR where numba's loops would not become the right instructions.

Each block is an intrinsic with a plain NumPy body beside it, which runs under NUMBA_DISABLE_JIT. Arrays go into an
intrinsic whole and the pointer is taken inside: numba frees an array after its last use, and an address is no use.
"""

import platform
from collections.abc import Callable, Iterable

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

from tinygrad_qkv.kernels.compile import host_features, kernel


def _register_block() -> tuple[int, int, int, bool]:
    """(bytes of a vector register, rows and vectors of a register block, whether the host has fused multiply-add).

    A block of R rows and V vectors keeps R * V registers of sums, V of a line of the right operand and up to one of
    the left: there are 32 registers with AVX-512 and on ARM, 16 otherwise.  Each block divides a tile of 96 x 96.
    """
    features = host_features()
    if "avx512f" in features:
        return 64, 12, 2, True
    if "avx2" in features and "fma" in features:
        return 32, 6, 2, True
    if platform.machine().lower() in ("arm64", "aarch64"):  # NEON belongs to the architecture
        return 16, 8, 3, True
    return 16, 6, 2, False


VECTOR_BYTES, BLOCK_ROWS, BLOCK_VECTORS, HAS_FMA = _register_block()
ROW_VECTORS = 8  # of a block when there is one row alone: so many sums keep the multiply-adds busy
# Fewer rows at an edge are computed by the smallest of these that holds them.
EDGE_ROWS = (4, 8, 12)[: BLOCK_ROWS // 4] if BLOCK_ROWS % 4 == 0 else (2, 4, 6)


@register_jitable
def block_columns(itemsize: int) -> int:
    """Columns of a register block, for elements of `itemsize` bytes."""
    return BLOCK_VECTORS * VECTOR_BYTES // itemsize


def index(value: int) -> ir.Constant:
    """A constant of the type that indexes arrays."""
    return ir.Constant(ir.IntType(types.intp.bitwidth), value)


def as_bytes(builder, pointer):
    """The pointer, for offsets in bytes."""
    return builder.bitcast(pointer, ir.IntType(8).as_pointer())


def shuffle(builder, first, second, lanes: Iterable[int]):
    """A vector of the numbered lanes of two vectors, those of `second` numbered after those of `first`."""
    numbers = [ir.IntType(32)(lane) for lane in lanes]
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers))


def _spread(builder, x, vector):
    """A vector with the scalar x in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    return shuffle(builder, builder.insert_element(undefined, x, ir.IntType(32)(0)), undefined, [0] * vector.count)


def multiply_add(builder, x, y, z):
    """x * y + z on vectors, rounded once where the host can: llvmlite's own builder.fma takes scalars only."""
    if not HAS_FMA:
        return builder.fadd(builder.fmul(x, y), z)
    name = f"llvm.fma.v{x.type.count}{'f32' if x.type.element == ir.FloatType() else 'f64'}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type] * 3), name)
    return builder.call(function, [x, y, z])


def _prefetch(builder, place):
    """Ask for the cache line at `place`, which will be written."""
    i32 = ir.IntType(32)
    byte = as_bytes(builder, place)
    signature = ir.FunctionType(ir.VoidType(), [byte.type, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [byte, i32(1), i32(3), i32(1)])


class Lanes:
    """Vectors of one float type in memory: loaded and stored whole, or, with a mask, in part."""

    def __init__(self, builder, element: ir.Type, itemsize: int):
        self.builder, self.itemsize = builder, itemsize
        self.vector = ir.VectorType(element, VECTOR_BYTES // itemsize)
        self.zero = ir.Constant(self.vector, [ir.Constant(element, 0.0)] * self.vector.count)

    def at(self, start, v: int):
        """The place of the v-th vector from `start`, a pointer to bytes."""
        return self.builder.bitcast(self.builder.gep(start, [index(v * VECTOR_BYTES)]), self.vector.as_pointer())

    def below(self, count):
        """The mask of the lanes whose number is less than `count`."""
        numbers = ir.VectorType(count.type, self.vector.count)
        lanes = ir.Constant(numbers, [count.type(i) for i in range(self.vector.count)])
        return self.builder.icmp_signed("<", lanes, _spread(self.builder, count, numbers))

    def load(self, place, mask=None):
        """The vector at `place`; lanes outside the mask are 0 and not read."""
        if mask is None:
            return self.builder.load(place, align=self.itemsize)
        kinds = [place.type, ir.IntType(32), mask.type, self.vector]
        signature = ir.FunctionType(self.vector, kinds)
        return self._call("load", signature, [place, ir.IntType(32)(self.itemsize), mask, self.zero])

    def store(self, value, place, mask=None):
        """Write the vector; lanes outside the mask are not touched."""
        if mask is None:
            return self.builder.store(value, place, align=self.itemsize)
        kinds = [self.vector, place.type, ir.IntType(32), mask.type]
        signature = ir.FunctionType(ir.VoidType(), kinds)
        return self._call("store", signature, [value, place, ir.IntType(32)(self.itemsize), mask])

    def _call(self, action: str, signature: ir.FunctionType, arguments: list):
        name = f"llvm.masked.{action}.v{self.vector.count}f{8 * self.itemsize}.p0"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), arguments)


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
        itemsize = context.get_abi_sizeof(element)
        self.lanes = Lanes(builder, element, itemsize)
        across = builder.mul(j, index(itemsize))
        self.a = builder.gep(as_bytes(builder, a.data), [builder.mul(i, self.a_row)])
        self.b = builder.gep(as_bytes(builder, b.data), [across])
        self.c = builder.gep(as_bytes(builder, c.data), [builder.add(builder.mul(i, self.c_row), across)])


def _leave_as_it_is(builder, jump) -> None:
    """Keep LLVM from unrolling a loop that fills the registers as it stands: it would only take longer to compile."""
    module = builder.module
    node = module.add_metadata([ir.Constant(ir.IntType(64), len(module.metadata))])  # a number, so that it is a new one
    node.operands = [node, module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])]
    jump.set_metadata("llvm.loop", node)


def _sums(builder, x: _Operands, a_rows: list, masks: list) -> list:
    """sums[i, v] = sum over k of a[k, i] * b[k, v], each sum a phi node of the loop and so a register."""
    lanes = x.lanes
    before = builder.block
    loop, after = builder.append_basic_block("k"), builder.append_basic_block("summed")
    builder.cbranch(builder.icmp_signed("<", index(0), x.depth), loop, after)
    builder.position_at_end(loop)
    k, a_at, b_at = (builder.phi(x.depth.type) for _ in range(3))
    sums = [builder.phi(lanes.vector) for _ in range(len(a_rows) * len(masks))]
    start = builder.gep(x.b, [b_at])
    line = [lanes.load(lanes.at(start, v), mask) for v, mask in enumerate(masks)]
    grown: list[ir.Value] = []
    for row in a_rows:
        place = builder.bitcast(builder.gep(row, [a_at]), lanes.vector.element.as_pointer())
        value = _spread(builder, builder.load(place, align=lanes.itemsize), lanes.vector)
        grown += [multiply_add(builder, value, part, sums[len(grown) + v]) for v, part in enumerate(line)]
    after_k = [builder.add(k, index(1)), builder.add(a_at, x.a_step), builder.add(b_at, x.b_step)]
    starts = [index(0)] * 3 + [lanes.zero] * len(sums)
    for phi, first, following in zip([k, a_at, b_at, *sums], starts, after_k + grown, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, loop)
    _leave_as_it_is(builder, builder.cbranch(builder.icmp_signed("<", after_k[0], x.depth), loop, after))
    builder.position_at_end(after)
    totals = [builder.phi(lanes.vector) for _ in grown]
    for phi, value in zip(totals, grown, strict=True):
        phi.add_incoming(lanes.zero, before)
        phi.add_incoming(value, loop)
    return totals


def _write(builder, lanes: Lanes, add, places: list, totals: list, masks: list) -> None:
    """c = totals, or c += totals."""
    with builder.if_else(cgutils.is_not_null(builder, add)) as (with_old, alone):
        with with_old:
            for place, total, mask in zip(places, totals, masks, strict=True):
                lanes.store(builder.fadd(lanes.load(place, mask), total), place, mask)
        with alone:
            for place, total, mask in zip(places, totals, masks, strict=True):
                lanes.store(total, place, mask)


def _whole_block(builder, x: _Operands, height: int, vectors: int) -> None:
    """A block of exactly so many rows and vectors."""
    rows = range(height)
    c_rows = [builder.gep(x.c, [builder.mul(x.c_row, index(i))]) for i in rows]
    places = [x.lanes.at(row, v) for row in c_rows for v in range(vectors)]
    for place in places:
        _prefetch(builder, place)
    a_rows = [builder.gep(x.a, [builder.mul(x.a_row, index(i))]) for i in rows]
    totals = _sums(builder, x, a_rows, [None] * vectors)
    _write(builder, x.lanes, x.add, places, totals, [None] * len(places))


def _edge_block(builder, x: _Operands, height: int, vectors: int) -> None:
    """At most `height` rows and `vectors` vectors: rows past c's end repeat the last one and are not stored."""
    masks = [x.lanes.below(builder.sub(x.columns, index(v * x.lanes.vector.count))) for v in range(vectors)]
    last = builder.sub(x.rows, index(1))
    a_rows, places, inside = [], [], []
    for i in range(height):
        row = builder.select(builder.icmp_signed("<", index(i), x.rows), index(i), last)
        a_rows.append(builder.gep(x.a, [builder.mul(x.a_row, row)]))
        c_row = builder.gep(x.c, [builder.mul(x.c_row, row)])
        places += [x.lanes.at(c_row, v) for v in range(vectors)]
        counts = _spread(builder, builder.icmp_signed("<", index(i), x.rows), masks[0].type)
        inside += [builder.and_(mask, counts) for mask in masks]
    _write(builder, x.lanes, x.add, places, _sums(builder, x, a_rows, masks), inside)


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

    width = x.lanes.vector.count
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
        wide = builder.icmp_signed(">=", x.columns, index(BLOCK_VECTORS * x.lanes.vector.count))
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
