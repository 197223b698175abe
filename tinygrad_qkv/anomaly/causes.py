"""Why an op, or its rule, gives NaN or inf: the common causes, each with the operand and the elements that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Arrays = Sequence[np.ndarray]


class Cause(NamedTuple):
    """One reason: the operand that shows it, the elements of it, and the words; `sure` if it cannot be otherwise."""

    operand: int
    where: np.ndarray
    words: str
    sure: bool = True


LOG_OF_0 = "the logarithm of 0 is -inf: keep it away from 0, log(x + 1e-12), or use log_softmax or cross_entropy"
LOG_OF_NEGATIVE = "a negative number has no logarithm"
ROOT_OF_NEGATIVE = "the square root of a negative number is not a number"
OVER_0 = "a number divided by 0 is inf: add a small number to the divisor, or choose it: where(b == 0, 1, b)"
ZERO_OVER_0 = "0 / 0 is not a number: add a small number to the divisor, or choose it: where(b == 0, 1, b)"
INF_OVER_INF = "inf / inf is not a number"
EXP = "exp overflows: e^89 is too large for float32, e^710 for float64; subtract the maximum first, as softmax does"
INF_MINUS_INF = "inf - inf is not a number: two numbers that were inf already have met here"
ZERO_TIMES_INF = "0 * inf is not a number: select with where() instead of multiplying by a mask"
ROW_OF_INF = (
    "every number of a row is -inf, so its softmax is 0 / 0: attention's own masks (attend=, ignore=, lengths=) give "
    "such a row the weights 0"
)
CLOSED_TARGET = (
    "the target of a row has the logit -inf, so its loss is inf: the mask of the classes closes the one that is right, "
    "or the target is not the one that was meant"
)
INF_SCORE = "a row holds inf, so its softmax is inf / inf: scores have overflowed before"
OVERFLOW = "the result is too large for {dtype}, which ends at {most:.2g}"
OF_NOTHING = "the {op} of no elements (or of too few, with ddof) does not exist"


INFINITE = (LOG_OF_0, OVER_0, EXP)  # these give inf, not NaN


def _at(where: Any, like: np.ndarray) -> np.ndarray:
    """The elements, in the operand's own shape where broadcasting had stretched it."""
    where = np.asarray(where)
    if where.shape == like.shape:
        return where
    extra = where.ndim - like.ndim
    where = where.any(tuple(range(extra)))
    for axis, n in enumerate(like.shape):
        if n == 1 != where.shape[axis]:
            where = where.any(axis, keepdims=True)
    return where


def _log(x: Arrays, shift: float = 0.0) -> list[Cause]:
    return [Cause(0, x[0] < shift, LOG_OF_NEGATIVE), Cause(0, x[0] == shift, LOG_OF_0)]


def _sqrt(x: Arrays) -> list[Cause]:
    return [Cause(0, x[0] < 0, ROOT_OF_NEGATIVE)]


def _div(x: Arrays) -> list[Cause]:
    a, b = x
    both = np.isinf(a) & np.isinf(b)
    zeros = Cause(1, _at((a == 0) & (b == 0), b), ZERO_OVER_0)
    return [zeros, Cause(1, _at(both, b), INF_OVER_INF), Cause(1, _at((b == 0) & (a != 0), b), OVER_0)]


def _reciprocal(x: Arrays) -> list[Cause]:
    return [Cause(0, x[0] == 0, OVER_0)]


def _rsqrt(x: Arrays) -> list[Cause]:
    return _sqrt(x) + _reciprocal(x)


def _exp(x: Arrays) -> list[Cause]:
    most = np.log(np.finfo(x[0].dtype if x[0].dtype.kind == "f" else np.float32).max)
    return [Cause(0, np.isfinite(x[0]) & (np.abs(x[0]) > most), EXP)]


def _power(x: Arrays) -> list[Cause]:
    a, b = x
    fractional = (a < 0) & np.isfinite(b) & (b != np.floor(b))
    zero = Cause(0, _at((a == 0) & (b < 0), a), "a negative power of 0 is inf: it divides by 0")
    return [Cause(0, _at(fractional, a), "a negative number has no power that is not whole"), zero]


