"""Softmax, log-softmax, layer norm and RMS norm at the edges of float32."""

import warnings

import numpy as np
import pytest
from op_gradients import gradient, second_gradient, value_and_gradients
from scipy import special

from tinygrad_qkv import Tensor, ops

INF, NAN = np.inf, np.nan


# ---- softmax


def test_the_maximum_is_taken_per_row():
    x = np.array([[1000.0, 1001.0], [-1000.0, -1001.0], [3e38, -3e38]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = np.asarray(Tensor(x).softmax(-1))
    np.testing.assert_allclose(y, special.softmax(x.astype(float), -1), rtol=1e-6)


def test_the_gradient_is_that_of_the_whole_row():
    x, w = np.array([0.5, -1.0, 2.0]), np.array([1.0, 2.0, -3.0])
    p = special.softmax(x)
    np.testing.assert_allclose(gradient(ops.softmax, x, w), p * (w - (p * w).sum()), rtol=1e-14)


def test_saturated_rows_have_gradient_zero():
    np.testing.assert_array_equal(gradient(ops.softmax, [-900.0, 0.0, 900.0], [1.0, 2.0, 3.0], "float32"), [0, 0, 0])


def test_minus_infinity_gets_weight_zero_and_gradient_zero():
    y, dx = value_and_gradients(ops.softmax, [0.0, -INF, 0.0], weights=[1.0, 5.0, 3.0])
    np.testing.assert_array_equal(y, [0.5, 0, 0.5])
    np.testing.assert_array_equal(dx, [-0.5, 0, 0.5])
    assert np.isfinite(second_gradient(lambda x: ops.softmax(x) ** 2, [0.0, -INF, 1.0])).all()


@pytest.mark.parametrize("f", [ops.softmax, ops.log_softmax])
@pytest.mark.parametrize("row", [[-INF, -INF], [NAN, 0.0], [INF, 0.0]])
def test_a_row_without_an_answer_is_nan_and_stays_alone(f, row):
    y = np.asarray(f(Tensor([row, [0.0, 0.0]])))
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_log_softmax_does_not_underflow():
    np.testing.assert_array_equal(np.asarray(Tensor([0.0, 200.0]).log_softmax(-1)), [-200, 0])
    y, dx = value_and_gradients(lambda x: ops.log_softmax(x)[1:], [-INF, 0.0, 0.0], weights=[1.0, 3.0])
    np.testing.assert_allclose(y, [-np.log(2)] * 2)
    np.testing.assert_allclose(dx, [0, -1, 1], atol=1e-15)


def test_integers_become_probabilities():
    y = Tensor([0, 1, 2]).softmax()
    assert y.dtype == np.float32
    np.testing.assert_allclose(np.asarray(y), special.softmax([0.0, 1.0, 2.0]), rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0), (2, 1)])
def test_softmax_of_one_and_of_nothing(shape):
    x = Tensor(np.zeros(shape), requires_grad=True)
    for y, value in ((x.softmax(), 1), (x.log_softmax(), 0)):
        y.sum().backward()
        np.testing.assert_array_equal(np.asarray(y), np.full(shape, value))
    np.testing.assert_array_equal(np.asarray(x.grad), np.zeros(shape))


# ---- layer norm


def plain(x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def test_the_variance_is_biased_and_eps_is_inside_the_root():
    y = ops.layer_norm([[1.0, 2.0, 4.0]], [1.0, 2.0, 3.0], [0.5, 0.0, -0.5])
    expected = plain(np.array([[1.0, 2.0, 4.0]])) * [1, 2, 3] + [0.5, 0, -0.5]
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-6)
    small = np.asarray(ops.layer_norm(np.array([[0.0, 2e-3]]), np.ones(2), np.zeros(2), eps=1e-6))
    np.testing.assert_allclose(small, [[-1, 1]] / np.sqrt(2), rtol=1e-6)


def test_a_large_mean_costs_no_precision():
    y = ops.layer_norm(np.array([[40000.0, 40001, 40002, 40003]], np.float32), np.ones(4, "f4"), np.zeros(4, "f4"))
    np.testing.assert_allclose(np.asarray(y), plain(np.array([[0.0, 1, 2, 3]])), rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1234.0, -1e8])
def test_a_constant_row_gives_the_bias(value):
    row, bias = np.full((1, 64), value, np.float32), np.full(64, 0.5, np.float32)
    y = ops.layer_norm(row, np.ones(64, np.float32), bias)
    np.testing.assert_allclose(np.asarray(y), [bias], atol=1e-5)


