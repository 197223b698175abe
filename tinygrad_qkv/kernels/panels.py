"""Packing: a block of a matrix copied so that its rows are contiguous and lie near one another."""

from numba.core import cgutils, types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import kernel
from tinygrad_qkv.kernels.simd import as_bytes
from tinygrad_qkv.kernels.transposes import transpose


@intrinsic
def _copy_row(typingctx, source, panel, k):
    """panel[k, :] = source[k, :], both contiguous."""

    def codegen(context, builder, sig, args):
        places = []
        for kind, value in zip(sig.args[:2], args[:2], strict=True):
            array = context.make_array(kind)(context, builder, value)
            offset = builder.mul(args[2], builder.extract_value(array.strides, 0))
            places.append(builder.gep(as_bytes(builder, array.data), [offset]))
        columns = builder.extract_value(array.shape, 1)
        cgutils.raw_memcpy(builder, places[1], places[0], columns, source.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(source, panel, types.intp), codegen


def _pack_plain(source, panel):
    panel[...] = source


@kernel(plain=_pack_plain)
def pack(source, panel):
    """panel[k, n] = source[k, n]; source has any strides, the rows of panel are contiguous, at any distance."""
    if source.strides[1] == source.itemsize:
        for k in range(source.shape[0]):
            _copy_row(source, panel, k)
    elif source.strides[0] == source.itemsize:
        transpose(source.T, panel)
    else:
        for k in range(source.shape[0]):
            for n in range(source.shape[1]):
                panel[k, n] = source[k, n]
