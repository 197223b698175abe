"""exp and log, of numbers and in the lanes of registers of every width, within one unit in the last place; ranks."""

import numba
import numpy as np
import pytest

from tinygrad_qkv.kernels.passes import row_pass
from tinygrad_qkv.kernels.scalars import exp, log, of_rank, rank

DTYPES = [np.float32, np.float64]
WIDTHS = [0, 16, 32, 64]  # bytes of a register; 0 stands for the scalar function
UNITS = 4 if numba.config.DISABLE_JIT else 1  # what stands in then is NumPy's own


def make(function, scalar, width):
    """The function over an array, as a loop of the scalar one or as a pass."""
    formula = row_pass(into=1, vector_bytes=width or 16)(lambda x: function(x))
    if numba.config.DISABLE_JIT:
        return formula
    if width:
        return numba.njit(lambda x, out: formula(x, out))

    @numba.njit
    def loop(x, out):
        for i in range(x.shape[0]):
            out[i] = scalar(x[i])

    return loop


def of(run, x):
    out = np.empty_like(x)
    with np.errstate(all="ignore"):
        run(x, out)
    return out


def assert_within(out, exact, units=UNITS):
    assert (abs(out - exact) <= units * np.spacing(abs(exact).astype(out.dtype)).astype(np.longdouble)).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exp(dtype, width):
    run, kind = make(np.exp, exp, width), np.finfo(dtype)
    x = np.linspace(np.log(kind.tiny) + 0.36, np.log(kind.max), 50_001).astype(dtype)
    x = x[np.exp(x.astype(np.longdouble)) < kind.max]
    assert_within(of(run, x), np.exp(x.astype(np.longdouble)))
    small = np.linspace(np.log(kind.tiny) - 2, np.log(kind.tiny) + 0.36, 101).astype(dtype)
    assert (abs(of(run, small) - np.exp(small.astype(np.longdouble))) <= 1.42 * kind.tiny).all()
    assert (of(run, np.array([89, 1000], dtype) + (dtype is np.float64) * 700) == np.inf).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_log(dtype, width):
    run, kind = make(np.log, log, width), np.finfo(dtype)
    for x in (
        np.geomspace(kind.tiny, kind.max / 2, 50_001).astype(dtype),
        np.linspace(0.5, 2, 50_001).astype(dtype),
        np.geomspace(kind.smallest_subnormal * 3, kind.tiny, 1001).astype(dtype),
    ):
        assert_within(of(run, x), np.log(x.astype(np.longdouble)))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_inf_and_zero(dtype, width):
    x = np.array([-np.inf, -1e30, 0.0, -0.0, 1e30, np.inf, np.nan, -np.nan, 0.0], dtype)
    x[-1:].view(f"i{x.itemsize}")[:] = np.iinfo(f"i{x.itemsize}").max  # a NaN with every bit set
    inf, nan = np.inf, np.nan
    np.testing.assert_array_equal(of(make(np.exp, exp, width), x), [0, 0, 1, 1, inf, inf, nan, nan, nan])
    x = np.array([-inf, -1, -1e-42, 0.0, -0.0, 1, inf, nan, -nan], dtype)
    np.testing.assert_array_equal(of(make(np.log, log, width), x), [nan, nan, nan, -inf, -inf, 0, inf, nan, nan])


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="intrinsics exist in compiled code only")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_orders_as_the_float_does(dtype):
    both = numba.njit(lambda x: (rank(x), of_rank(rank(x))))
    values = [dtype(v) for v in (-np.inf, -1e30, -1.0, -1e-40, 0.0, 1e-40, 1.0, 1e30, np.inf, np.nan)]
    ranks = [both(v)[0] for v in values]
    assert ranks == sorted(set(ranks))
    assert [both(v)[1] for v in values[:-1]] == values[:-1]
