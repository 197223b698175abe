"""erf, and the exponential and the ordering that the row kernels are made of."""

import numba
import numpy as np
import pytest
from scipy import special

from tinygrad_qkv.kernels import erf
from tinygrad_qkv.kernels.rows import row_dot, row_exp_into, row_max, row_sum, row_sum_exp
from tinygrad_qkv.kernels.scalars import exp, of_rank, rank

DTYPES = [np.float32, np.float64]
RNG = np.random.default_rng(5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_erf(dtype):
    x = np.concatenate([np.linspace(-7, 7, 20_001), [0.0, -0.0, 1e-30, -1e-8, np.inf, -np.inf, np.nan]]).astype(dtype)
    y, exact = erf(x), special.erf(x.astype(np.float64))
    assert y.dtype == dtype
    np.testing.assert_allclose(y, exact, rtol=4 * np.finfo(dtype).eps)
    assert np.signbit(erf(np.array(-0.0, dtype)))
    shaped = x[:6000].reshape(10, 20, 30)
    np.testing.assert_array_equal(erf(shaped.T), y[:6000].reshape(10, 20, 30).T)
    assert erf(np.ones((0, 3), dtype)).shape == (0, 3)
    assert erf(np.array(0.5, dtype)).shape == ()
    with pytest.raises(TypeError, match="float16"):
        erf(np.ones(2, np.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_within_one_unit_in_the_last_place(dtype):
    limits = np.log(np.finfo(dtype).tiny) + 0.1, np.log(np.finfo(dtype).max) - 0.1
    x = np.linspace(*limits, 50_001).astype(dtype)
    out = np.empty_like(x)
    with np.errstate(over="ignore"):  # of the sum
        row_exp_into(x, dtype(0), out)
    exact = np.exp(x.astype(np.longdouble))
    units = 4 if numba.config.DISABLE_JIT else 1  # what stands in then is NumPy's exp
    assert (abs(out - exact) <= units * np.finfo(dtype).eps * exact).all()
    edges = np.array([-np.inf, -1e30, 0.0, -0.0, 1e30, np.inf, np.nan, -np.nan, 0.0], dtype)
    edges[-1:].view(f"i{edges.itemsize}")[:] = np.iinfo(f"i{edges.itemsize}").max  # a NaN with every bit set
    out = np.empty_like(edges)
    with np.errstate(all="ignore"):
        row_exp_into(edges, dtype(0), out)
    np.testing.assert_array_equal(out, [0, 0, 1, 1, np.inf, np.inf, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 63, 64, 65, 257, 1021])
def test_row_passes(dtype, n):
    x, y = RNG.standard_normal((2, n)).astype(dtype)
    wide = x.astype(np.longdouble)
    assert row_max(x) == x.max()
    assert row_max(-abs(x)) == -abs(x).min()
    close = {"rtol": 4 * np.finfo(dtype).eps, "atol": 4 * np.finfo(dtype).eps * n**0.5}
    np.testing.assert_allclose(row_sum(x), float(wide.sum()), **close)
    np.testing.assert_allclose(row_dot(x, y), float((wide * y).sum()), **close)
    np.testing.assert_allclose(row_sum_exp(x, x[0]), float(np.exp(wide - x[0]).sum()), **close)


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="intrinsics exist in compiled code only")
def test_rank_orders_as_the_float_does():
    @numba.njit
    def both(x):
        return rank(x), of_rank(rank(x)), exp(x)

    for dtype in DTYPES:
        values = [dtype(v) for v in (-np.inf, -1e30, -1.0, -1e-40, 0.0, 1e-40, 1.0, 1e30, np.inf, np.nan)]
        ranks = [both(v)[0] for v in values]
        assert ranks == sorted(set(ranks))
        assert [both(v)[1] for v in values[:-1]] == values[:-1]
