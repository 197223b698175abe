"""Derivatives as functions, and the check of a gradient against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_qkv.backward import grad
from tinygrad_qkv.tensor import Tensor


class GradientError(AssertionError):
    """A gradient that does not agree with finite differences."""


def check_grad(
    f: Callable,
    *inputs: Any,
    eps: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    directions: int = 2,
    seed: int = 0,
) -> None:
    """Compare the gradient of f(*inputs) with central differences along random directions, in float64.

    Float inputs are copied as float64 leaves, other inputs are passed on as they are. Along a direction v the
    derivative (f(x + eps v) - f(x - eps v)) / (2 eps), weighted by random numbers over f's outputs (a Tensor, or a
    list of them), must equal the sum of grad * v. Raises GradientError with the argument, the worst index, the
    expected value and the one that the gradient has.
    """
    random = np.random.default_rng(seed)
    leaves = [_leaf(x) for x in inputs]
    arguments = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if not arguments:
        raise ValueError("check_grad needs at least one float input")
    outputs = _outputs(f(*leaves))
    weights = [random.normal(size=y.shape) for y in outputs]
    tracked = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    if not tracked:
        raise GradientError("no output of f requires grad: an op on the way drops the gradient")
    found = grad(
        [y for y, _ in tracked],
        [leaves[i] for i in arguments],
        [Tensor(w, y.dtype) for y, w in tracked],
        allow_unused=True,
    )
    for i, g in zip(arguments, found, strict=True):
        got = np.zeros(leaves[i].shape) if g is None else np.asarray(g)
        for _ in range(directions):
            v = random.normal(size=leaves[i].shape)
            expected = _slope(f, leaves, i, v, weights, eps)
            if not np.allclose(np.sum(got * v), expected, rtol, atol):
                raise GradientError(_worst_entry(f, leaves, i, got, weights, eps))


def _leaf(x: Any) -> Any:
    """A float input as a float64 leaf."""
    values = x if isinstance(x, (Tensor, np.ndarray, float)) else None
    if values is None or np.asarray(values).dtype.kind != "f":
        return x
    return Tensor(np.asarray(values, dtype=np.float64), requires_grad=True)


def _outputs(y: Any) -> list[Tensor]:
    outputs = list(y) if isinstance(y, (list, tuple)) else [y]
    for output in outputs:
        if not isinstance(output, Tensor):
            raise TypeError(f"check_grad's f returns a Tensor or a list of them, got {type(output).__name__}")
    return outputs


def _slope(f: Callable, leaves: list, i: int, v: np.ndarray, weights: list[np.ndarray], eps: float) -> float:
    """The weighted derivative of f along v in argument i, by central differences."""
    sides = []
    for sign in (1, -1):
        moved = list(leaves)
        moved[i] = Tensor(leaves[i].data + sign * eps * v, requires_grad=True)  # f may take derivatives itself
        sides.append([np.asarray(y, dtype=np.float64) for y in _outputs(f(*moved))])
    return sum(float(np.sum(w * (up - down))) for w, up, down in zip(weights, *sides, strict=True)) / (2 * eps)


def _worst_entry(f: Callable, leaves: list, i: int, got: np.ndarray, weights: list[np.ndarray], eps: float) -> str:
    """The message: the entry of argument i whose gradient is furthest off (of the first 1000)."""
    worst: tuple[float, tuple, float, float] = (-1.0, (), 0.0, 0.0)
    for index in list(np.ndindex(got.shape))[:1000]:
        v = np.zeros(got.shape)
        v[index] = 1
        expected = _slope(f, leaves, i, v, weights, eps)
        error = abs(float(got[index]) - expected)
        if not error <= worst[0]:
            worst = (error, index, expected, float(got[index]))
    _, index, expected, value = worst
    return f"argument {i} of shape {got.shape}, index {index}: expected {expected:.8g} by differences, got {value:.8g}"
