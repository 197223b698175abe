"""Activations and their kin: saturated values and slopes without a warning, and dropout."""

import warnings

import numpy as np
import pytest
from op_gradients import second_gradient, value_and_gradients

from tinygrad_qkv import Tensor, ops

INF, NAN = np.inf, np.nan


# ---- dropout


def test_dropout_scales_what_it_keeps_and_the_gradient_has_the_same_mask():
    y, dx = value_and_gradients(lambda x: ops.dropout(x, 0.2), np.ones(5000))
    assert set(np.unique(y)) == {0.0, 1.25} and 0.77 < (y > 0).mean() < 0.83
    np.testing.assert_array_equal(y, dx)


def test_dropout_of_nothing_and_of_everything():
    x = Tensor([1.0, INF, NAN], requires_grad=True)
    assert ops.dropout(x, 0) is x
    y = ops.dropout(x, 1)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("p", [-0.1, 1.5, NAN, INF, "half"])
def test_dropout_takes_a_probability(p):
    with pytest.raises(ValueError, match="probability from 0 to 1"):
        ops.dropout(Tensor([1.0]), p)


def test_dropout_draws_anew_at_each_call_and_repeats_from_a_generator():
    x = np.ones(100)
    draws = [np.asarray(ops.dropout(x, 0.5)) for _ in range(2)]
    same = [np.asarray(ops.dropout(x, 0.5, np.random.default_rng(3))) for _ in range(2)]
    assert (draws[0] != draws[1]).any()
    np.testing.assert_array_equal(*same)
    with pytest.raises(TypeError, match="default_rng"):
        ops.dropout(x, 0.5, 3)


# ---- stability

LIMITS = {
    "sigmoid": ([0, 0.5, 1], [0, 0.25, 0]),
    "tanh": ([-1, 0, 1], [0, 1, 0]),
    "relu": ([0, 0, 1], [0, 0, 1]),
    "elu": ([-1, 0, 1], [0, 1, 1]),
    "softplus": ([0, np.log(2), 1], [0, 0.5, 1]),
    "silu": ([0, 0, 1], [0, 0.5, 1]),
    "gelu": ([0, 0, 1], [0, 0.5, 1]),
    "erf": ([-1, 0, 1], [0, 2 / np.sqrt(np.pi), 0]),
}


@pytest.mark.parametrize("name", [*LIMITS, "gelu tanh"])
@pytest.mark.parametrize(
    ("size", "dtype"), [(1e3, "float32"), (1e20, "float32"), (3e38, "float32"), (1e300, "float64")]
)
def test_saturated_functions_are_exact_and_silent(name, size, dtype):
    """Values and slopes are the limits; what grows without limit is compared in units of x."""
    values, slopes = LIMITS[name.split()[0]]
    f = (lambda x: ops.gelu(x, "tanh")) if name == "gelu tanh" else getattr(ops, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, dx = value_and_gradients(f, [-size, 0.0, size], dtype=dtype)
        y[2] / np.asarray(size, dtype)
    grows = name.split()[0] in ("relu", "elu", "softplus", "silu", "gelu")
    np.testing.assert_allclose([y[0], y[1], y[2] / (size if grows else 1)], values, rtol=1e-6)
    np.testing.assert_allclose(dx, slopes, rtol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu", "elu", "softplus", "silu", "gelu", "erf"])
def test_infinities_and_nan_raise_no_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = value_and_gradients(getattr(ops, name), [-INF, INF, NAN])
    assert y[1] in (1, INF) and np.isnan(y[2])


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "elu", "gelu", "silu"])
def test_second_derivatives_of_saturated_functions_are_finite(name):
    assert np.isfinite(second_gradient(getattr(ops, name), [-1000.0, 0.0, 1000.0])).all()


def test_logaddexp_of_extremes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, da, db = value_and_gradients(ops.logaddexp, [1000.0, -INF, -INF, INF], [1000.0, 0.0, -INF, 0.0])
    np.testing.assert_allclose(y, [1000 + np.log(2), 0, -INF, INF])
    np.testing.assert_allclose(da[:3], [0.5, 0, 0])
    np.testing.assert_allclose(db[:3], [0.5, 1, 0])


def test_expm1_and_log1p_are_exact_near_zero():
    x = Tensor([1e-20], dtype="float64")
    assert x.expm1().item() == x.log1p().item() == 1e-20


@pytest.mark.parametrize("approximate", ["erf", "Tanh", None])
def test_gelu_knows_two_forms(approximate):
    with pytest.raises(ValueError, match=r"'none' \(erf\) or 'tanh'"):
        ops.gelu(Tensor([1.0]), approximate)
