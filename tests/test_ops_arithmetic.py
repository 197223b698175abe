"""Elementwise ops: broadcasting undone, dtypes, the edges of domains, ties, selection, comparisons."""

import numpy as np
import pytest
from op_gradients import gradient, second_gradient, value_and_gradients

from tinygrad_qkv import Tensor, no_grad, ops

INF, NAN = np.inf, np.nan
FLOAT, LONG, BOOL = np.float32, np.int64, np.bool_


# ---- broadcasting


def test_an_outer_product_sums_over_the_stretched_axis_only():
    w = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    _, da, db = value_and_gradients(ops.mul, [[2.0], [3.0]], [[1.0, -1.0, 4.0]], weights=w)
    np.testing.assert_array_equal(da, [[1 - 2 + 12], [4 - 5 + 24]])
    np.testing.assert_array_equal(db, [[2 + 12, 4 + 15, 6 + 18]])


def test_a_0d_operand_gets_a_0d_gradient():
    y, ds, dx = value_and_gradients(ops.mul, 3.0, [[1.0, 2.0], [3.0, 4.0]])
    assert y.shape == (2, 2) and ds.shape == () and ds == 10
    np.testing.assert_array_equal(dx, np.full((2, 2), 3.0))


def test_both_sides_stretched_and_one_of_length_1_in_a_batch():
    x, w, b = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), [[1.0], [0.0]], np.zeros((1, 4))
    _, dw, db = value_and_gradients(lambda w, b: ((x @ w + b) ** 2).sum(), w, b)
    np.testing.assert_array_equal(db, np.full((1, 4), 2 * (1 + 3 + 5.0)))
    np.testing.assert_array_equal(dw, 8 * x.T @ [[1.0], [3.0], [5.0]])


def test_shapes_that_do_not_broadcast_are_both_named():
    with pytest.raises(ValueError, match=r"\(3, 4\) and \(3,\) do not broadcast: their axes -1 have sizes 4 and 3"):
        Tensor(np.ones((3, 4))) + Tensor(np.ones(3))
    with pytest.raises(ValueError, match=r"axes -2 have sizes 2 and 3.*unsqueeze"):
        Tensor(np.ones((2, 1))) * Tensor(np.ones((3, 4)))
    assert (Tensor(np.ones((0, 4))) + Tensor(np.ones((1, 4)))).shape == (0, 4)
    with pytest.raises(ValueError, match="axes -1 have sizes 0 and 2"):
        Tensor(np.ones(0)) + Tensor(np.ones(2))


# ---- dtypes

LONGS, BOOLS, F32, F64 = np.array([1, 2, 4]), np.array([True, False, True]), np.ones(3, "f4"), np.ones(3)


