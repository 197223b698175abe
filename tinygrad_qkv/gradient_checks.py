"""Derivatives beside finite differences: first order, second order, and along a direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.backward import grad
from tinygrad_qkv.derivatives import jvp, vjp
from tinygrad_qkv.tensor import Tensor
from tinygrad_qkv.trials import Trial


class GradientError(AssertionError):
    """A derivative that does not agree with finite differences."""


BETWEEN_OPS = (
    "every op's own rule agrees with differences, so the gradient gets lost or changed between ops (detach(), "
    "no_grad(), .data, .numpy() or a hook in f), or f jumps or bends right here"
)


class Tolerance(NamedTuple):
    """The step of the differences, and how far a derivative may be from them: rtol * |expected| + atol."""

    eps: float = 1e-6
    rtol: float = 1e-5
    atol: float = 1e-7

    def allows(self, got: Any, expected: Any) -> bool:
        """Whether all numbers agree."""
        return np.allclose(got, expected, self.rtol, self.atol)


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
    expected value and the one that the gradient has, and with the op whose own rule is to blame, if one is.
    """
    from tinygrad_qkv.wrong_rules import wrong_rule  # here: it checks single rules by this very function

    tolerance = Tolerance(eps, rtol, atol)
    random = np.random.default_rng(seed)
    leaves, arguments = _leaves(inputs, "check_grad")
    trial = Trial(f, leaves)
    outputs = trial.outputs
    _refuse_chance(f, leaves, outputs)
    weights = [random.normal(size=y.shape) for y in outputs]
    if not any(y.requires_grad for y in outputs):
        raise GradientError("no output of f requires grad: an op on the way drops the gradient")
    trial.refuse_miscounted_rules()
    found = _gradients(outputs, [leaves[i] for i in arguments], weights)
    for i, got in zip(arguments, found, strict=True):
        for _ in range(directions):
            v = random.normal(size=got.shape)
            if not tolerance.allows(np.sum(got * v), _slope(f, leaves, i, v, weights, eps)):
                where = _worst_entry(f, leaves, i, got, weights, eps)
                raise GradientError(f"{where}; {wrong_rule(f, leaves, weights, tolerance) or BETWEEN_OPS}")
    if trial.written():
        raise GradientError(wrong_rule(f, leaves, weights, tolerance))


def check_grad_grad(
    f: Callable,
    *inputs: Any,
    eps: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    directions: int = 1,
    seed: int = 0,
) -> None:
    """Compare second derivatives of f(*inputs) with differences of its gradient, in float64.

    The gradient is a function of the inputs and of the gradients of f's outputs (random numbers); its derivatives
    with respect to all of these are checked as in `check_grad`, which has to be called beside this: the first order
    is not looked at here. Raises GradientError, with the op whose rule cannot be differentiated again, if one is.
    """
    from tinygrad_qkv.wrong_rules import unrecorded_rule, wrong_rule

    leaves, arguments = _leaves(inputs, "check_grad_grad")
    shapes = [y.shape for y in _outputs(f(*leaves))]
    random = np.random.default_rng(seed)
    weights = [random.normal(size=shape) for shape in shapes]

    def gradient(*given: Any) -> list[Tensor]:
        seeds, points = list(given[: len(shapes)]), given[len(shapes) :]
        _, pullback = vjp(_of_floats(f, leaves, arguments), *points)
        found = pullback(seeds if len(seeds) > 1 else seeds[0])
        return [*(found if isinstance(found, tuple) else (found,)), *seeds]

    points = [leaves[i].data for i in arguments]
    try:
        check_grad(gradient, *weights, *points, eps=eps, rtol=rtol, atol=atol, directions=directions, seed=seed + 1)
    except GradientError as error:
        where = str(error).partition(";")[0]
        tolerance = Tolerance(eps, rtol, atol)
        blame = unrecorded_rule(f, leaves, tolerance) or wrong_rule(f, leaves, weights, tolerance) or BETWEEN_OPS
        raise GradientError(
            f"the second order, the gradient as a function of {len(shapes)} gradients of outputs and then the inputs: "
            f"{where}; {blame}"
        ) from None


