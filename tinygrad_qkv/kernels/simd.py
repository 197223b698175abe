"""Vector registers in LLVM IR, for what numba's loops would not turn into the right instructions.

The functions leave instructions behind; intrinsics are made of them. An intrinsic takes arrays whole and finds the
pointer inside: numba frees an array after its last use, and an address is no use. A plain body in NumPy stands beside
each, and runs under NUMBA_DISABLE_JIT.
"""

import platform
from collections.abc import Iterable

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import register_jitable

from tinygrad_qkv.kernels.compile import host_features


def _register_block() -> tuple[int, int, int, bool]:
    """(bytes of a vector register, rows and vectors of a register block, whether the host has fused multiply-add).

    A block of R rows and V vectors keeps R * V registers of sums, V of a line of the right operand and up to one of
    the left: there are 32 registers with AVX-512 and on ARM, 16 otherwise. Each block divides a tile of 96 x 96.
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
# x * y + z may be rounded once. Nothing else may be reordered, so NaN and inf mean what they mean in NumPy.
CONTRACT = ("contract",)


@register_jitable
def block_columns(itemsize: int) -> int:
    """Columns of a register block, for elements of `itemsize` bytes."""
    return BLOCK_VECTORS * VECTOR_BYTES // itemsize


def itemsize_of(kind: ir.Type) -> int:
    """Bytes of a float type, or of a lane of a vector of it."""
    return 4 if getattr(kind, "element", kind) == ir.FloatType() else 8


def register_of(element: ir.Type, size: int = VECTOR_BYTES) -> ir.VectorType:
    """The type of a vector register of `size` bytes."""
    return ir.VectorType(element, size // itemsize_of(element))


def index(value: int) -> ir.Constant:
    """A constant of the type that indexes arrays."""
    return ir.Constant(ir.IntType(types.intp.bitwidth), value)


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """A number of a type, in every lane where that is a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def as_bytes(builder, pointer):
    """The pointer, for offsets in bytes."""
    return builder.bitcast(pointer, ir.IntType(8).as_pointer())


def shuffle(builder, first, second, lanes: Iterable[int]):
    """A vector of the numbered lanes of two vectors, those of `second` numbered after those of `first`."""
    numbers = [ir.IntType(32)(lane) for lane in lanes]
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers))


def spread(builder, x, kind: ir.VectorType):
    """A vector with the scalar x in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    return shuffle(builder, builder.insert_element(undefined, x, ir.IntType(32)(0)), undefined, [0] * kind.count)


def below(builder, count, kind: ir.VectorType):
    """The mask of the lanes whose number is less than `count`."""
    numbers = ir.VectorType(ir.IntType(32), kind.count)
    lanes = ir.Constant(numbers, [numbers.element(i) for i in range(kind.count)])
    most = index(kind.count)  # of the lanes, so that a larger count too fits in 32 bits
    count = builder.select(builder.icmp_signed("<", count, most), count, most)
    return builder.icmp_signed("<", lanes, spread(builder, builder.trunc(count, numbers.element), numbers))


def load(builder, place, kind: ir.VectorType, mask=None):
    """The vector at `place`, any pointer to its first lane; lanes outside the mask are 0, and not read."""
    place = builder.bitcast(place, kind.as_pointer())
    if mask is None:
        return builder.load(place, align=itemsize_of(kind))
    return _masked(builder, "load", kind, kind, [place, ir.IntType(32)(itemsize_of(kind)), mask, constant(kind, 0.0)])


def store(builder, value, place, mask=None, stream: bool = False) -> None:
    """Write the vector to `place`, any pointer to its first lane; lanes outside the mask are not touched.

    With `stream` it goes past the caches to memory, and `place` is a multiple of the vector's size. Other threads are
    sure to see it only after a fence.
    """
    kind = value.type
    place = builder.bitcast(place, kind.as_pointer())
    if stream and mask is None:
        written = builder.store(value, place, align=kind.count * itemsize_of(kind))
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
    elif mask is None:
        builder.store(value, place, align=itemsize_of(kind))
    else:
        _masked(builder, "store", kind, ir.VoidType(), [value, place, ir.IntType(32)(itemsize_of(kind)), mask])


def _masked(builder, action: str, kind: ir.VectorType, result: ir.Type, arguments: list):
    name = f"llvm.masked.{action}.v{kind.count}f{8 * itemsize_of(kind)}.p0"
    signature = ir.FunctionType(result, [x.type for x in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def multiply_add(builder, x, y, z):
    """x * y + z. "contract" lets the host's fused multiply-add do both; nothing else may be reordered."""
    return builder.fadd(builder.fmul(x, y, flags=CONTRACT), z, flags=CONTRACT)