@pytest.mark.parametrize(
    ("call", "dtype", "values"),
    [
        (lambda: Tensor(LONGS) + Tensor(LONGS), LONG, [2, 4, 8]),
        (lambda: Tensor(LONGS) + 1.5, FLOAT, [2.5, 3.5, 5.5]),
        (lambda: Tensor(LONGS) / 2, FLOAT, [0.5, 1, 2]),
        (lambda: Tensor(LONGS) / Tensor(LONGS), FLOAT, [1, 1, 1]),
        (lambda: 1 / Tensor(LONGS), FLOAT, [1, 0.5, 0.25]),
        (lambda: Tensor(LONGS) // 2, LONG, [0, 1, 2]),
        (lambda: Tensor(LONGS) % 3, LONG, [1, 2, 1]),
        (lambda: Tensor(LONGS) ** 2, LONG, [1, 4, 16]),
        (lambda: Tensor(LONGS) ** -1, FLOAT, [1, 0.5, 0.25]),
        (lambda: Tensor(LONGS) ** Tensor([-1, 0, 2]), FLOAT, [1, 1, 16]),
        (lambda: 2 ** -Tensor(LONGS), FLOAT, [0.5, 0.25, 0.0625]),
        (lambda: Tensor(LONGS) ** 0.5, FLOAT, [1, 2**0.5, 2]),
        (lambda: Tensor(LONGS).exp(), FLOAT, np.exp(LONGS)),
        (lambda: Tensor(LONGS).sqrt(), FLOAT, np.sqrt(LONGS)),
        (lambda: Tensor(LONGS).reciprocal(), FLOAT, [1, 0.5, 0.25]),
        (lambda: Tensor(LONGS).relu(), FLOAT, [1, 2, 4]),
        (lambda: Tensor(LONGS).clip(2, 3), LONG, [2, 2, 3]),
        (lambda: Tensor(LONGS).clip(1.5, 3), FLOAT, [1.5, 2, 3]),
        (lambda: ops.where(BOOLS, Tensor(LONGS), 0.5), FLOAT, [1, 0.5, 4]),
        (lambda: Tensor(LONGS).masked_fill(BOOLS, 0.5), FLOAT, [0.5, 2, 0.5]),
        (lambda: ops.maximum(Tensor(LONGS), 1.5), FLOAT, [1.5, 2, 4]),
        (lambda: Tensor(BOOLS) * 2, LONG, [2, 0, 2]),
        (lambda: Tensor(BOOLS) * 1.5, FLOAT, [1.5, 0, 1.5]),
        (lambda: ~Tensor(BOOLS), BOOL, [False, True, False]),
        (lambda: Tensor(BOOLS) & Tensor([True, True, False]), BOOL, [True, False, False]),
        (lambda: Tensor(LONGS) + Tensor(F32), FLOAT, [2, 3, 5]),
        (lambda: Tensor(LONGS, dtype="int32") + Tensor(F64), np.float64, [2, 3, 5]),
        (lambda: Tensor(F32) + Tensor(F64), np.float64, [2, 2, 2]),
    ],
)
def test_integers_become_floats_where_floats_are_needed_and_only_there(call, dtype, values):
    y = call()
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y), values, rtol=1e-6)


SCALARS = [2, 2.0, True, np.float64(2), np.float32(2), np.int64(2), np.bool_(True), np.sqrt(4)]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__} {s}")
@pytest.mark.parametrize("op", [ops.add, ops.sub, ops.mul, ops.div, ops.pow, ops.maximum, ops.mod, ops.logaddexp])
def test_python_and_numpy_scalars_are_weak_on_both_sides(op, scalar):
    for dtype in ("float32", "float64"):
        x = Tensor([1.5, 2.5], dtype=dtype, requires_grad=True)
        y = op(x, scalar).sum() + op(scalar, x).sum()
        y.backward()
        assert y.dtype == x.grad.dtype == dtype


@pytest.mark.parametrize("f", [ops.dropout, ops.norm, ops.elu, ops.leaky_relu, ops.clip])
def test_a_numpy_scalar_as_setting_is_weak_too(f):
    x = Tensor([1.5, 2.5], requires_grad=True)
    y = f(x, np.float64(1.0) if f is ops.norm else np.float64(0.5)).sum()
    y.backward()
    assert y.dtype == x.grad.dtype == np.float32


def test_operators_take_a_scalar_on_the_left():
    x = Tensor([1.0, 2.0], requires_grad=True)
    for y, values in (
        (1 - x, [0, -1]),
        (6 / x, [6, 3]),
        (3**x, [3, 9]),
        (5 // x, [5, 2]),
        (5 % x, [0, 1]),
        (np.float64(2) * x, [2, 4]),
        (np.float32(2) - x, [1, 0]),
        (np.int64(3) + x, [4, 5]),
        (np.float64(2) ** x, [2, 4]),
    ):
        assert y.dtype == np.float32
        np.testing.assert_allclose(np.asarray(y), values, rtol=1e-6)


def test_arrays_keep_their_dtype_and_lists_are_constants():
    x = Tensor([1.0, 2.0], requires_grad=True)
    assert (x * np.ones(2)).dtype == np.float64
    assert (x * [1, 2]).dtype == (x * [0.5, 2.0]).dtype == np.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: x * [w, 3.0],
        lambda x, w: (w, 1.0) - x,
        lambda x, w: [[w, w], [1.0, 2.0]] @ x,
        lambda x, w: ops.where([True, False], [w, w], x),
        lambda x, w: ops.softmax([w, w]),
        lambda x, w: ops.cat([[w, w], x]),
    ],
    ids=["*", "+", "@", "where", "softmax", "cat"],
)
def test_a_list_of_tensors_that_require_grad_is_not_silently_a_constant(call):
    x, w = Tensor([1.0, 2.0], requires_grad=True), Tensor(3.0, requires_grad=True)
    with pytest.raises(TypeError, match=r"would cut them off.*stack"):
        call(x, w)
    assert not call(x.detach(), w.detach()).requires_grad
    with no_grad():
        call(x, w)


