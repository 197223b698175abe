"""Derivatives beside finite differences: first order, second order, and along a direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tinygrad_qkv.checks.differences import Tolerance, comparison, disagreement, float_leaf, furthest, values_at
from tinygrad_qkv.checks.trials import Trial
from tinygrad_qkv.checks.wrong_rules import two_faced_rule, unrecorded_rule, writing_rule, wrong_rule
from tinygrad_qkv.derivatives import jvp, vjp
from tinygrad_qkv.nested import listed
from tinygrad_qkv.tensor import Tensor

BETWEEN_OPS = (
    "every op's own rule agrees with differences, so the gradient gets lost or changed between ops (detach(), "
    "no_grad(), .data, .numpy() or a hook in f), or f jumps or bends right here"
)


class GradientError(AssertionError):
    """A derivative that does not agree with finite differences, or a ledger's entry with its own formula."""


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
    tolerance, trial = Tolerance(eps, rtol, atol), _trial(f, inputs, "check_grad")
    if not any(y.requires_grad for y in trial.outputs):
        raise GradientError("no output of f requires grad: an op on the way drops the gradient")
    trial.refuse_miscounted_rules()
    weights = _weights(trial.outputs, seed)
    names = _numbered("argument", len(inputs))
    where = disagreement(f, trial, weights, tolerance, names, directions=directions, seed=seed)
    if where:
        raise GradientError(f"{where}; {wrong_rule(f, trial.leaves, weights, tolerance) or BETWEEN_OPS}")
    if fault := writing_rule(f, trial.leaves, weights):
        raise GradientError(fault)


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
    is not looked at here, only that it is the same for arrays and under create_graph. Raises GradientError, with the
    op whose rule cannot be differentiated again, if one is.
    """
    tolerance, first = Tolerance(eps, rtol, atol), _trial(f, inputs, "check_grad_grad")
    first.refuse_miscounted_rules()
    weights = _weights(first.outputs, seed)
    if fault := two_faced_rule(first, weights, tolerance):
        raise GradientError(fault)
    n = len(weights)

    def gradient(*given: Tensor) -> list[Tensor]:
        _, pullback = vjp(_of_floats(f, first), *given[n:])
        return listed(pullback(given[:n] if n > 1 else given[0]))

    points = [first.leaves[i].data for i in first.arguments]
    second = Trial(gradient, [float_leaf(np.asarray(x)) for x in (*weights, *points)])
    names = _numbered("the gradient of output", n) + [f"argument {i}" for i in first.arguments]
    outer = _weights(second.outputs, seed + 1)
    where = disagreement(gradient, second, outer, tolerance, names, directions=directions, seed=seed)
    if where:
        blame = unrecorded_rule(f, first.leaves, tolerance) or wrong_rule(f, first.leaves, weights, tolerance)
        raise GradientError(f"second order, {where}; {blame or BETWEEN_OPS}")


def check_jvp(
    f: Callable, *inputs: Any, eps: float = 1e-6, rtol: float = 1e-5, atol: float = 1e-7, seed: int = 0
) -> None:
    """Compare jvp(f, inputs, v) with central differences along one random direction v, in float64.

    Raises GradientError with the output, the worst index, the expected value and the one that jvp has, and with the
    op whose own rule is to blame, if one is.
    """
    tolerance, trial = Tolerance(eps, rtol, atol), _trial(f, inputs, "check_jvp")
    points = [trial.leaves[i].data for i in trial.arguments]
    random = np.random.default_rng(seed)
    v = [random.normal(size=x.shape) for x in points]
    function = _of_floats(f, trial)
    up, down = (values_at(function, [x + s * eps * d for x, d in zip(points, v, strict=True)]) for s in (1, -1))
    for k, (y, high, low) in enumerate(zip(listed(jvp(function, points, v)[1]), up, down, strict=True)):
        got, expected = np.asarray(y, np.float64), (high - low) / (2 * eps)
        if not tolerance.allows(got, expected):
            where = f"jvp, output {k} of shape {got.shape}, {comparison(got, expected, furthest(got, expected))}"
            weights = _weights(trial.outputs, seed)
            blame = wrong_rule(f, trial.leaves, weights, tolerance) or unrecorded_rule(f, trial.leaves, tolerance)
            raise GradientError(f"{where}; {blame or BETWEEN_OPS}")


def _trial(f: Callable, inputs: Sequence, caller: str) -> Trial:
    """A run of f on float64 leaves. ValueError without any, and where f draws new random numbers in every call."""
    leaves = [float_leaf(x) for x in inputs]
    if not any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
        raise ValueError(f"{caller} needs at least one float input")
    trial = Trial(f, leaves)
    for k, (y, again) in enumerate(zip(trial.outputs, listed(f(*trial.leaves)), strict=True)):
        if not np.array_equal(y.data, again.data, equal_nan=y.dtype.kind == "f"):
            raise ValueError(f"two calls of f gave two values of output {k}: fix its seed, or switch dropout off")
    return trial


def _of_floats(f: Callable, trial: Trial) -> Callable:
    """f as a function of its float inputs alone."""

    def function(*points: Any) -> Any:
        given = list(trial.leaves)
        for i, x in zip(trial.arguments, points, strict=True):
            given[i] = x
        return f(*given)

    return function


def _weights(outputs: list[Tensor], seed: int) -> list[np.ndarray]:
    """Random numbers of the outputs' shapes."""
    random = np.random.default_rng(seed)
    return [np.asarray(random.normal(size=y.shape)) for y in outputs]


def _numbered(what: str, n: int) -> list[str]:
    return [f"{what} {i}" for i in range(n)]
