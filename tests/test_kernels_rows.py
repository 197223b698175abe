"""The passes that the row kernels share, over lengths around those of registers and of unrolled loops."""

import numba
import numpy as np
import pytest

from tinygrad_qkv.kernels import rows

RNG = np.random.default_rng(5)
DTYPES = [np.float32, np.float64]
LENGTHS = [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 257, 1021]


def compiled(function):
    return function if numba.config.DISABLE_JIT else numba.njit(function)


@compiled
def folds(x, y, shift):
    return (
        rows.row_max(x),
        rows.row_sum(x),
        rows.row_dot(x, y),
        rows.row_sum_above(x, shift),
        rows.row_sum_exp(x, shift),
    )


@compiled
def exp_into(x, shift, out):
    return rows.row_exp_into(x, shift, out)


@compiled
def add(x, out):
    rows.row_add(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_values(dtype, n):
    x, y = RNG.standard_normal((2, n)).astype(dtype)
    wide, shift, eps = x.astype(np.longdouble), x.max(), np.finfo(dtype).eps
    top, *sums = folds(x, y, shift)
    assert top == x.max()
    terms = wide, wide * y, wide - shift, np.exp(wide - shift)
    for total, exact in zip(sums, terms, strict=True):
        assert abs(total - exact.sum()) <= (4 + n / 64) * eps * abs(exact).sum()  # 64 lanes or fewer, and a tree
    out = np.full(n + 3, 7, dtype)
    total = exp_into(x, shift, out[:n])
    assert total == sums[-1]
    assert (abs(out[:n] - terms[-1]) <= eps * (1 + abs(terms[-2])) * terms[-1]).all()
    add(y, out[:n])
    np.testing.assert_allclose(out[:n], np.exp(x - shift) + y, rtol=0, atol=8 * eps)
    assert (out[n:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_of_negative_numbers_and_of_infinities(dtype):
    x = -abs(RNG.standard_normal(77)).astype(dtype) - 1
    assert folds(x, x, dtype(0))[0] == x.max()
    with np.errstate(all="ignore"):
        assert folds(np.full(5, -np.inf, dtype), x[:5], dtype(0))[0] == -np.inf
        x[3] = np.inf
        assert folds(x, x, dtype(0))[0] == np.inf


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="NumPy's maximum keeps NaN, which serves as well")
def test_nan_counts_for_nothing_in_a_maximum():
    for n in (1, 2, 20, 64, 100):
        x = np.full(n + 1, np.nan, np.float32)
        x[n // 2] = -3
        assert folds(x, x, np.float32(0))[0] == -3


def test_a_large_shift_is_taken_off_before_the_sum():
    x = np.full(100, 1e8, np.float32)
    x[7] += 8
    assert folds(x, x, np.float32(1e8))[3] == 8


def test_blocks_of_rows_depend_on_their_number_alone():
    assert [rows.rows_per_block(n) for n in (0, 1, 32, 2048, 2049, 64000)] == [32, 32, 32, 32, 33, 1000]