@pytest.mark.parametrize("other", [None, "a", 1j, object()])
def test_what_is_no_number_is_refused_by_name(other):
    with pytest.raises(TypeError, match=f"got {type(other).__name__}"):
        Tensor([1.0]) + other


def test_float16_is_for_storage_only():
    half = Tensor(np.ones(2, np.float16))
    assert half.reshape(2, 1)[0].dtype == np.float16
    for call in (lambda: half + 1, lambda: half.exp(), lambda: half.sum(), lambda: half == 1, lambda: -half):
        with pytest.raises(TypeError, match="float16 is for storage only"):
            call()


# ---- edges of domains


@pytest.mark.parametrize(
    ("f", "x", "dx"),
    [
        (lambda x: x**0, [0.0, 3.14, -2.0, INF], [0, 0, 0, 0]),
        (lambda x: x**1, [0.0, -2.0], [1, 1]),
        (lambda x: x**2, [0.0, -2.0], [0, -4]),
        (lambda x: x**2.0, [0.0, -2.0], [0, -4]),
        (lambda x: x**3, [0.0, -2.0], [0, 12]),
        (lambda x: x ** Tensor([0.0, 2.0, 3.0]), [0.0, 0.0, -2.0], [0, 0, 12]),
        (lambda x: x**0.5, [0.0, 4.0], [INF, 0.25]),
        (lambda x: 0**x, [1.0, 2.0, 0.0], [0, 0, 0]),
        (lambda x: Tensor([0.0, 2.0], dtype="f8") ** x, [2.0, 2.0], [0, 4 * np.log(2)]),
        (lambda x: x.sqrt(), [0.0, 4.0], [INF, 0.25]),
        (lambda x: x.abs(), [0.0, -0.0, -3.0], [0, 0, -1]),
        (lambda x: x.sign(), [0.0, -3.0], [0, 0]),
        (lambda x: x.relu(), [-1.0, 0.0, -0.0, 2.0], [0, 0, 0, 1]),
        (lambda x: x.leaky_relu(), [-1.0, 2.0], [0.01, 1]),
        (lambda x: x.clip(-1, 1), [-2.0, -1.0, 0.0, 1.0, 2.0, NAN], [0, 1, 1, 1, 0, 1]),
        (lambda x: x % 3, [5.0, -5.0], [1, 1]),
        (lambda x: 5 % x, [3.0, -3.0], [-1, 2]),
    ],
)
def test_gradients_at_edges(f, x, dx):
    np.testing.assert_allclose(gradient(f, x), dx, rtol=1e-12)


def test_second_derivatives_at_zero_are_those_of_the_polynomial():
    np.testing.assert_array_equal(second_gradient(lambda x: x**2, [0.0, -2.0]), [2, 2])
    np.testing.assert_array_equal(second_gradient(lambda x: x**3, [0.0, -2.0]), [0, -12])
    np.testing.assert_array_equal(second_gradient(lambda x: x ** Tensor([2.0, 1.0]), [0.0, 0.0]), [2, 0])
    np.testing.assert_array_equal(second_gradient(lambda x: x.relu() ** 2, [-1.0, 2.0]), [0, 2])


@pytest.mark.parametrize(
    ("op", "a", "b", "y", "da", "db"),
    [
        (ops.maximum, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [1, 3, 3], [0.5, 0, 1], [0.5, 1, 0]),
        (ops.minimum, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], [1, 2, 2], [0.5, 1, 0], [0.5, 0, 1]),
        (ops.maximum, [INF, -INF], [INF, 0.0], [INF, 0], [0.5, 0], [0.5, 1]),
        (ops.maximum, [NAN, 1.0], [1.0, NAN], [NAN, NAN], [1, 1], [1, 1]),
    ],
)
def test_ties_share_the_gradient_and_nan_wins(op, a, b, y, da, db):
    for got, expected in zip(value_and_gradients(op, a, b), (y, da, db), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "f", ["relu", "abs", "leaky_relu", "elu", "gelu", "silu", "softplus", "sigmoid", "tanh", "exp"]
)
def test_nan_is_kept_and_stays_alone(f):
    y = np.asarray(getattr(Tensor([NAN, -1.0, 2.0]), f)())
    assert np.isnan(y[0]) and np.isfinite(y[1:]).all()


