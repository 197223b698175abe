"""Vector building blocks, written in LLVM IR where numba's loops would not become the right instructions.

Each block is an intrinsic with a plain NumPy body beside it, which runs under NUMBA_DISABLE_JIT. Arrays go into an
intrinsic whole and the pointer is taken inside: numba frees an array after its last use, and an address is no use.
"""

import platform
from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

from tinygrad_qkv.kernels.compile import JIT, host_features


def _register_block() -> tuple[int, int, int, bool]:
    """(bytes of a vector register, rows and vectors of a register block, whether the host has fused multiply-add).

    A block of R rows and V vectors keeps R * V registers of sums, V of a line of the right operand and up to one of
    the left: there are 32 registers with AVX-512 and on ARM, 16 otherwise.
    """
    features = host_features()
    if "avx512f" in features:
        return 64, 14, 2, True
    if "avx2" in features and "fma" in features:
        return 32, 6, 2, True
    if platform.machine().lower() in ("arm64", "aarch64"):  # NEON belongs to the architecture
        return 16, 8, 3, True
    return 16, 6, 2, False


VECTOR_BYTES, BLOCK_ROWS, BLOCK_VECTORS, HAS_FMA = _register_block()


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


def _multiply_add(builder, x, y, z):
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


@intrinsic
def _block_product(typingctx, a, b, c, add):
    def codegen(context, builder, sig, args):
        element = context.get_data_type(c.dtype)
        itemsize = context.get_abi_sizeof(element)
        vector = ir.VectorType(element, VECTOR_BYTES // itemsize)
        zero = ir.Constant(vector, [ir.Constant(element, 0.0)] * vector.count)
        a_array, b_array, c_array = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(sig.args[:3], args[:3], strict=True)
        )

        def at(data, offset):
            return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())

        c_bytes, c_stride = as_bytes(builder, c_array.data), builder.extract_value(c_array.strides, 0)
        places = []
        for i in range(BLOCK_ROWS):
            row = builder.gep(c_bytes, [builder.mul(c_stride, index(i))])
            row = builder.bitcast(row, element.as_pointer())
            places += [at(row, index(v * vector.count)) for v in range(BLOCK_VECTORS)]
        for place in places:
            _prefetch(builder, place)

        # for k in range(depth): sums[i, v] += a[k, i] * b[k, v], each sum a phi node and so a register
        before, depth = builder.block, builder.extract_value(a_array.shape, 0)
        loop, after = builder.append_basic_block("k"), builder.append_basic_block("store")
        builder.cbranch(builder.icmp_signed("<", index(0), depth), loop, after)
        builder.position_at_end(loop)
        k = builder.phi(depth.type)
        sums = [builder.phi(vector) for _ in places]
        a_at = builder.mul(k, index(BLOCK_ROWS))
        b_at = builder.mul(k, index(BLOCK_VECTORS * vector.count))
        line = [
            builder.load(at(b_array.data, builder.add(b_at, index(v * vector.count))), align=itemsize)
            for v in range(BLOCK_VECTORS)
        ]
        grown: list[ir.Value] = []
        for i in range(BLOCK_ROWS):
            x = _spread(builder, builder.load(builder.gep(a_array.data, [builder.add(a_at, index(i))])), vector)
            grown += [_multiply_add(builder, x, line[v], sums[len(grown) + v]) for v in range(BLOCK_VECTORS)]
        k_next = builder.add(k, index(1))
        for phi, start, value in zip([k, *sums], [index(0)] + [zero] * len(sums), [k_next, *grown], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)

        builder.position_at_end(after)
        totals = [builder.phi(vector) for _ in grown]
        for phi, value in zip(totals, grown, strict=True):
            phi.add_incoming(zero, before)
            phi.add_incoming(value, loop)
        with builder.if_else(cgutils.is_not_null(builder, args[3])) as (with_old, alone):
            with with_old:
                for place, total in zip(places, totals, strict=True):
                    builder.store(builder.fadd(builder.load(place, align=itemsize), total), place, align=itemsize)
            with alone:
                for place, total in zip(places, totals, strict=True):
                    builder.store(total, place, align=itemsize)
        return context.get_dummy_value()

    return types.void(a, b, c, types.boolean), codegen


def _block_product_plain(a, b, c, add):
    c[...] = c + a.T @ b if add else a.T @ b


# block_product(a (depth, BLOCK_ROWS), b (depth, columns), c (BLOCK_ROWS, columns), add): c = or += a^T b.
# a and b are contiguous panels; the rows of c are contiguous, at any distance from each other.
block_product: Any = _block_product if JIT else _block_product_plain
