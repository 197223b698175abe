"""The same array under another type: numba compiles a building block once for each type that it is called with."""

from typing import Any

from numba.core import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import JIT


def _with_layout(x: types.Array, layout: str) -> tuple[Any, Any]:
    kind = types.Array(x.dtype, x.ndim, layout)
    return kind(x), lambda context, builder, sig, args: impl_ret_borrowed(context, builder, kind, args[0])


@intrinsic
def _any_strides(typingctx, x):
    return _with_layout(x, "A")


@intrinsic
def _as_contiguous(typingctx, x):
    return _with_layout(x, "C")


def _itself(x: Any) -> Any:
    return x


# The array as one of any strides that may be written: one type for all operands, so that what takes them is compiled
# once, and one variable can hold any. Whoever calls it vouches that a read-only array is only read.
any_strides: Any = _any_strides if JIT else _itself
# An array whose elements the caller knows to lie side by side, as one of that type: loops over it are vectorised.
as_contiguous: Any = _as_contiguous if JIT else _itself