# ---- selection


def test_where_never_lets_the_other_branch_through():
    keep = np.array([True, False, False])
    y, da, db = value_and_gradients(lambda a, b: ops.where(keep, a, b), [1.0, INF, NAN], [-INF, 5.0, NAN], weights=2.0)
    np.testing.assert_array_equal(y, [1, 5, NAN])
    np.testing.assert_array_equal(da, [2, 0, 0])
    np.testing.assert_array_equal(db, [0, 2, 2])


def test_where_names_the_shapes_that_do_not_broadcast():
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\) do not broadcast"):
        ops.where(np.ones(3, bool), Tensor([1.0, 2.0]), 0.0)


def test_where_selects_gradients_too():
    """An infinite gradient of the other branch is dropped, not multiplied by 0."""
    keep = np.array([True, False])
    _, da, db = value_and_gradients(lambda a, b: ops.where(keep, a, b), [1.0, 2.0], [3.0, 4.0], weights=[INF, NAN])
    np.testing.assert_array_equal([da, db], [[INF, 0], [0, NAN]])


def test_two_wheres_keep_a_logarithm_from_zero():
    def safe_log(x: Tensor) -> Tensor:
        return ops.where(x > 0, ops.where(x > 0, x, 1.0).log(), 0.0)

    np.testing.assert_array_equal(gradient(safe_log, [0.0, 2.0]), [0, 0.5])
    np.testing.assert_array_equal(second_gradient(safe_log, [0.0, 2.0]), [0, -0.25])


def test_masked_fill_replaces_nan_and_stops_its_gradient():
    y, dx = value_and_gradients(lambda x: x.masked_fill([True, False], -INF), [NAN, 2.0])
    np.testing.assert_array_equal(y, [-INF, 2])
    np.testing.assert_array_equal(dx, [0, 1])


@pytest.mark.parametrize("mask", [np.array([1, 0]), np.array([1.0, 0.0])])
def test_a_condition_is_boolean(mask):
    with pytest.raises(TypeError, match="compare first"):
        ops.where(mask, Tensor([1.0, 2.0]), 0.0)
    with pytest.raises(TypeError, match="compare first"):
        Tensor([1.0, 2.0]).masked_fill(mask, 0.0)


def test_a_mask_changed_after_the_forward_moves_no_gradient():
    keep, x = np.array([True, False]), Tensor([1.0, 2.0], requires_grad=True)
    y = ops.where(keep, x, 0.0)
    keep[:] = ~keep
    y.sum().backward()
    np.testing.assert_array_equal(np.asarray(x.grad), [1, 0])


def test_clip_with_tensors_as_limits_is_a_minimum_of_a_maximum():
    _, dx, dlow, dhigh = value_and_gradients(ops.clip, [-2.0, 0.0, 2.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 1.0])
    np.testing.assert_array_equal([dx, dlow, dhigh], [[0, 1, 0], [1, 0, 0], [0, 0, 1]])
    with pytest.raises(ValueError, match="low, high or both"):
        ops.clip(Tensor([1.0]))


# ---- comparisons


def test_comparisons_give_constant_booleans():
    x = Tensor([1.0, NAN, 3.0], requires_grad=True)
    for y, values in (
        (x > 2, [False, False, True]),
        (x == x, [True, False, True]),
        (x != x, [False, True, False]),
        (x <= 2, [True, False, False]),
        (x.isnan(), [False, True, False]),
        ((x > 0) ^ (x > 2), [True, False, False]),
    ):
        assert y.dtype == bool and not y.requires_grad and y.tolist() == values
    assert (x == None) is False and (x != "a") is True  # noqa: E711


def test_logic_on_floats_is_refused():
    with pytest.raises(TypeError, match="compare first"):
        Tensor([1.0]) & True
