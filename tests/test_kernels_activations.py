"""Activations and GELU against float64, their pullbacks against the formulas, and arrays of all kinds."""

import numba
import numpy as np
import pytest
from scipy import special

from tinygrad_qkv import kernels
from tinygrad_qkv.kernels.elementwise import STRETCH
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

DTYPES = [np.float32, np.float64]
RNG = np.random.default_rng(8)
# Zeros of both signs, numbers around the switches, far out on both sides, and what has no neighbours.
SPECIAL = [0.0, -0.0, 1e-30, -1e-8, 0.3, -0.35, 8.9, -9.1, 19.0, -21.0, 80.0, -80.0, 1e20, -1e20, np.inf, -np.inf]
SPECIAL += [np.nan]


def phi(x):
    return np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def tanh_slope(x):
    return np.sqrt(8 / np.pi) * (1 + 0.134145 * x * x)


def twice_u(x):
    return np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)


# name: (value of x in float64, units in the last place), (slope of x in float64), what the pullback takes besides g
SIGMOID, NDTR = special.expit, special.ndtr
FUNCTIONS = {
    "relu": (lambda x: np.maximum(x, 0), 0, lambda x: np.where(x > 0, 1.0, np.where(x <= 0, 0, 1)), "y"),
    "sigmoid": (SIGMOID, 3, lambda x: SIGMOID(x) * SIGMOID(-x), "y"),
    "tanh": (np.tanh, 3, lambda x: 1 - np.tanh(x) ** 2, "y"),
    "silu": (lambda x: x * SIGMOID(x), 3, lambda x: SIGMOID(x) * (1 + x * SIGMOID(-x)), "x"),
    "softplus": (lambda x: np.logaddexp(x, 0), 5, SIGMOID, "x"),
    "gelu": (lambda x: x * NDTR(x), lambda x: 3 + 1.5 * x * x, lambda x: NDTR(x) + x * phi(x), "x"),
    "gelu_tanh": (
        lambda x: x * SIGMOID(twice_u(x)),
        lambda x: 4 + 3 * abs(twice_u(x)),
        lambda x: SIGMOID(twice_u(x)) * (1 + x * SIGMOID(-twice_u(x)) * tanh_slope(x)),
        "x",
    ),
}


def pullback(name, g, x):
    f = getattr(kernels, name)
    return getattr(kernels, f"{name}_pullback")(g, x if FUNCTIONS[name][3] == "x" else f(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_within_its_bound(name, dtype):
    """In units in the last place of the exact value, wherever no step towards it is below the normal numbers."""
    f, units, _, _ = FUNCTIONS[name]
    x = np.concatenate([np.linspace(-12, 12, 20_001), -np.geomspace(1e-20, 1, 1001)]).astype(dtype)
    exact = f(x.astype(np.float64))
    bound = (units(x.astype(np.float64)) if callable(units) else units) * np.finfo(dtype).eps
    if dtype is np.float64 or numba.config.DISABLE_JIT:  # the reference is off by as much, and NumPy's steps by more
        bound = 4 * bound
    y = getattr(kernels, name)(x)
    assert y.dtype == dtype
    seen = abs(exact) > 1000 * np.finfo(dtype).tiny
    assert (abs(y - exact) <= bound * abs(exact))[seen].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pullback_is_g_times_the_slope(name, dtype):
    """Within 8 units in the last place of the number 1 times g: slopes are at most 1.13, and made of such numbers."""
    x = np.linspace(-12, 12, 20_001).astype(dtype)
    g = RNG.normal(size=x.shape).astype(dtype)
    slope = FUNCTIONS[name][2](x.astype(np.float64))
    dx = pullback(name, g, x)
    assert dx.dtype == dtype
    assert (abs(dx - g * slope) <= 8 * np.finfo(dtype).eps * abs(g)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name, dtype):
    """Few elements and many, so that what NumPy does for few is done for many too."""
    f, _, slope, _ = FUNCTIONS[name]
    for x in (np.array(SPECIAL, dtype), np.tile(np.array(SPECIAL, dtype), 5000)):
        with np.errstate(all="ignore"):
            y, dx, wide = getattr(kernels, name)(x), pullback(name, np.ones_like(x), x), x.astype(np.float64)
            expected, slopes = f(wide).astype(dtype), slope(wide)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=np.finfo(dtype).tiny)
        plain = abs(x) <= 80
        np.testing.assert_allclose(dx[plain], slopes[plain], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(np.isnan(dx[np.isnan(x)]), name != "relu")
        if name != "silu":  # whose formula has 0 * inf there, as NumPy's does
            far = abs(x) >= 1e20
            limits = {"sigmoid": (0, 0), "tanh": (0, 0)}.get(name, (0, 1))
            np.testing.assert_array_equal(dx[far], np.where(x[far] < 0, *limits))
    zeros = getattr(kernels, name)(np.tile(np.array([-0.0], dtype), 70_000))
    assert np.signbit(zeros).all() == (name in ("tanh", "silu", "gelu", "gelu_tanh"))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [0, 1, 15, 17, STRETCH - 1, STRETCH, STRETCH + 1, PARALLEL_FROM["elementwise"] + 13])
def test_elements_do_not_depend_on_their_place(name, n):
    x, g = np.linspace(-6, 6, n, dtype=np.float32), np.linspace(1, 2, n, dtype=np.float32)
    y, dx = getattr(kernels, name)(x), pullback(name, g, x)
    turned = getattr(kernels, name)(x[::-1]), pullback(name, g[::-1], x[::-1])
    np.testing.assert_array_equal(turned[0][::-1], y)
    np.testing.assert_array_equal(turned[1][::-1], dx)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_of_all_kinds(name):
    f = getattr(kernels, name)
    x = RNG.normal(size=(5, 7, 300)).astype(np.float32)
    for odd in (x.transpose(2, 0, 1), x[::2, 1:, ::-3], x.astype(">f4"), np.broadcast_to(x[:1], x.shape)):
        straight = np.ascontiguousarray(odd, np.float32)
        y, g = f(odd), np.cos(straight)
        assert y.dtype == np.float32 and y.base is None
        np.testing.assert_allclose(y, f(straight), rtol=1e-6)
        dx = pullback(name, g.astype(odd.dtype), odd)
        np.testing.assert_array_equal(dx, pullback(name, g, straight))
        assert dx.base is None
    assert f(np.array(0.5)).shape == () and f(np.ones((0, 3))).shape == (0, 3)
    with pytest.raises(TypeError, match="float32 and float64, got int64"):
        pullback(name, np.ones(9000, np.int64), np.ones(9000, np.int64))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [7, 3 * STRETCH + 5, 100_003])
def test_gradient_that_is_one_number_everywhere(name, n):
    x = np.linspace(-3, 3, n).reshape(1, n)
    expected = pullback(name, np.full(x.shape, 1.7), x)
    np.testing.assert_array_equal(pullback(name, np.broadcast_to(1.7, x.shape), x), expected)


def test_arrays_that_do_not_fit():
    x = np.ones(9000, np.float32)
    with pytest.raises(ValueError, match=r"^relu_pullback: g must have shape \(9000,\), got \(8999,\)"):
        kernels.relu_pullback(x[1:], x)
    with pytest.raises(TypeError, match="one dtype, got float32, float64"):
        kernels.gelu_pullback(x.astype(np.float64), x)
