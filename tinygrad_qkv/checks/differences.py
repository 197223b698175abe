"""A gradient beside central differences: along random directions, and where it fails entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.backward import grad
from tinygrad_qkv.checks.trials import Trial
from tinygrad_qkv.nested import listed
from tinygrad_qkv.tensor import Tensor


class Tolerance(NamedTuple):
    """The step of the differences, and how far a derivative may be from them: rtol * |expected| + atol."""

    eps: float = 1e-6
    rtol: float = 1e-5
    atol: float = 1e-7

    def allows(self, got: Any, expected: Any) -> bool:
        """Whether all numbers agree."""
        return np.allclose(got, expected, self.rtol, self.atol)


def float_leaf(x: Any) -> Any:
    """A float input as a float64 leaf, any other as it is."""
    values = x if isinstance(x, (Tensor, np.ndarray, float)) else None
    if values is None or np.asarray(values).dtype.kind != "f":
        return x
    return Tensor(np.asarray(values, dtype=np.float64), requires_grad=True)


def values_at(f: Callable, points: Sequence) -> list[np.ndarray]:
    """f at a point, as float64 arrays; it gets leaves, because it may take derivatives itself."""
    return [np.asarray(y, dtype=np.float64) for y in listed(f(*map(float_leaf, points)))]


def gradients(
    outputs: list[Tensor], xs: list[Tensor], weights: list[np.ndarray], create_graph: bool = False
) -> list[np.ndarray]:
    """The gradients of sum(outputs * weights); zeros where nothing depends on an x. The graph is retained."""
    tracked = [(y, Tensor(w, y.dtype)) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    if not tracked:
        return [np.zeros(x.shape) for x in xs]
    ys, seeds = map(list, zip(*tracked, strict=True))
    found = grad(ys, xs, seeds, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return [np.zeros(x.shape) if g is None else np.asarray(g) for x, g in zip(xs, found, strict=True)]


def disagreement(
    f: Callable,
    trial: Trial,
    weights: list[np.ndarray],
    tolerance: Tolerance,
    names: Sequence[str],
    *,
    directions: int = 1,
    seed: int = 0,
) -> str:
    """Where the gradient of sum(weights * f) at `trial` is not what differences say, in words; "" if it nowhere is not.

    `names` are those of f's arguments. Along a random direction v in one argument at a time, sum(gradient * v) must
    equal (f(x + eps v) - f(x - eps v)) / (2 eps).
    """
    random = np.random.default_rng((seed, 1))  # other numbers than those of the weights
    found = gradients(trial.outputs, [trial.leaves[i] for i in trial.arguments], weights)
    for i, got in zip(trial.arguments, found, strict=True):
        for _ in range(directions):
            v = random.normal(size=got.shape)
            if not tolerance.allows(np.sum(got * v), _slope(f, trial.leaves, i, v, weights, tolerance.eps)):
                return f"{names[i]} {_worst_entry(f, trial.leaves, i, got, weights, tolerance.eps)}"
    return ""


def _slope(f: Callable, leaves: list, i: int, v: np.ndarray, weights: list[np.ndarray], eps: float) -> float:
    """The weighted derivative of f along v in argument i, by central differences."""
    sides = [values_at(f, [*leaves[:i], leaves[i].data + sign * eps * v, *leaves[i + 1 :]]) for sign in (1, -1)]
    return sum(float(np.sum(w * (up - down))) for w, up, down in zip(weights, *sides, strict=True)) / (2 * eps)


def _worst_entry(f: Callable, leaves: list, i: int, got: np.ndarray, weights: list[np.ndarray], eps: float) -> str:
    """The entry of argument i whose gradient is furthest off."""
    return worst_entry(got, lambda v: _slope(f, leaves, i, v, weights, eps))


def worst_entry(got: np.ndarray, slope: Callable[[np.ndarray], float]) -> str:
    """The entry of a gradient (of the first 1000) that is furthest from slope(v) along its own axis v, with both."""
    looked_at, expected = np.zeros(got.shape), np.zeros(got.shape)
    for index in list(np.ndindex(got.shape))[:1000]:
        v = np.zeros(got.shape)
        v[index] = 1
        looked_at[index], expected[index] = got[index], slope(v)
    index = furthest(looked_at, expected)
    return f"of shape {got.shape}, {comparison(got, expected, index)}"


def comparison(got: np.ndarray, expected: np.ndarray, index: tuple[int, ...]) -> str:
    """One number of two arrays, in words."""
    return f"index {index}: expected {expected[index]:.8g} by differences, got {got[index]:.8g}"


def furthest(got: np.ndarray, expected: np.ndarray) -> tuple[int, ...]:
    """Where two arrays differ most; NaN counts as most of all."""
    error = np.abs(got - expected)
    place = np.argmax(np.where(np.isnan(error), np.inf, error))
    return tuple(int(i) for i in np.unravel_index(place, got.shape))
