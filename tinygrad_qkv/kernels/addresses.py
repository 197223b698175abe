"""Arrays at addresses, for a kernel that works on a number of arrays that is known only when it runs."""

import ctypes

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import intrinsic

from tinygrad_qkv.kernels.compile import kernel


@intrinsic
def _pointer(typingctx, address, like):
    """An address as a pointer to elements of the type of the array `like`."""

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return types.CPointer(like.dtype)(address, like), codegen


def _array_at_plain(address, size, like):
    return np.frombuffer((ctypes.c_char * (size * like.itemsize)).from_address(int(address)), like.dtype)


@kernel(plain=_array_at_plain)
def array_at(address, size, like):
    """The array (size,) at an address, of the dtype of `like`, which must suit the elements there.

    NOTE: it keeps nothing alive. Whoever calls the kernel holds the arrays until it returns.
    """
    return carray(_pointer(address, like), (size,))
