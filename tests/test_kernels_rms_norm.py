"""RMS norm and its pullback: values, zero rows, large and small numbers, how the sum over rows is split."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import buffers, rms_norm, rms_norm_pullback

RNG = np.random.default_rng(4)
DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(65, 96), (1031, 256)])
def test_results_written_past_the_caches_have_the_same_bits(dtype, shape, monkeypatch):
    x, g = RNG.standard_normal((2, *shape)).astype(dtype)
    weight = RNG.standard_normal(shape[1]).astype(dtype)

    def results():
        y, rrms = rms_norm(x, weight, 1e-5)
        return y, rrms, *rms_norm_pullback(g, x, weight, rrms)

    ordinary = results()
    monkeypatch.setattr(buffers, "STREAM_FROM", 0)
    for a, b in zip(ordinary, results(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (31, 17), (33, 257), (2069, 19), (67, 1031)])
def test_values_and_gradients(dtype, shape):
    x, g = RNG.standard_normal((2, *shape)).astype(dtype)
    weight = RNG.standard_normal(shape[1]).astype(dtype)
    y, rrms = rms_norm(x, weight, 1e-5)
    assert y.dtype == rrms.dtype == dtype
    wide, eps = x.astype(np.longdouble), np.finfo(dtype).eps
    exact = 1 / np.sqrt((wide**2).mean(1, keepdims=True) + np.longdouble(1e-5))
    xhat, h = wide * exact, g.astype(np.longdouble) * weight
    assert (abs(rrms[:, None] - exact) <= (3 + shape[1] / 64) * eps * exact).all()
    assert (abs(y - xhat * weight) <= (5 + shape[1] / 64) * eps * abs(xhat * weight)).all()
    dx, dweight = rms_norm_pullback(g, x, weight, rrms)
    share = (h * xhat).mean(1, keepdims=True)
    scale = exact * (abs(h) + abs(xhat) * (abs(h * xhat).mean(1, keepdims=True)))
    assert (abs(dx - exact * (h - xhat * share)) <= (8 + shape[1] / 16) * eps * scale).all()
    sums = abs(g * xhat).sum(0)
    assert (abs(dweight - (g * xhat).sum(0)) <= (8 + shape[0] ** 0.5) * eps * sums).all()


def test_a_row_solved_by_hand():
    x, weight = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([1.0, 2.0])
    y, rrms = rms_norm(x, weight, 0.25)
    root = (12.5 + 0.25) ** 0.5
    np.testing.assert_allclose(rrms, [1 / root, 2])
    np.testing.assert_allclose(y, [[3 / root, 8 / root], [0, 0]])
    dx, dweight = rms_norm_pullback(np.ones((2, 2)), x, weight, rrms)
    share = (3 + 8) / 2 / root**3
    np.testing.assert_allclose(dx, [[1 / root - 3 * share, 2 / root - 4 * share], [2, 4]])
    np.testing.assert_allclose(dweight, [3 / root, 4 / root])


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_alone_keeps_a_row_of_zeros_finite(dtype):
    x = np.zeros((2, 5), dtype)
    y, rrms = rms_norm(x, np.ones(5, dtype), 1e-6)
    assert (y == 0).all() and np.allclose(rrms, 1000)
    with np.errstate(all="ignore"):
        y, rrms = rms_norm(x, np.ones(5, dtype), 0.0)
    assert np.isnan(y).all() and (rrms == np.inf).all()


def test_nan_stays_in_its_row():
    x = RNG.standard_normal((4, 9)).astype(np.float32)
    x[1, 3], x[2, 0] = np.nan, np.inf
    y, _ = rms_norm(x, np.ones(9, np.float32), 1e-5)
    assert np.isnan(y[1]).all() and np.isnan(y[2, 0]) and (y[2, 1:] == 0).all() and np.isfinite(y[[0, 3]]).all()


def test_empty_axes():
    weight = np.ones(3)
    y, rrms = rms_norm(np.ones((0, 3)), weight, 1e-5)
    assert y.shape == (0, 3) and rrms.shape == (0,)
    dx, dweight = rms_norm_pullback(y, y, weight, rrms)
    assert dx.shape == (0, 3) and (dweight == 0).all() and dweight.shape == (3,)
    with np.errstate(all="ignore"):
        y, rrms = rms_norm(np.ones((2, 0)), np.ones(0), 1e-5)
    assert y.shape == (2, 0) and np.isnan(rrms).all()
    dx, dweight = rms_norm_pullback(y, y, np.ones(0), rrms)
    assert dx.shape == (2, 0) and dweight.shape == (0,)


def test_strides_and_byte_order():
    x, weight = RNG.standard_normal((6, 7)), RNG.standard_normal(7)
    expected, rrms = rms_norm(x, weight, 1e-5)
    np.testing.assert_array_equal(rms_norm(np.asfortranarray(x), weight[::-1][::-1], 1e-5)[0], expected)
    np.testing.assert_array_equal(rms_norm(x.astype(">f8"), weight, 1e-5)[0], expected)
    g = np.broadcast_to(np.float64(1), x.shape)
    for got, want in zip(
        rms_norm_pullback(g, np.asfortranarray(x), weight, rrms),
        rms_norm_pullback(g.copy(), x, weight, rrms),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_errors():
    x, ones = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(x, ones[:2], 1e-5)
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        rms_norm(ones, ones, 1e-5)
    with pytest.raises(TypeError, match="float64"):
        rms_norm(x, ones.astype(np.float64), 1e-5)
    with pytest.raises(ValueError, match="rrms must have shape"):
        rms_norm_pullback(x, x, ones, ones)
