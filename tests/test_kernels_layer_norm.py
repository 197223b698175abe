"""Layer norm and its pullback: values, constant rows, large means, how the sums over rows are split."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import buffers, layer_norm, layer_norm_pullback

RNG = np.random.default_rng(3)
DTYPES = [np.float32, np.float64]


def parameters(width, dtype):
    return RNG.standard_normal((2, width)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (31, 17), (33, 257), (2069, 19)])
def test_values_and_gradients(dtype, shape):
    x, g = RNG.standard_normal((2, *shape)).astype(dtype)
    weight, bias = parameters(shape[1], dtype)
    y, mean, rstd = layer_norm(x, weight, bias, 1e-5)
    wide, wide_g = x.astype(np.longdouble), g.astype(np.longdouble)
    exact_mean = wide.mean(1)
    exact_rstd = 1 / np.sqrt(wide.var(1) + np.longdouble(1e-5))
    xhat = (wide - exact_mean[:, None]) * exact_rstd[:, None]
    tolerance = 20 * np.finfo(dtype).eps
    np.testing.assert_allclose(mean, exact_mean.astype(dtype), rtol=0, atol=tolerance)
    np.testing.assert_allclose(rstd, exact_rstd.astype(dtype), rtol=tolerance)
    np.testing.assert_allclose(y, (xhat * weight + bias).astype(dtype), rtol=0, atol=10 * tolerance)
    dx, dweight, dbias = layer_norm_pullback(g, x, weight, mean, rstd)
    h = wide_g * weight
    exact_dx = exact_rstd[:, None] * (h - h.mean(1, keepdims=True) - xhat * (h * xhat).mean(1, keepdims=True))
    scale = exact_rstd.max()
    np.testing.assert_allclose(dx, exact_dx.astype(dtype), rtol=0, atol=float(10 * tolerance * scale))
    rows = shape[0] ** 0.5
    np.testing.assert_allclose(dweight, (wide_g * xhat).sum(0).astype(dtype), rtol=0, atol=3 * tolerance * rows)
    np.testing.assert_allclose(dbias, wide_g.sum(0).astype(dtype), rtol=0, atol=tolerance * rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(65, 96), (1031, 256)])
def test_results_written_past_the_caches_have_the_same_bits(dtype, shape, monkeypatch):
    x, g = RNG.standard_normal((2, *shape)).astype(dtype)
    weight, bias = parameters(shape[1], dtype)

    def results():
        y, mean, rstd = layer_norm(x, weight, bias, 1e-5)
        return y, mean, rstd, *layer_norm_pullback(g, x, weight, mean, rstd)

    ordinary = results()
    monkeypatch.setattr(buffers, "STREAM_FROM", 0)
    for a, b in zip(ordinary, results(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_row_gives_exactly_the_bias(dtype):
    for value in (0.1, 1 / 3, 1e6 + 0.1, -7e-5):
        x = np.full((3, 37), value, dtype)
        weight, bias = parameters(37, dtype)
        y, mean, _ = layer_norm(x, weight, bias, 1e-5)
        np.testing.assert_array_equal(y, np.broadcast_to(bias, x.shape))
        assert (mean == x[:, 0]).all()


def test_variance_next_to_a_large_mean():
    """A sum of squares less the square of the mean would lose every digit here."""
    x = (1e4 + RNG.standard_normal((5, 499))).astype(np.float32)
    _, _, rstd = layer_norm(x, *parameters(499, np.float32), 1e-5)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.astype(np.float64).var(1) + 1e-5), rtol=1e-5)


def test_nan_stays_in_its_row():
    x = RNG.standard_normal((4, 9)).astype(np.float32)
    x[1, 3], x[2, 0] = np.nan, np.inf
    y, _, _ = layer_norm(x, *parameters(9, np.float32), 1e-5)
    assert np.isnan(y[[1, 2]]).all() and np.isfinite(y[[0, 3]]).all()


def test_empty_axes():
    weight = np.ones(3)
    y, mean, _ = layer_norm(np.ones((0, 3)), weight, weight, 1e-5)
    assert y.shape == (0, 3) and mean.shape == (0,)
    dx, dweight, dbias = layer_norm_pullback(y, y, weight, mean, mean)
    assert dx.shape == (0, 3) and (dweight == 0).all() and (dbias == 0).all()
    y, mean, _ = layer_norm(np.ones((2, 0)), np.ones(0), np.ones(0), 1e-5)
    assert y.shape == (2, 0) and np.isnan(mean).all()


def test_strides():
    x = RNG.standard_normal((6, 7))
    weight, bias = parameters(7, np.float64)
    expected, mean, rstd = layer_norm(x, weight, bias, 1e-5)
    np.testing.assert_array_equal(layer_norm(np.asfortranarray(x), weight, bias[::-1][::-1], 1e-5)[0], expected)
    g = np.broadcast_to(np.float64(1), x.shape)
    for got, want in zip(
        layer_norm_pullback(g, np.asfortranarray(x), weight, mean, rstd),
        layer_norm_pullback(g.copy(), x, weight, mean, rstd),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_errors():
    x, ones = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="weight must have shape"):
        layer_norm(x, ones[:2], ones, 1e-5)
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        layer_norm(ones, ones, ones, 1e-5)
    with pytest.raises(TypeError, match="float64"):
        layer_norm(x, ones.astype(np.float64), ones, 1e-5)
