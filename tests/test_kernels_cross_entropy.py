"""Cross-entropy and its pullback: values, ignored rows, smoothing, masked classes."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import cross_entropy, cross_entropy_pullback

RNG = np.random.default_rng(2)
DTYPES = [np.float32, np.float64]
IGNORE = -100


def reference(x, targets, smoothing):
    """(losses, log-sum-exp, gradient for g = 1) in extended precision."""
    x = x.astype(np.longdouble)
    top = x.max(1, keepdims=True)
    lse = top + np.log(np.exp(x - top).sum(1, keepdims=True))
    keep = (targets != IGNORE)[:, None]
    hot = np.arange(x.shape[1]) == targets[:, None]
    share = (1 - smoothing) * hot + smoothing / x.shape[1]
    losses = np.where(share > 0, share * (lse - x), 0)
    return np.where(keep, losses, 0).sum(1), lse[:, 0], np.where(keep, np.exp(x - lse) - share, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (11, 257), (97, 1009)])
def test_values_and_gradient(dtype, smoothing, shape):
    rows, classes = shape
    x = 4 * RNG.standard_normal(shape).astype(dtype)
    targets = RNG.integers(0, classes, rows)
    targets[1::3] = IGNORE
    g = RNG.standard_normal(rows).astype(dtype)
    losses, lse, gradient = reference(x, targets, smoothing)
    eps = np.finfo(dtype).eps
    got, got_lse = cross_entropy(x, targets, IGNORE, smoothing)
    assert got.dtype == got_lse.dtype == dtype
    assert (abs(got_lse.sum(0) - lse) <= 4 * eps * (1 + abs(lse))).all()
    assert (abs(got - losses) <= 8 * eps * (1 + abs(lse) + abs(x).max(1))).all()
    dx = cross_entropy_pullback(g, x, targets, got_lse, IGNORE, smoothing)
    assert dx.dtype == dtype
    spread = 10 + abs(x) + abs(lse)[:, None]
    bound = eps * abs(g)[:, None] * (2 * abs(gradient) + spread * (abs(gradient) + smoothing + 1e-3))
    assert (abs(dx - g[:, None] * gradient) <= bound).all()
    assert (dx[targets == IGNORE] == 0).all() and (got[targets == IGNORE] == 0).all()


@pytest.mark.parametrize("rows", [4, 1201])  # serial, parallel
def test_ignored_rows_are_zero_whatever_stands_in_them(rows):
    x = RNG.standard_normal((rows, 31)).astype(np.float32)
    targets, g = np.full(rows, 5), np.ones(rows, np.float32)
    targets[:2] = IGNORE
    x[0], x[1], g[0], g[1] = np.nan, np.inf, np.nan, np.inf
    losses, lse = cross_entropy(x, targets, IGNORE, 0.0)
    dx = cross_entropy_pullback(g, x, targets, lse, IGNORE, 0.0)
    assert (losses[:2] == 0).all() and (dx[:2] == 0).all()
    assert (losses[2:] > 0).all() and np.isfinite(dx).all()


def test_masked_classes_leave_loss_and_gradient_finite():
    x = np.array([[1.0, -np.inf, 2.0]], np.float32)
    losses, lse = cross_entropy(x, np.array([0]), IGNORE, 0.0)
    np.testing.assert_allclose(losses, np.log1p(np.exp(1.0)), rtol=1e-6)
    dx = cross_entropy_pullback(np.ones(1, np.float32), x, np.array([0]), lse, IGNORE, 0.0)
    share = 1 / (1 + np.exp(1.0))
    np.testing.assert_allclose(dx, [[share - 1, 0, 1 - share]], rtol=1e-6)
    assert cross_entropy(x, np.array([1]), IGNORE, 0.0)[0] == np.inf


def test_any_target_may_be_the_ignored_one():
    x = RNG.standard_normal((3, 4))
    losses, _ = cross_entropy(x, np.array([2, 0, 2]), 2, 0.0)
    assert losses[0] == losses[2] == 0 and losses[1] > 0


def test_nan_and_large_logits_stay_in_their_row():
    x = RNG.standard_normal((4, 7)).astype(np.float32)
    x[1, 2], x[2] = np.nan, 3e38
    losses, lse = cross_entropy(x, np.zeros(4, np.int64), IGNORE, 0.0)
    assert np.isnan(losses[1]) and np.isnan(lse[:, 1]).any()
    assert np.isfinite(losses[[0, 2, 3]]).all()
    dx = cross_entropy_pullback(np.ones(4, np.float32), x, np.zeros(4, np.int64), lse, IGNORE, 0.0)
    assert np.isnan(dx[1]).all() and np.isfinite(dx[[0, 2, 3]]).all()
    np.testing.assert_allclose(dx[2], np.full(7, 1 / 7) - np.eye(7)[0], rtol=1e-6)  # an offset that swallows log(7)


def test_no_rows_and_strides():
    losses, lse = cross_entropy(np.ones((0, 3)), np.ones(0, np.int64), IGNORE, 0.1)
    assert losses.shape == (0,) and lse.shape == (2, 0)
    assert cross_entropy_pullback(losses, np.ones((0, 3)), np.ones(0, np.int64), lse, IGNORE, 0.1).shape == (0, 3)
    x, targets = RNG.standard_normal((5, 6)), np.array([1, 2, 3, 4, 5])
    expected, lse = cross_entropy(x, targets, IGNORE, 0.0)
    np.testing.assert_array_equal(
        cross_entropy(np.asfortranarray(x), targets.astype(np.int32), IGNORE, 0.0)[0], expected
    )
    g = np.broadcast_to(np.float64(0.2), 5)
    dx = cross_entropy_pullback(g, x[:, ::-1][:, ::-1], targets, lse, IGNORE, 0.0)
    np.testing.assert_array_equal(dx, cross_entropy_pullback(g.copy(), x, targets, lse, IGNORE, 0.0))


def test_errors():
    x, targets = np.ones((2, 3), np.float32), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=r"\(N, C\)"):
        cross_entropy(x[0], targets, IGNORE, 0.0)
    with pytest.raises(ValueError, match="targets"):
        cross_entropy(x, np.zeros(3, np.int64), IGNORE, 0.0)
    with pytest.raises(TypeError, match="integers"):
        cross_entropy(x, np.zeros(2), IGNORE, 0.0)
    with pytest.raises(TypeError, match="float64"):
        cross_entropy_pullback(np.ones(2), x, targets, np.ones((2, 2), np.float32), IGNORE, 0.0)
    with pytest.raises(ValueError, match=r"logsumexp must have shape \(2, 2\)"):
        cross_entropy_pullback(np.ones(2, np.float32), x, targets, np.ones(2, np.float32), IGNORE, 0.0)
