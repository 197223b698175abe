"""Reductions: axes, ties, empty tensors, dtypes, NaN, and the numbers at the edges."""

import warnings

import numpy as np
import pytest
from op_gradients import gradient, second_gradient, value_and_gradients

from tinygrad_qkv import Tensor, ops

INF, NAN = np.inf, np.nan
ALL = ("sum", "mean", "max", "min", "prod", "var", "std", "logsumexp", "norm", "any", "all")
X = np.arange(24.0).reshape(2, 3, 4)


# ---- axes


@pytest.mark.parametrize("axis", [(0, 2), (-3, -1), (2, 0), [0, 2]])
def test_two_axes_in_any_spelling(axis):
    w = np.array([1.0, 10.0, 100.0])
    y, dx = value_and_gradients(lambda x: x.sum(axis=axis), X, weights=w)
    np.testing.assert_array_equal(y, X.sum((0, 2)))
    np.testing.assert_array_equal(dx, np.broadcast_to(w[None, :, None], X.shape))


def test_a_mean_over_rows_spreads_each_columns_gradient():
    np.testing.assert_allclose(gradient(lambda x: x.mean(0), np.ones((3, 2)), weights=[1.0, 2.0]), [[1 / 3, 2 / 3]] * 3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("axis", [3, -4, (0, 0), (0, -3), (0, 5)])
def test_a_wrong_or_repeated_axis_raises(name, axis):
    with pytest.raises(ValueError, match="axis"):
        getattr(Tensor(X), name)(axis=axis)


@pytest.mark.parametrize("name", ["argmax", "argmin", "cumsum", "softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [3, -4])
def test_a_wrong_single_axis_raises(name, axis):
    with pytest.raises(ValueError, match="out of bounds"):
        getattr(Tensor(X), name)(axis)


@pytest.mark.parametrize("name", ALL)
def test_no_axes_reduce_nothing(name):
    y = getattr(Tensor(X), name)(axis=())
    assert y.shape == X.shape
    if name in ("sum", "mean", "max", "min", "prod"):
        np.testing.assert_array_equal(np.asarray(y), X)


@pytest.mark.parametrize("name", [*ALL, "argmax", "argmin", "cumsum", "softmax", "log_softmax"])
@pytest.mark.parametrize(("wrong", "right"), [("dim", "axis="), ("keepdim", "keepdims="), ("correction", "ddof=")])
def test_other_libraries_words_are_answered_with_ours(name, wrong, right):
    with pytest.raises(TypeError, match=f"{wrong}.*{right}"):
        getattr(Tensor(X), name)(**{wrong: 1})


def test_cumsum_needs_one_axis():
    with pytest.raises(TypeError, match="one axis"):
        Tensor(X).cumsum()
    with pytest.raises(TypeError):
        ops.cumsum(Tensor(X), (0, 1))


# ---- ties, zeros, NaN


@pytest.mark.parametrize(
    ("f", "x", "y", "dx"),
    [
        (ops.max, [2.0, 5.0, 5.0], 5, [0, 0.5, 0.5]),
        (ops.min, [2.0, 2.0, 2.0, 5.0], 2, [1 / 3, 1 / 3, 1 / 3, 0]),
        (lambda x: x.max(0), [[1.0, 3.0], [1.0, 2.0]], [1, 3], [[0.5, 1], [0.5, 0]]),
        (ops.max, [-INF, -INF], -INF, [0.5, 0.5]),
        (ops.max, [INF, 1.0], INF, [1, 0]),
        (ops.max, [1.0, NAN, 3.0], NAN, [0, 1, 0]),
        (ops.min, [NAN, NAN, 3.0], NAN, [0.5, 0.5, 0]),
        (ops.max, 3.0, 3, 1),
        (lambda x: x.norm(INF), [-2.0, 2.0, 1.0], 2, [-0.5, 0.5, 0]),
        (ops.prod, [0.0, 2.0, 3.0], 0, [6, 0, 0]),
        (ops.prod, [0.0, 0.0, 3.0], 0, [0, 0, 0]),
        (ops.norm, [0.0, 0.0], 0, [0, 0]),
        (ops.norm, [3.0, 4.0], 5, [0.6, 0.8]),
        (lambda x: x.norm(1), [0.0, -2.0], 2, [0, -1]),
        (lambda x: x.norm(3), [0.0, 0.0], 0, [0, 0]),
        (lambda x: x.norm(0.5), [0.0, 4.0], 4, [0, 1]),
        (lambda x: x.norm(axis=1), [[0.0, 0.0], [0.0, 2.0]], [0, 2], [[0, 0], [0, 1]]),
        (ops.std, [3.0, 3.0], 0, [0, 0]),
        (lambda x: x.std(1), [[3.0, 3.0], [1.0, 3.0]], [0, 1], [[0, 0], [-0.5, 0.5]]),
        (ops.var, [1.0, 2.0, 3.0, 4.0], 1.25, [-0.75, -0.25, 0.25, 0.75]),
        (lambda x: x.var(ddof=1), [1.0, 2.0, 3.0, 4.0], 5 / 3, [-1, -1 / 3, 1 / 3, 1]),
    ],
)
def test_values_and_gradients_by_hand(f, x, y, dx):
    got = value_and_gradients(f, x)
    np.testing.assert_allclose(got[0], y, rtol=1e-14)
    np.testing.assert_allclose(got[1], dx, rtol=1e-14)


@pytest.mark.parametrize(("order", "message"), [(0, "got 0"), (-1, "got -1"), (-INF, "got -inf")])
def test_a_norm_has_a_positive_order(order, message):
    with pytest.raises(ValueError, match=message):
        Tensor([1.0]).norm(order)
    with pytest.raises(TypeError, match=r"number, got 'fro'.*order 2"):
        Tensor([[1.0]]).norm("fro")


def test_second_derivatives_where_the_first_is_flat():
    np.testing.assert_array_equal(second_gradient(ops.norm, [0.0, 0.0]), [0, 0])
    np.testing.assert_array_equal(second_gradient(ops.std, [3.0, 3.0]), [0, 0])
    np.testing.assert_array_equal(second_gradient(ops.prod, [0.0, 2.0, 3.0]), [5, 3, 2])


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "var", "std", "logsumexp", "norm", "cumsum"])
def test_nan_stays_in_its_row(name):
    x = np.ones((2, 300), np.float32)
    x[0, 137] = NAN
    y = np.asarray(getattr(Tensor(x), name)(axis=1))
    assert np.isnan(y[0]).any() and np.isfinite(y[1]).all()


# ---- nothing to reduce


@pytest.mark.parametrize(
    ("name", "value"),
    [("sum", 0), ("prod", 1), ("mean", NAN), ("var", NAN), ("std", NAN), ("norm", 0), ("logsumexp", -INF)],
)
def test_the_value_of_nothing(name, value):
    """Without a warning; the gradient is empty too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, dx = value_and_gradients(getattr(ops, name), np.zeros(0))
        rows, _ = value_and_gradients(lambda x: getattr(ops, name)(x, axis=1), np.zeros((2, 0)))
        none, _ = value_and_gradients(lambda x: getattr(ops, name)(x, axis=0), np.zeros((2, 0)))
    np.testing.assert_array_equal(y, value)
    np.testing.assert_array_equal(rows, [value, value])
    assert dx.shape == none.shape == (0,)


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("ddof", [2, 3])
def test_too_few_elements_for_ddof_divide_by_zero_as_in_numpy(name, ddof):
    y, dx = value_and_gradients(lambda x: getattr(ops, name)(x, ddof=ddof), [1.0, 3.0])
    assert y == INF and np.isnan(dx).all()


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_nothing_has_no_extreme(name):
    with pytest.raises(ValueError):
        getattr(Tensor(np.zeros(0)), name)()
    with pytest.raises(ValueError):
        getattr(Tensor(np.zeros((3, 0))), name)(axis=1)
    assert getattr(Tensor(np.zeros((3, 0))), name)(axis=0).shape == (0,)


def test_logic_of_nothing():
    assert Tensor(np.zeros(0)).all() and not Tensor(np.zeros(0)).any()


# ---- dtypes


@pytest.mark.parametrize(
    ("f", "x", "dtype", "value"),
    [
        (ops.sum, [True, True, False, True], np.int64, 3),
        (ops.mean, [True, False], np.float32, 0.5),
        (ops.sum, [1, 2], np.int64, 3),
        (ops.mean, [1, 2], np.float32, 1.5),
        (ops.max, [-5, -7], np.int64, -5),
        (ops.min, [3, 9], np.int64, 3),
        (ops.prod, [2, 3], np.int64, 6),
        (ops.var, [1, 2, 3, 4], np.float32, 1.25),
        (ops.norm, [3, 4], np.float32, 5),
        (ops.logsumexp, [0, 0], np.float32, np.log(2)),
        (lambda x: x.cumsum(0)[-1], [True, True], np.int64, 2),
        (ops.argmax, [1.0, 3.0, 3.0], np.int64, 1),
        (ops.argmin, [1, 0, 0], np.int64, 1),
    ],
)
def test_integers_and_booleans(f, x, dtype, value):
    y = f(Tensor(x))
    assert y.dtype == dtype and y.shape == ()
    np.testing.assert_allclose(np.asarray(y), value, rtol=1e-6)


# ---- precision


def test_the_variance_takes_two_passes():
    x = np.array([40000.0, 40001.0, 40002.0, 40003.0], np.float32)
    assert Tensor(x).var().item() == 1.25
    assert Tensor(np.full(64, 1234.5, np.float32)).std().item() == 0


def test_logsumexp_of_extremes_is_silent():
    rows = [[1000.0, 1000.0], [-INF, -INF], [-INF, 0.0], [INF, 0.0], [NAN, 0.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, dx = value_and_gradients(lambda x: x.logsumexp(1), rows)
    np.testing.assert_allclose(y, [1000 + np.log(2), -INF, 0, INF, NAN])
    np.testing.assert_allclose(dx[:3], [[0.5, 0.5], [0, 0], [0, 1]])


def test_a_sum_of_many_float32_is_pairwise():
    x = np.full(100_000, 0.1, np.float32)
    assert abs(Tensor(x).sum().item() - 10_000) < 0.02


def test_a_node_of_a_reduction_saves_no_array_that_it_does_not_need():
    x = Tensor(X, requires_grad=True)
    assert not [s for s in x.sum(0)._node.saved if isinstance(s, (Tensor, np.ndarray))]


@pytest.mark.parametrize("axis", [0, 1])
def test_variance_of_numbers_with_a_large_mean_in_float32(axis):
    """The rounding of the mean itself, 0.03 here, would be in every deviation."""
    small = np.random.default_rng(0).normal(size=(1001, 1001)).astype(np.float32)
    values = (np.float32(1e6) + small).astype(np.float32)
    expected = np.var(values.astype(np.float64), axis=axis)
    np.testing.assert_allclose(Tensor(values).var(axis), expected, rtol=1e-5)
    x = Tensor(values, requires_grad=True)
    x.std(axis).sum().backward()
    centred = values.astype(np.float64) - np.mean(values.astype(np.float64), axis=axis, keepdims=True)
    gradient = centred / np.sqrt(np.expand_dims(expected, axis)) / 1001
    np.testing.assert_allclose(x.grad, gradient, rtol=1e-5, atol=1e-7)
