"""Casts change an array's type, and nothing else of it."""

import numba
import numpy as np
import pytest
from numba.core import types

from tinygrad_qkv.kernels.casts import any_strides, as_contiguous
from tinygrad_qkv.kernels.compile import JIT

X = np.arange(6, dtype=np.float32).reshape(2, 3)
X.flags.writeable = False


@pytest.mark.parametrize("cast", [any_strides, as_contiguous])
def test_the_elements_stay_where_they_are(cast):
    where = numba.njit(lambda x: (cast(x)[1, 2], cast(x).ctypes.data))
    assert where(X) == (5, X.ctypes.data)


@pytest.mark.skipif(not JIT, reason="plain Python has no types of arrays")
@pytest.mark.parametrize(("cast", "layout"), [(any_strides, "A"), (as_contiguous, "C")])
def test_one_type_stands_for_all(cast, layout):
    result = numba.njit(lambda x: cast(x))
    for x in (X, X.copy(), X[:, ::2]):
        result.compile((numba.typeof(x),))
    assert {one.signature.return_type for one in result.overloads.values()} == {types.Array(types.float32, 2, layout)}