def check_jvp(
    f: Callable, *inputs: Any, eps: float = 1e-6, rtol: float = 1e-5, atol: float = 1e-7, seed: int = 0
) -> None:
    """Compare jvp(f, inputs, v) with central differences along one random direction v, in float64.

    Raises GradientError with the output, the worst index, the expected value and the one that jvp has.
    """
    from tinygrad_qkv.wrong_rules import unrecorded_rule, wrong_rule

    tolerance = Tolerance(eps, rtol, atol)
    leaves, arguments = _leaves(inputs, "check_jvp")
    outputs = _outputs(f(*leaves))
    _refuse_chance(f, leaves, outputs)
    random = np.random.default_rng(seed)
    points = [leaves[i].data for i in arguments]
    directions = [random.normal(size=x.shape) for x in points]
    function = _of_floats(f, leaves, arguments)
    _, tangents = jvp(function, points, directions)
    up, down = (
        _values(function, [x + sign * eps * v for x, v in zip(points, directions, strict=True)]) for sign in (1, -1)
    )
    for k, (tangent, high, low) in enumerate(zip(_outputs(tangents), up, down, strict=True)):
        got, expected = np.asarray(tangent, np.float64), (high - low) / (2 * eps)
        if not tolerance.allows(got, expected):
            index = _furthest(got, expected)
            weights = [random.normal(size=y.shape) for y in outputs]
            blame = wrong_rule(f, leaves, weights, tolerance) or unrecorded_rule(f, leaves, tolerance) or BETWEEN_OPS
            raise GradientError(
                f"jvp, output {k} of shape {got.shape}, index {index}: expected {expected[index]:.8g} by differences, "
                f"got {got[index]:.8g}; {blame}"
            )


# ---- the parts of a check


def _leaves(inputs: Sequence, caller: str) -> tuple[list, list[int]]:
    """The inputs with floats as float64 leaves, and the places of those."""
    leaves = [_leaf(x) for x in inputs]
    arguments = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if not arguments:
        raise ValueError(f"{caller} needs at least one float input")
    return leaves, arguments


def _leaf(x: Any) -> Any:
    """A float input as a float64 leaf."""
    values = x if isinstance(x, (Tensor, np.ndarray, float)) else None
    if values is None or np.asarray(values).dtype.kind != "f":
        return x
    return Tensor(np.asarray(values, dtype=np.float64), requires_grad=True)


def _of_floats(f: Callable, leaves: list, arguments: list[int]) -> Callable:
    """f as a function of its float inputs alone."""

    def function(*points: Any) -> Any:
        given = list(leaves)
        for i, x in zip(arguments, points, strict=True):
            given[i] = x
        return f(*given)

    return function


def _outputs(y: Any) -> list[Tensor]:
    outputs = list(y) if isinstance(y, (list, tuple)) else [y]
    for output in outputs:
        if not isinstance(output, Tensor):
            raise TypeError(f"check_grad's f returns a Tensor or a list of them, got {type(output).__name__}")
    return outputs


def _refuse_chance(f: Callable, leaves: list, outputs: list[Tensor]) -> None:
    """Differences mean nothing where f draws new random numbers in every call."""
    for k, (y, again) in enumerate(zip(outputs, _outputs(f(*leaves)), strict=True)):
        if not np.array_equal(y.data, again.data, equal_nan=y.dtype.kind == "f"):
            raise ValueError(f"two calls of f gave two values of output {k}: fix its seed, or switch dropout off")


def _gradients(outputs: list[Tensor], xs: list[Tensor], weights: list[np.ndarray]) -> list[np.ndarray]:
    """The gradients of sum(outputs * weights); zeros where nothing depends on an x."""
    tracked = [(y, Tensor(w, y.dtype)) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    ys, seeds = map(list, zip(*tracked, strict=True))
    found = grad(ys, xs, seeds, retain_graph=True, allow_unused=True)
    return [np.zeros(x.shape) if g is None else np.asarray(g) for x, g in zip(xs, found, strict=True)]


def _values(f: Callable, points: list) -> list[np.ndarray]:
    """f at a point, as float64 arrays; with leaves, because f may take derivatives itself."""
    return [np.asarray(y, dtype=np.float64) for y in _outputs(f(*map(_leaf, points)))]


def _slope(f: Callable, leaves: list, i: int, v: np.ndarray, weights: list[np.ndarray], eps: float) -> float:
    """The weighted derivative of f along v in argument i, by central differences."""
    sides = [_values(f, [*leaves[:i], leaves[i].data + sign * eps * v, *leaves[i + 1 :]]) for sign in (1, -1)]
    return sum(float(np.sum(w * (up - down))) for w, up, down in zip(weights, *sides, strict=True)) / (2 * eps)


def _worst_entry(f: Callable, leaves: list, i: int, got: np.ndarray, weights: list[np.ndarray], eps: float) -> str:
    """The message: the entry of argument i whose gradient is furthest off (of the first 1000)."""
    entries = list(np.ndindex(got.shape))[:1000]
    expected = np.zeros(got.shape)
    for index in entries:
        v = np.zeros(got.shape)
        v[index] = 1
        expected[index] = _slope(f, leaves, i, v, weights, eps)
    looked_at = got.copy()
    looked_at.flat[len(entries) :] = 0
    index = _furthest(looked_at, expected)
    return (
        f"argument {i} of shape {got.shape}, index {index}: expected {expected[index]:.8g} by differences, "
        f"got {got[index]:.8g}"
    )


def _furthest(got: np.ndarray, expected: np.ndarray) -> tuple[int, ...]:
    """Where two arrays differ most; NaN counts as most of all."""
    error = np.abs(got - expected)
    place = np.argmax(np.where(np.isnan(error), np.inf, error))
    return tuple(int(i) for i in np.unravel_index(place, got.shape))
