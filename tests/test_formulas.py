"""The language of the formulas: what it says, and what it refuses to say."""

import math

import numpy as np
import pytest

from tinygrad_qkv import Tensor
from tinygrad_qkv.formulas import evaluate, names_read, renamed, rule_values

A, B, G = (np.random.default_rng(k).normal(size=(3, 5)) for k in range(3))
VALUES = {"g": G, "a": A, "b": B, "axes": (1,), "axis": 1, "index": ([0, 2], [1, 1]), "n": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("da = g * b", G * B),
        ("da = -g * a / (b * b)", -G * A / B**2),
        ("da = 2 * g * a ** 3 - 1", 2 * G * A**3 - 1),
        ("da = g @ b.T", G @ B.T),
        ("da = where((a < b) & ~(a == 0) | (a != a), g, 0)", np.where(A < B, G, 0)),
        ("da = where(n < 4, 1, 0) + where(n <= 4, 10, 0) + where(n == 4, 100, 0)", 110),
        ("da = where(n > 4, 1, 0) + where(n >= 4, 10, 0) + where(n != 4, 100, 0)", 10),
        ("da = sum(g * b, axis)", (G * B).sum(1, keepdims=True)),
        ("da = g - mean(g, axes)", G - G.mean(1, keepdims=True)),
        ("s = exp(a); t = s + 1; da = g * s / t", G * np.exp(A) / (np.exp(A) + 1)),
        ("da = g[index]", G[[0, 2], [1, 1]]),
        ("da = split(g, n, axis)[1]", G[:, 4:]),
        ("da = g * sqrt(2 * pi) / n", G * math.sqrt(2 * math.pi) / 4),
        ("da = where(a < inf, g, 0)", G),
    ],
)
def test_value_of_a_formula(text, expected):
    values = dict(VALUES, n=(4,)) if "split" in text else VALUES
    np.testing.assert_allclose(evaluate(text, values), expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 5), G),
        ((5,), G.sum(0)),
        ((3, 1), G.sum(1, keepdims=True)),
        ((1, 1), G.sum().reshape(1, 1)),
        ((), G.sum()),
        ((2, 3, 5), np.stack([G, G])),
    ],
)
def test_broadcasting_is_undone_for_the_operand(shape, expected):
    np.testing.assert_allclose(evaluate("da = g", {"g": G}, shape), expected)


def test_a_value_of_a_foreign_shape_is_refused():
    with pytest.raises(ValueError, match=r"gives shape \(3, 5\), which does not fit an operand of \(3, 4\)"):
        evaluate("da = g", {"g": G}, (3, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("da = g * z", "'z' is no name of this rule; it has g, a"),
        ("da = open(g)", "'open' is no function of the language"),
        ("da = g.sum()", "has no meaning"),
        ("da = g.__class__", "has no meaning"),
        ("da = (lambda: g)()", "has no meaning"),
        ("da = [g for g in a]", "has no meaning"),
        ("da = sum(g, axis=1)", "has no meaning"),
        ("da = 'text'", "has no meaning"),
        ("da = g if n else a", "has no meaning"),
        ("da = a < b < g", "has no meaning"),
        ("da = f'{g}'", "has no meaning"),
        ("import os", "must read 'name = expression'"),
        ("da = db = g", "must read"),
        ("g * b", "must read"),
        ("da = g *", "cannot be read"),
        ("", "empty"),
    ],
)
def test_what_the_language_does_not_have_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        evaluate(text, VALUES)


def test_a_huge_power_ends_at_once():
    with pytest.raises(OverflowError):
        evaluate("da = 9 ** 9 ** 9", {})


def test_values_are_named_by_the_parameters_of_the_rule():
    assert rule_values(lambda g, a, slope: g, G, (A, 0.5)) == {"g": G, "a": A, "slope": 0.5}


def test_the_rule_of_a_reduction_sees_its_axes_kept():
    x = Tensor(np.ones((2, 3, 5)), requires_grad=True)
    for y, names in ((x.sum((0, 2)), {"g"}), (x.max((0, 2)), {"g", "y"}), (x.mean((0, 2), keepdims=True), {"g"})):
        node = y._node
        saved = [y.data if i == 0 and "y" in names else getattr(s, "data", s) for i, s in enumerate(node.saved)]
        values = rule_values(node.pullbacks[0], np.ones(y.shape), saved)
        assert all(values[name].shape == (1, 3, 1) for name in names)


def test_what_a_formula_reads_from_outside():
    assert names_read("S = a @ b.T + pi; S = S * scale; dx = where(x < inf, exp(S), g)") == {
        *("a", "b", "scale", "x", "g")
    }
    assert names_read("x = x * 2; dx = x") == {"x"}
    assert names_read("dx = sum(sum, axis)") == {"sum", "axis"}


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("db = a.T @ g", {"db": "dW_Q", "a": "X", "g": "dQ"}, "dW_Q = X.T @ dQ"),
        ("da = g * T.T", {"T": "Z"}, "da = g * Z.T"),
        ("dx = sum(sum, axis) * 1e-5", {"sum": "A", "axis": "3", "e": "E"}, "dx = sum(A, 3) * 1e-5"),
        ("da = g * b", {"a": "A", "d": "D", "b": "b"}, "da = g * b"),
        ("dx = y * g", {"x": "y", "y": "A", "g": "y"}, "dx = y * g"),  # y would mean two things
        ("dx = y * (g - sum(g * y, axis))", {"g": "axis"}, "dx = y * (g - sum(g * y, axis))"),
    ],
)
def test_a_formula_with_other_names(text, names, expected):
    assert renamed(text, names) == expected
