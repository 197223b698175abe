"""Losses: values by hand and by formula, gradients, extremes, reductions, and shapes that must agree."""

import math

import numpy as np
import pytest

from tinygrad_qkv import Tensor, check_grad, nn
from tinygrad_qkv.nn import functional as F


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


P = np.array([[1.0, -2.0, 0.5], [3.0, 0.0, -1.0]])
Y = np.array([[0.0, -2.0, 1.0], [0.0, 1.0, 0.0]])
CLASSES = np.array([2, 0])


def softplus(x):
    return np.logaddexp(x, 0)


CASES = {
    "mse": (F.mse, P, Y, [[1, 0, 0.25], [9, 1, 1]], nn.MSELoss, {}),
    "l1": (F.l1, P, Y, [[1, 0, 0.5], [3, 1, 1]], nn.L1Loss, {}),
    "huber": (F.huber, P, Y, [[0.5, 0, 0.125], [2.5, 0.5, 0.5]], nn.HuberLoss, {}),
    "huber 2": (F.huber, P, Y, [[0.5, 0, 0.125], [4, 0.5, 0.5]], nn.HuberLoss, {"delta": 2.0}),
    "bce": (
        F.bce_with_logits,
        P,
        np.abs(Y) / 2,
        np.abs(Y) / 2 * softplus(-P) + (1 - np.abs(Y) / 2) * softplus(P),
        nn.BCEWithLogitsLoss,
        {},
    ),
    "bce weighted": (
        F.bce_with_logits,
        P,
        np.abs(Y) / 2,
        np.abs(Y) / 2 * softplus(-P) * [1, 2, 3] + (1 - np.abs(Y) / 2) * softplus(P),
        nn.BCEWithLogitsLoss,
        {"pos_weight": np.array([1.0, 2.0, 3.0])},
    ),
    "nll": (F.nll, P, CLASSES, [-0.5, -3.0], nn.NLLLoss, {}),
    "cross entropy": (
        F.cross_entropy,
        P,
        CLASSES,
        np.log(np.exp(P).sum(1)) - P[[0, 1], CLASSES],
        nn.CrossEntropyLoss,
        {},
    ),
    "kl": (F.kl_div, P, np.abs(Y), np.where(Y, np.abs(Y) * (np.log(np.abs(Y) + (Y == 0)) - P), 0), nn.KLDivLoss, {}),
    "kl log": (F.kl_div, P, Y, np.exp(Y) * (Y - P), nn.KLDivLoss, {"log_target": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_reductions_and_modules(name):
    function, prediction, target, expected, module, settings = CASES[name]
    expected = np.array(expected, float)
    np.testing.assert_allclose(function(prediction, target, reduction="none", **settings), expected, rtol=1e-12)
    for reduction, total in (("mean", expected.mean()), ("sum", expected.sum())):
        assert function(prediction, target, reduction=reduction, **settings).item() == pytest.approx(total, rel=1e-12)
        layer = module(reduction=reduction, **settings)
        assert layer(prediction, target).item() == pytest.approx(total, rel=1e-12)
        assert not list(layer.parameters())
    assert function(prediction, target, **settings).item() == pytest.approx(expected.mean(), rel=1e-12)
    check_grad(lambda x: function(x, Tensor(target), **settings), numbers(2, 3))
    with pytest.raises(ValueError, match="'mean', 'sum' or 'none'"):
        function(prediction, target, reduction="average", **settings)
    assert function(prediction.astype(np.float32), Tensor(target).astype(CLASSES.dtype), **settings).dtype == np.float32


@pytest.mark.parametrize("function", [F.mse, F.l1, F.huber, F.bce_with_logits, F.kl_div])
def test_shapes_that_would_broadcast_are_refused(function):
    for shape in ((2,), (2, 1), (1, 2), ()):
        with pytest.raises(ValueError, match="same shape"):
            function(np.ones((2, 2)), np.ones(shape))


def test_targets_may_have_gradients():
    for function in (F.mse, F.l1, F.huber):
        check_grad(function, numbers(3, 2), numbers(3, 2, seed=1))
    check_grad(F.bce_with_logits, numbers(3, 2), np.abs(np.tanh(numbers(3, 2, seed=1))))
    check_grad(F.kl_div, numbers(3, 2), np.abs(numbers(3, 2, seed=1)))


def test_huber_and_l1_at_the_corners():
    x = Tensor([0.0, 1.0, -1.0, 1e30, -1e30], requires_grad=True)
    F.huber(x, np.zeros(5, np.float32), reduction="sum").backward()
    np.testing.assert_array_equal(x.grad, [0, 1, -1, 1, -1])
    x.zero_grad()
    F.l1(x, np.zeros(5, np.float32), reduction="sum").backward()
    np.testing.assert_array_equal(x.grad, [0, 1, -1, 1, -1])
    with pytest.raises(ValueError, match="delta is positive"):
        F.huber(x, x, delta=0)


def test_bce_with_logits_is_exact_for_logits_of_any_size():
    x = Tensor(np.array([1000.0, -1000.0, 20.0, -20.0, 1000.0]), requires_grad=True)
    losses = F.bce_with_logits(x, [1.0, 0.0, 1.0, 0.0, 0.0], reduction="none")
    np.testing.assert_allclose(losses, [0, 0, math.log1p(math.exp(-20)), math.log1p(math.exp(-20)), 1000], rtol=1e-12)
    losses.sum().backward()
    np.testing.assert_allclose(x.grad.data[[0, 1, 4]], [0, 0, 1], atol=1e-12)
    with pytest.raises(ValueError, match="from 0 to 1, got -1"):
        F.bce_with_logits([1.0], [-1.0])
    for shape in ((2, 2), (3,)):
        with pytest.raises(ValueError, match=r"pos_weight: .*does not broadcast to \(2,\)"):
            F.bce_with_logits(np.ones(2), np.ones(2), pos_weight=np.ones(shape))


def test_nll_skips_ignored_targets_and_checks_the_others():
    log_probs = Tensor(np.array([[-1.0, -2.0], [-math.inf, -4.0], [-5.0, -6.0]]), requires_grad=True)
    loss = F.nll(log_probs, [1, -100, 0])
    assert loss.item() == 3.5
    loss.backward()
    np.testing.assert_array_equal(log_probs.grad, [[0, -0.5], [0, 0], [-0.5, 0]])
    assert F.nll(log_probs, [-1, -1, -1], ignore_index=-1).item() == 0
    assert F.nll(numbers(2, 3, 5), np.zeros((2, 3), int), reduction="none").shape == (2, 3)
    with pytest.raises(IndexError, match="target 2 is outside"):
        F.nll(log_probs, [0, 0, 2])
    with pytest.raises(ValueError, match=r"need targets of shape \(3,\), got \(2,\)"):
        F.nll(log_probs, [0, 1])
    with pytest.raises(TypeError, match="integers"):
        F.nll(log_probs, [0.0, 1.0, 0.0])


def test_cross_entropy_is_nll_of_log_softmax():
    logits, targets = numbers(7, 5), np.array([0, 4, -100, 2, 2, -100, 1])
    np.testing.assert_allclose(F.cross_entropy(logits, targets), F.nll(F.log_softmax(logits), targets), rtol=1e-12)


def test_a_probability_of_zero_contributes_nothing_to_kl_div():
    log_probs = Tensor(np.array([-math.inf, math.log(0.25), math.log(0.75)]), requires_grad=True)
    loss = F.kl_div(log_probs, [0.0, 0.5, 0.5], reduction="sum")
    assert loss.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    loss.backward()
    np.testing.assert_allclose(log_probs.grad, [0, -0.5, -0.5])
    same = F.kl_div(log_probs, log_probs.detach(), log_target=True, reduction="none")
    np.testing.assert_array_equal(same, [0, 0, 0])
    with pytest.raises(ValueError, match="negative"):
        F.kl_div([0.0], [-0.5])


def test_names_of_pytorch_are_explained():
    with pytest.raises(AttributeError, match=r"mse_loss.*write mse"):
        _ = F.mse_loss
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = F.nothing
