"""Starting values: their spread and limits, which axis counts, seeds, and what is refused."""

import math

import numpy as np
import pytest

from tinygrad_qkv import manual_seed, nn
from tinygrad_qkv.nn import init

SHAPE = (211, 101)
DRAWN = {
    "uniform": (lambda **k: init.uniform(SHAPE, -3, 1, **k), -1, 4 / math.sqrt(12), (-3, 1)),
    "normal": (lambda **k: init.normal(SHAPE, 0.5, 0.2, **k), 0.5, 0.2, None),
    "trunc_normal": (lambda **k: init.trunc_normal(SHAPE, 1, 0.1, **k), 1, 0.1 * 0.8796, (0.8, 1.2)),
    "xavier_uniform": (lambda **k: init.xavier_uniform(SHAPE, **k), 0, math.sqrt(2 / 312), math.sqrt(6 / 312)),
    "xavier_normal": (lambda **k: init.xavier_normal(SHAPE, gain=3, **k), 0, 3 * math.sqrt(2 / 312), None),
    "kaiming_uniform": (lambda **k: init.kaiming_uniform(SHAPE, **k), 0, math.sqrt(2 / 101), math.sqrt(6 / 101)),
    "kaiming_normal": (
        lambda **k: init.kaiming_normal(SHAPE, in_axis=0, slope=2, **k),
        0,
        math.sqrt(2 / 5 / 211),
        None,
    ),
    "orthogonal": (lambda **k: init.orthogonal(SHAPE, **k), 0, 1 / math.sqrt(211), None),
}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_values(name):
    make, mean, std, limits = DRAWN[name]
    x = make(generator=np.random.default_rng(5)).data
    assert x.shape == SHAPE and x.dtype == np.float32 and make(dtype="float64").dtype == np.float64
    assert x.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(x.size)) and x.std() == pytest.approx(std, rel=0.03)
    if limits:
        low, high = limits if isinstance(limits, tuple) else (-limits, limits)
        assert low <= x.min() < low + 0.01 * (high - low) and high >= x.max() > high - 0.01 * (high - low)
    np.testing.assert_array_equal(x, make(generator=np.random.default_rng(5)))
    manual_seed(7)
    first, second = make().data, make().data
    manual_seed(7)
    assert (make().data == first).all() and (first != second).any()


def test_fixed_values():
    np.testing.assert_array_equal(init.zeros(3), [0, 0, 0])
    np.testing.assert_array_equal(init.ones((1, 2)), [[1, 1]])
    np.testing.assert_array_equal(init.constant((2,), 1.5), [1.5, 1.5])
    np.testing.assert_array_equal(init.identity((2, 3), gain=2.0), [[2, 0, 0], [0, 2, 0]])
    assert init.identity(3).shape == (3, 3) and init.identity(3).dtype == np.float32


def test_orthogonal_rows_or_columns():
    for shape in ((5, 3), (3, 5), (4, 4)):
        W = init.orthogonal(shape, gain=2.0, dtype="float64").data
        gram = W.T @ W if shape[0] > shape[1] else W @ W.T
        np.testing.assert_allclose(gram, 4 * np.eye(min(shape)), atol=1e-12)


def test_orthogonal_draws_reflections_and_rotations():
    signs = {round(np.linalg.det(init.orthogonal((3, 3), generator=np.random.default_rng(n)).data)) for n in range(9)}
    assert signs == {-1, 1}


def test_a_parameter_starts_anew():
    layer = nn.Linear(3, 5)
    weight = layer.weight
    layer.weight.data = init.orthogonal(layer.weight.shape)
    assert layer.weight is weight and weight.is_leaf and weight.requires_grad


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: init.xavier_uniform(3), "fills matrices"),
        (lambda: init.orthogonal((2, 3, 4)), "fills matrices"),
        (lambda: init.kaiming_normal((2, 3), in_axis=2), "in_axis"),
        (lambda: init.uniform(3, 1, 0), "low=1"),
        (lambda: init.normal(3, std=-1), "std=-1"),
        (lambda: init.trunc_normal(3, low=5, high=6), "1%"),
    ],
)
def test_what_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
