"""Sums and extremes over any axes against float64: every way to split, accuracy, NaN and infinities, odd arrays."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import largest, smallest, total
from tinygrad_qkv.kernels.reductions import LINE, LINES, PIECE, PIECES, ROWS, STRIP
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

DTYPES = [np.float32, np.float64]
RNG = np.random.default_rng(17)
BLOCK = PIECE * PIECES
CASES = [  # shape and axes; each of 2^15 numbers or of many rows, or NumPy would do it
    *(((n, 3), (0,)) for n in (ROWS, ROWS + 1, LINES * (LINE // 3) - 1)),
    ((17, 41, 13), (0, 1)),
    *(((n,), (0,)) for n in (PARALLEL_FROM["reductions"], 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 100_003)),
    *(((101, n), (1,)) for n in (PIECE - 1, PIECE, PIECE + 1)),
    ((3, BLOCK + 1), (1,)),
    ((40_009, 1), (1,)),
    ((20_011, 2), (1,)),
    *(((n, 3), (0,)) for n in (11_003, LINES * (LINE // 3) * 5 - 1, LINES * (LINE // 3) * 5 + 1)),
    *(((n, LINE), (0,)) for n in (2 * LINES, 2 * LINES + 1, 67)),
    ((131, LINE // 2 + 1), (0,)),
    ((131, LINE - 1), (0,)),
    *(((11, n), (0,)) for n in (STRIP - 1, STRIP + 1, 2 * STRIP)),
    ((LINES + 1, 2 * STRIP + 3), (0,)),
    ((5, 71, 103), (1,)),
    ((17, 1031, 2), (1,)),
    ((7, 11, 13, 37), (0, 1)),
    ((7, 11, 13, 37), (2, 3)),
    ((7, 11, 13, 37), (0, 1, 2, 3)),
    ((7, 11, 13, 37), (0, 2)),
    ((7, 11, 13, 37), (1, 3)),
    ((7, 1, 11, 503), (0, 2)),
    ((70_001, 1), (0,)),
    ((12_007, 1, 3), (0, 1)),
    ((1, 40_009), (0,)),
    ((3, 20_011, 1), (0, 2)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axes"), CASES)
def test_against_float64(shape, axes, dtype):
    x = RNG.uniform(-1, 1, shape).astype(dtype)
    assert x.size >= PARALLEL_FROM["reductions"] or x.size >= ROWS * shape[-1]
    wide = x.astype(np.longdouble)
    y = total(x, axes)
    assert y.dtype == dtype and y.shape == wide.sum(axes).shape
    bound = 128 * np.finfo(dtype).eps / 2 * abs(wide).sum(axes)
    assert (abs(y - wide.sum(axes)) <= bound).all()
    for f, reference in ((largest, np.max), (smallest, np.min)):
        found = f(x, axes)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, reference(x, axis=axes))


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_sums_are_at_least_as_exact_as_numpys(axes):
    """Of positive numbers, where an error cannot cancel: the largest one in units of the last place of the sum."""
    x = RNG.uniform(0.5, 1, (3001, 701)).astype(np.float32)
    exact = x.astype(np.float64).sum(axes)
    error, numpys = (abs(y - exact).max() / exact.max() for y in (total(x, axes), x.sum(axes)))
    assert error <= max(numpys, 4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axes"), [((211, 307), (0,)), ((211, 307), (1,)), ((70_001,), (0,))])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinities(shape, axes, dtype, value):
    x = RNG.normal(size=shape).astype(dtype)
    for place in (0, x.size // 2, x.size - 1):
        odd = x.copy()
        odd.reshape(-1)[place] = value
        for f, reference in ((total, np.sum), (largest, np.max), (smallest, np.min)):
            got, expected = f(odd, axes), reference(odd, axis=axes)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    x.fill(-np.inf)
    assert (largest(x, axes) == -np.inf).all() and (total(x, axes) == -np.inf).all()
    x.reshape(-1)[:] = np.where(np.arange(x.size) % 2, np.inf, -np.inf)
    assert np.isnan(total(x, axes)).all()


def test_arrays_of_other_kinds_go_to_numpy():
    x = RNG.normal(size=(301, 211))
    for odd in (x.T, x[::2, ::3], x[:, ::-1], x.astype(">f8"), np.broadcast_to(x[0], x.shape)):
        np.testing.assert_allclose(total(odd, (0,)), odd.sum(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(largest(odd, (1,)), odd.max(1))
    counted = total(np.ones((300, 200), bool), (0,))
    assert counted.dtype == np.int64 and (counted == 300).all()
    whole = np.arange(60_000).reshape(200, 300)
    np.testing.assert_array_equal(total(whole, (1,)), whole.sum(1))
    np.testing.assert_array_equal(smallest(whole, (0,)), whole.min(0))
    np.testing.assert_array_equal(total(x, ()), x)


def test_empty_axes():
    nothing = np.zeros((0, 5), np.float32)
    np.testing.assert_array_equal(total(nothing, (0,)), np.zeros(5))
    assert total(nothing, (0, 1)) == 0 and total(nothing, (1,)).shape == largest(nothing, (1,)).shape == (0,)
    for f in (largest, smallest):
        with pytest.raises(ValueError, match="identity"):
            f(nothing, (0,))


@pytest.mark.parametrize("reduce", [total, largest, smallest])
def test_axes_out_of_order_or_negative(reduce):
    x = RNG.normal(size=(31, 53, 37)).astype(np.float64)
    for axes, tidy in (((-1,), (2,)), ((-2, -1), (1, 2)), ((2, 0), (0, 2))):
        np.testing.assert_allclose(reduce(x, axes), reduce(x, tidy), rtol=0, atol=1e-12)
    with pytest.raises(np.exceptions.AxisError):
        reduce(x, (3,))
    with pytest.raises(ValueError, match="duplicate"):
        reduce(x, (0, 0))
