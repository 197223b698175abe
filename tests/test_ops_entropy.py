"""Softmax cross-entropy: every kind of target, smoothing, and logits at the edges."""

import numpy as np
import pytest
from op_gradients import second_gradient, value_and_gradients
from scipy import special

from tinygrad_qkv import Tensor, grad, ops

INF, NAN = np.inf, np.nan
Z = np.array([[1.0, 2.0], [9.0, -9.0], [0.0, 3.0]])


def loss_and_gradient(logits, targets, dtype="float64", **options):
    return value_and_gradients(lambda z: ops.cross_entropy(z, targets, **options), logits, dtype=dtype)


def test_the_mean_is_over_the_targets_that_count():
    p = special.softmax(Z, -1)
    loss, dz = loss_and_gradient(Z, [1, -100, 0])
    np.testing.assert_allclose(loss, -(np.log(p[0, 1]) + np.log(p[2, 0])) / 2)
    np.testing.assert_allclose(dz, [[p[0, 0] / 2, (p[0, 1] - 1) / 2], [0, 0], [(p[2, 0] - 1) / 2, p[2, 1] / 2]])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_with_all_targets_ignored_the_loss_and_the_gradient_are_zero(reduction, smoothing):
    loss, dz = loss_and_gradient(Z, [-100] * 3, reduction=reduction, label_smoothing=smoothing)
    assert loss == 0
    np.testing.assert_array_equal(dz, np.zeros((3, 2)))


def test_an_ignored_row_may_hold_anything():
    loss, dz = loss_and_gradient([[NAN, INF], [0.0, 0.0]], [-100, 1])
    np.testing.assert_allclose(loss, np.log(2))
    np.testing.assert_allclose(dz, [[0, 0], [0.5, -0.5]])
    x = Tensor([[NAN, NAN], [0.0, 1.0]], requires_grad=True)
    (first,) = grad(ops.cross_entropy(x, [-100, 1]), x, create_graph=True)
    assert np.isfinite(np.asarray(grad(first[1, 0], x)[0])).all()


def test_any_number_can_be_the_one_that_is_ignored():
    for ignored in (-1, 0, 7):
        loss, _ = loss_and_gradient(Z, [1, ignored, 1], ignore_index=ignored)
        np.testing.assert_allclose(loss, loss_and_gradient(Z[[0, 2]], [1, 1])[0])


def test_smoothing_spreads_over_all_classes_and_skips_ignored_rows():
    loss, dz = loss_and_gradient([[0.0, 0.0, 0.0]], [0], label_smoothing=0.3)
    np.testing.assert_allclose(loss, np.log(3))
    np.testing.assert_allclose(dz, [[1 / 3 - 0.8, 1 / 3 - 0.1, 1 / 3 - 0.1]])
    both = loss_and_gradient([[1.0, 2.0, 0.0], [5.0, -5.0, 5.5]], [1, -100], label_smoothing=0.2)[0]
    np.testing.assert_allclose(both, loss_and_gradient([[1.0, 2.0, 0.0]], [1], label_smoothing=0.2)[0])


@pytest.mark.parametrize(
    ("logits", "target", "loss", "dz"),
    [
        ([0.0, -INF], 0, 0, [0, 0]),
        ([0.0, -INF], 1, INF, [1, -1]),
        ([0.0, 200.0], 0, 200, [-1, 1]),
        ([1e30, -1e30], 0, 0, [0, 0]),
        ([1e8, 1e8], 1, np.log(2), [0.5, -0.5]),
        ([-1e8, -1e8], 1, np.log(2), [0.5, -0.5]),
        ([3e38, -3e38], 0, 0, [0, 0]),
        ([5.0], 0, 0, [0]),
    ],
)
def test_logits_at_the_edges_of_float32(logits, target, loss, dz):
    got = loss_and_gradient([logits], [target], dtype="float32")
    np.testing.assert_allclose(got[0], loss, rtol=1e-6)
    np.testing.assert_allclose(got[1], [dz], atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4, -1e6])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_an_offset_shared_by_all_logits_costs_no_precision(offset, smoothing):
    z = (np.random.default_rng(0).normal(size=(3, 11)) + offset).astype(np.float32)
    single, double = (loss_and_gradient(z, [0, 4, 7], d, label_smoothing=smoothing) for d in ("float32", "float64"))
    np.testing.assert_allclose(single[0], double[0], rtol=1e-6)
    np.testing.assert_allclose(single[1], double[1], atol=1e-7)