def _sum_of_two(x: Arrays, sign: int = 1) -> list[Cause]:
    a, b = x
    return [Cause(1, _at(np.isinf(a) & np.isinf(b) & (a == -sign * b), b), INF_MINUS_INF)]


def _product(x: Arrays) -> list[Cause]:
    a, b = x
    second, first = np.isinf(b) & (a == 0), np.isinf(a) & (b == 0)
    return [Cause(1, _at(second, b), ZERO_TIMES_INF), Cause(0, _at(first, a), ZERO_TIMES_INF)]


def _beyond_one(x: Arrays) -> list[Cause]:
    return [Cause(0, np.abs(x[0]) > 1, "only numbers from -1 to 1 are a sine or a cosine")]


def _softmax(x: Arrays) -> list[Cause]:
    blind = np.broadcast_to(np.isneginf(x[0]).all(-1, keepdims=True), x[0].shape) if x[0].ndim else np.isneginf(x[0])
    return [Cause(0, np.isposinf(x[0]), INF_SCORE), Cause(0, blind, ROW_OF_INF, sure=False)]


def _sum(x: Arrays) -> list[Cause]:
    both = np.isposinf(x[0]).any() and np.isneginf(x[0]).any()
    return [Cause(0, np.isneginf(x[0]) & both, INF_MINUS_INF, sure=False)]


CAUSES: dict[str, Callable[[Arrays], list[Cause]]] = {
    "log": _log,
    "log2": _log,
    "log10": _log,
    "log1p": lambda x: _log(x, -1.0),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "div": _div,
    "mod": _div,
    "reciprocal": _reciprocal,
    "exp": _exp,
    "expm1": _exp,
    "sinh": _exp,
    "cosh": _exp,
    "pow": _power,
    "add": _sum_of_two,
    "sub": lambda x: _sum_of_two(x, -1),
    "mul": _product,
    "arcsin": _beyond_one,
    "arccos": _beyond_one,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "cross_entropy": lambda x: [Cause(0, np.isneginf(x[0]), CLOSED_TARGET, sure=False)],
    "sum": _sum,
}
MEANS = {"mean", "var", "std"}

# The slope of an op where it is infinite or has no value, for the op's result y and its operands.
SLOPES: dict[str, str] = {
    "sqrt": "the slope of sqrt at 0 is inf, and times a gradient of 0 NaN: sqrt(x + 1e-12), or choose the input, "
    "sqrt(where(x > 0, x, 1)), since where() after the root does not help",
    "rsqrt": "the slope of 1 / sqrt(x) at 0 is infinite: add a small number inside the root",
    "pow": "the slope of a power below 1 is inf at 0: keep the base away from 0",
    "log": "the slope of log at 0 is inf: keep it away from 0, log(x + 1e-12)",
    "div": "the gradient of a / b divides by b, and that of b by b^2: keep the divisor away from 0",
    "reciprocal": "the gradient of 1 / a divides by a^2: keep a away from 0",
    "norm": "the slope of a norm at 0 does not exist: add a small number inside the root",
    "std": "the slope of std is inf where all numbers are equal: use var, or sqrt(var + 1e-12)",
    "arcsin": "the slope of arcsin at -1 and 1 is inf",
    "arccos": "the slope of arccos at -1 and 1 is inf",
}
SLOPES["log2"] = SLOPES["log10"] = SLOPES["log1p"] = SLOPES["log"]


def cause_of(op: str, operands: Arrays) -> Cause | None:
    """The likeliest reason why `op` gave NaN or inf for these operands; None if none is known.

    Those that make NaN stand first in the table: where both are made, NaN is reported.
    """
    with np.errstate(all="ignore"):
        try:
            causes = CAUSES[op](operands) if op in CAUSES else []
        except (ValueError, IndexError, TypeError):  # an op of the user's that bears one of these names
            return None
    return next((c for c in causes if np.any(c.where)), None)


def overflow(dtype: np.dtype) -> str:
    """The words for a result that is too large."""
    return OVERFLOW.format(dtype=dtype, most=np.finfo(dtype).max)