def test_gradients_of_weight_and_bias_are_sums_over_the_rows():
    x, g = (np.random.default_rng(k).normal(size=(2, 4, 3)) for k in (0, 1))
    _, dx, dw, db = value_and_gradients(ops.layer_norm, x, np.ones(3), np.zeros(3), weights=g)
    np.testing.assert_allclose(dw, (g * plain(x)).sum((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(db, g.sum((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(dx.sum(-1), np.zeros((2, 4)), atol=1e-12)


def test_nan_stays_in_its_row():
    y = np.asarray(ops.layer_norm([[NAN, 1.0], [1.0, 2.0]], np.ones(2, "f4"), np.zeros(2, "f4")))
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_a_row_of_one_and_a_row_of_nothing():
    assert np.asarray(ops.layer_norm([[3.0], [4.0]], [1.0], [0.5])).tolist() == [[0.5], [0.5]]
    x = Tensor(np.zeros((3, 0)), requires_grad=True)
    ops.layer_norm(x, np.zeros(0), np.zeros(0)).sum().backward()
    assert x.grad.shape == (3, 0)


def test_gradients_keep_their_own_dtype():
    x, w, b = (Tensor(np.ones(s, d), requires_grad=True) for s, d in (((2, 3), "f4"), (3, "f8"), (3, "f4")))
    y = ops.layer_norm(x, w, b)
    y.sum().backward()
    assert [t.dtype for t in (y, x.grad, w.grad, b.grad)] == [np.float32, np.float32, np.float64, np.float32]
    for parameters in ((np.ones(3, "f2"), b), (w, np.ones(3, "f2"))):
        with pytest.raises(TypeError, match="float16 is for storage only"):
            ops.layer_norm(x, *parameters)


@pytest.mark.parametrize(
    ("x", "w", "b"), [((3, 4), (3,), (4,)), ((3, 4), (4,), (1,)), ((), (1,), (1,)), ((4,), (), ())]
)
def test_parameters_must_have_the_width_of_the_rows(x, w, b):
    with pytest.raises(ValueError, match="needs weight and bias of shape"):
        ops.layer_norm(np.ones(x), np.ones(w), np.ones(b))


# ---- RMS norm


def test_rms_norm_keeps_the_mean_and_puts_eps_inside_the_root():
    y = ops.rms_norm(np.array([[3.0, 4.0], [0.0, 1e-3]]), np.array([1.0, -1.0]), eps=1e-6)
    expected = [[3 / np.sqrt(12.5 + 1e-6), -4 / np.sqrt(12.5 + 1e-6)], [0, -1 / np.sqrt(1.5)]]
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-12)


def test_the_gradient_of_rms_norm_is_at_right_angles_to_the_row():
    """With eps = 0 the length of a row does not matter."""
    x, g = (np.random.default_rng(k).normal(size=(2, 4, 3)) for k in (0, 1))
    _, dx, dw = value_and_gradients(lambda x, w: ops.rms_norm(x, w, 0.0), x, np.array([1.0, 2.0, 0.5]), weights=g)
    np.testing.assert_allclose((dx * x).sum(-1), np.zeros((2, 4)), atol=1e-12)
    np.testing.assert_allclose(dw, (g * x / np.sqrt((x * x).mean(-1, keepdims=True))).sum((0, 1)), rtol=1e-12)


def test_rms_norm_of_zeros_integers_and_nothing():
    x = Tensor(np.zeros((2, 3)), requires_grad=True)
    ops.rms_norm(x, np.ones(3)).sum().backward()
    np.testing.assert_allclose(np.asarray(x.grad), np.full((2, 3), 1e-5**-0.5))
    assert ops.rms_norm([3, 4], np.ones(2, "f4")).dtype == np.float32
    x = Tensor(np.zeros((3, 0)), requires_grad=True)
    ops.rms_norm(x, np.zeros(0)).sum().backward()
    assert x.grad.shape == (3, 0)


def test_rms_norm_says_what_is_wrong():
    for x, w in (((3, 4), (3,)), ((), (1,)), ((4,), ())):
        with pytest.raises(ValueError, match=r"rms_norm of shape .* needs weight of shape"):
            ops.rms_norm(np.ones(x), np.ones(w))
    with pytest.raises(TypeError, match="float16 is for storage only"):
        ops.rms_norm(np.ones(3, "f4"), np.ones(3, "f2"))