def test_second_derivatives_with_minus_infinity_are_finite():
    assert np.isfinite(second_gradient(lambda z: ops.cross_entropy(z, [0]) ** 2, [[0.0, -INF, 1.0]])).all()


def test_shapes_of_logits_and_targets():
    z = np.random.default_rng(0).normal(size=(2, 3, 5))
    t = np.array([[0, 1, 2], [3, 4, -100]])
    none = np.asarray(ops.cross_entropy(z, t, reduction="none"))
    assert none.shape == (2, 3) and none[1, 2] == 0
    np.testing.assert_allclose(ops.cross_entropy(z, t).item(), none.sum() / 5)
    np.testing.assert_allclose(ops.cross_entropy(z, t, reduction="sum").item(), none.sum())
    np.testing.assert_allclose(ops.cross_entropy(z[0, 0], 2, reduction="none").item(), -special.log_softmax(z[0, 0])[2])
    assert ops.cross_entropy(np.zeros((0, 3)), np.zeros(0, int)).item() == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_targets_of_any_integer_dtype(dtype):
    targets = np.array([0, 1, 1], dtype)
    loss, _ = loss_and_gradient(Z, targets)
    np.testing.assert_allclose(loss, loss_and_gradient(Z, Tensor(targets))[0])


def test_targets_changed_after_the_forward_move_no_gradient():
    z, targets = Tensor(Z, requires_grad=True), np.array([0, 1, 1])
    loss = ops.cross_entropy(z, targets)
    targets[:] = 0
    loss.backward()
    np.testing.assert_allclose(np.asarray(z.grad), loss_and_gradient(Z, [0, 1, 1])[1])


@pytest.mark.parametrize(
    ("shape", "targets", "options", "error", "message"),
    [
        ((2, 3), [0, 3], {}, IndexError, r"target 3 is outside the 3 classes .* \(0 to 2"),
        ((2, 3), [0, -1], {}, IndexError, "target -1"),
        ((2, 3), [0, -100], {"ignore_index": 5}, IndexError, "target -100"),
        ((2, 3), [0.0, 1.0], {}, TypeError, "integers"),
        ((2, 3), [True, False], {}, TypeError, "integers"),
        ((2, 3), [0], {}, ValueError, r"need targets of shape \(2,\), got \(1,\)"),
        ((2, 3), np.zeros((2, 3)), {}, ValueError, r"need targets of shape .*one-hot targets are targets.argmax\(-1\)"),
        ((2, 3, 5), np.zeros((2, 5), int), {}, ValueError, r"np.moveaxis\(logits, 1, -1\)"),
        ((), 0, {}, ValueError, "the classes on the last axis"),
        ((2, 3), [0, 1], {"ignore_index": None}, TypeError, "ignore_index is an integer, got None"),
        ((2, 3), [0, 1], {"ignore_index": 0.7}, TypeError, "ignore_index is an integer, got 0.7"),
        ((2, 3), [0, 1], {"label_smoothing": 1.5}, ValueError, "between 0 and 1"),
        ((2, 3), [0, 1], {"label_smoothing": NAN}, ValueError, "between 0 and 1"),
        ((2, 3), [0, 1], {"reduction": "avg"}, ValueError, "'mean', 'sum' or 'none'"),
    ],
)
def test_wrong_calls_say_what_is_wrong(shape, targets, options, error, message):
    with pytest.raises(error, match=message):
        ops.cross_entropy(np.zeros(shape), targets, **options)


def test_integers_of_any_width_as_targets():
    logits = np.zeros((2, 3), np.float32)
    with pytest.raises(IndexError, match=str(2**64 - 100)):  # which as an int64 would be ignored
        ops.cross_entropy(logits, np.array([2**64 - 100, 1], np.uint64))
    np.testing.assert_allclose(ops.cross_entropy(logits, np.array([2, 1], np.uint64)), np.log(3), rtol=1e-6)
    with pytest.raises(ValueError, match="fits in int64"):
        ops.cross_entropy(logits, [2, 1], ignore_index=2**70)
