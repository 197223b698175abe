"""softmax and log-softmax with their pullbacks: values, axes, strides, NaN and inf."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import log_softmax, log_softmax_pullback, softmax, softmax_pullback

RNG = np.random.default_rng(1)
DTYPES = [np.float32, np.float64]


def reference(x, axis):
    """(softmax, log-softmax) in extended precision."""
    x = x.astype(np.longdouble)
    shifted = x - x.max(axis, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
    return np.exp(log), log


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 1), (3, 2), (7, 13), (5, 257), (31, 1021), (2, 3, 5, 7)),
        *((19, 15), (9, 16), (17, 17), (6, 31), (7, 32), (5, 33), (3, 63), (3, 65)),  # around one and two registers
        *((2, 3, 1025), (2, 307, 259), (5, 127, 129)),  # strips of both widths side by side, tasks of several blocks
    ],
)
def test_values_and_pullbacks_over_every_axis(dtype, shape):
    x, g = 3 * RNG.standard_normal(shape).astype(dtype), RNG.standard_normal(shape).astype(dtype)
    eps = np.finfo(dtype).eps
    for axis in range(-1, len(shape) - 1):
        exact, log = reference(x, axis)
        y, log_y = softmax(x, axis), log_softmax(x, axis)
        assert y.dtype == log_y.dtype == dtype
        assert y.flags.c_contiguous
        # Rounding x - max costs |x - max| eps, and no kernel can avoid that; the sum is added up in a few lanes.
        spread = 4 + shape[axis] ** 0.5 / 4 + abs(x - x.max(axis, keepdims=True))
        assert (abs(y - exact) <= eps * spread * exact).all()
        assert (abs(log_y - log) <= eps * (6 + shape[axis] ** 0.5 / 4 + abs(log))).all()
        dx = softmax_pullback(g, y, axis)
        bound = 30 * eps * (abs(g) * exact + exact * abs(g * exact).sum(axis, keepdims=True))
        assert (abs(dx - exact * (g - (g * exact).sum(axis, keepdims=True))) <= bound).all()
        dx = log_softmax_pullback(g, log_y, axis)
        bound = eps * (abs(g) + (20 + spread) * exact * abs(g).sum(axis, keepdims=True))
        assert (abs(dx - (g - exact * g.astype(np.longdouble).sum(axis, keepdims=True))) <= bound).all()


def test_strided_and_read_only_arrays():
    x = RNG.standard_normal((11, 17)).astype(np.float32)
    expected = softmax(x, 1)
    np.testing.assert_array_equal(softmax(np.asfortranarray(x), 1), expected)
    np.testing.assert_allclose(softmax(x.T, 0), expected.T, rtol=1e-6)  # added up in another order
    np.testing.assert_array_equal(softmax(x[::-1, ::-1], 1), softmax(np.ascontiguousarray(x[::-1, ::-1]), 1))
    repeated = np.broadcast_to(x[:1], x.shape)
    np.testing.assert_array_equal(softmax(repeated, -1), np.broadcast_to(expected[:1], x.shape))
    np.testing.assert_array_equal(softmax(x.astype(">f4"), 1), expected)
    g = np.broadcast_to(np.float32(1), x.shape)  # what a sum's pullback hands over
    assert abs(softmax_pullback(g, expected, 1)).max() < 1e-6


def test_empty_arrays_and_a_number_alone():
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 3)):
        x = np.ones(shape, np.float32)
        for axis in range(len(shape)):
            for y in (softmax(x, axis), log_softmax(x, axis), softmax_pullback(x, x, axis)):
                assert y.shape == shape and y.dtype == np.float32
    number = np.array(3.0)
    assert softmax(number, 0) == 1 and softmax(number, 0).shape == ()
    assert log_softmax(number, -1) == 0
    assert softmax_pullback(number, softmax(number, 0), 0) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [8, 3000])  # serial, parallel
def test_nan_and_inf_stay_in_their_row(dtype, rows):
    x = RNG.standard_normal((rows, 19)).astype(dtype)
    x[1, 4] = np.nan
    x[2] = -np.inf
    x[3, 0] = np.inf
    x[4, 1:] = -np.inf
    x[5, 7] = -np.nan
    bad = np.isin(np.arange(rows), [1, 2, 3, 5])
    for function in (softmax, log_softmax):
        y = function(x, 1)
        assert np.isnan(y[bad]).all()
        assert not np.isnan(y[~bad]).any()
    assert (softmax(x, 1)[4] == np.eye(19)[0]).all()
    assert log_softmax(x, 1)[4, 0] == 0 and (log_softmax(x, 1)[4, 1:] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_masked_entries_are_finite(dtype):
    x = RNG.standard_normal((5, 7)).astype(dtype)
    x[:, 3:] = -np.inf
    g = RNG.standard_normal((5, 7)).astype(dtype)
    dx = softmax_pullback(g, softmax(x, 1), 1)
    assert np.isfinite(dx).all() and (dx[:, 3:] == 0).all()
    assert np.isfinite(log_softmax_pullback(g, log_softmax(x, 1), 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype):
    big = np.finfo(dtype).max
    for row in ([big, -big, 0], [-big, -big, -big], [1e30, 1e30, 0], [-87.5, 0, -103.0], [-745.5, 0, -708.5]):
        x = np.array([row], dtype)
        exact, log = reference(x, 1)
        tiny = np.finfo(dtype).tiny  # a result below the smallest normal number may be 0
        assert (abs(softmax(x, 1) - exact) <= 1e-5 * exact + tiny).all()
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(log_softmax(x, 1), log.astype(dtype), rtol=1e-5)


def test_one_huge_entry_does_not_swallow_the_others_rows():
    x = RNG.standard_normal((9, 33)).astype(np.float32)
    expected = softmax(x, 1)
    x[4] = 3e38
    y = softmax(x, 1)
    np.testing.assert_array_equal(np.delete(y, 4, 0), np.delete(expected, 4, 0))
    np.testing.assert_allclose(y[4], 1 / 33, rtol=1e-6)


def test_errors():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(TypeError, match="float16"):
        softmax(x.astype(np.float16), 1)
    with pytest.raises(TypeError, match="int64"):
        log_softmax(np.ones(3, np.int64), 0)
    with pytest.raises(TypeError, match="float64"):
        softmax_pullback(x.astype(np.float64), x, 1)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        softmax_pullback(x.T, x, 1)
    with pytest.raises(np.exceptions.AxisError):
        softmax(x, 2)
