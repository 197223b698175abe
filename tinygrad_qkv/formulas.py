"""The small language in which every op writes down its rules, and its evaluation on arrays.

    dx = y * (g - sum(g * y, axis))                                    the rule of softmax
    s = sigmoid(x); dx = g * s * (1 + x * (1 - s))                     steps, and the last one is the gradient

Names are those of the rule's parameters: `g` the gradient of the result, `y` the result, the operands, and constants.
A reduction keeps its axis, so that its value broadcasts: `sum`, `mean`, and in the rule of a reduction (one with a
parameter `axes`) also `g` and `y`. Broadcasting is undone by the engine, so `da = g` is the whole rule of a + b.
`.T` swaps the last two axes. The text is parsed, never run as Python: only what stands in the tables below has a
meaning.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.kernels.attention_rules import visible


def evaluate(formula: str, values: Mapping[str, Any], shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The value of a formula's last step, e.g. evaluate("da = g * b", {"g": ..., "b": ...}, a.shape).

    `values` gives arrays and numbers by name. `shape` is the operand's: the value is summed over the axes that
    broadcasting had stretched, and stretched over those that a sum had removed. A name, a function or a piece of
    syntax that the language does not have raises ValueError.
    """
    known = dict(values)
    with np.errstate(all="ignore"):
        for name, expression in steps(formula):
            try:
                result = known[name] = _value(expression, known)
            except ValueError as error:
                raise ValueError(f"formula {formula!r}: {error}") from None
    return np.asarray(result) if shape is None else _fitted(np.asarray(result), shape, formula)


def rule_values(rule: Callable, g: np.ndarray, saved: Sequence[Any]) -> dict[str, Any]:
    """What the names in the formulas of `rule` stand for, when it is called as rule(g, *saved).

    In the rule of a reduction g and y get their reduced axes back, with size 1.
    """
    values = dict(zip(inspect.signature(rule).parameters, (g, *saved), strict=True))
    if "axes" in values:
        shape = values["shape"] if "shape" in values else np.shape(values["x"])
        kept = [1 if i in values["axes"] else n for i, n in enumerate(shape)]
        for name in {"g", "y"} & set(values):
            values[name] = np.reshape(values[name], kept)
    return values


def _fitted(value: np.ndarray, shape: tuple[int, ...], formula: str) -> np.ndarray:
    """`value` in the operand's shape."""
    extra = max(value.ndim - len(shape), 0)
    wanted = (1,) * extra + shape
    padded = value.reshape((1,) * (len(wanted) - value.ndim) + value.shape)
    axes = tuple(i for i, (want, got) in enumerate(zip(wanted, padded.shape, strict=True)) if want == 1 != got)
    summed = np.sum(padded, axis=axes, keepdims=True) if axes else padded
    if any(got not in (1, want) for want, got in zip(wanted, summed.shape, strict=True)):
        raise ValueError(f"formula {formula!r} gives shape {value.shape}, which does not fit an operand of {shape}")
    return np.broadcast_to(summed, wanted).reshape(shape)


@lru_cache(maxsize=512)
def steps(formula: str) -> tuple[tuple[str, ast.expr], ...]:
    """The assignments of a formula, as names and syntax trees."""
    try:
        lines = ast.parse(formula).body
    except SyntaxError as error:
        raise ValueError(f"formula {formula!r} cannot be read: {error.msg}") from None
    steps = []
    for line in lines:
        if not isinstance(line, ast.Assign) or len(line.targets) != 1 or not isinstance(line.targets[0], ast.Name):
            raise ValueError(f"formula {formula!r} must read 'name = expression', steps separated by ';'")
        steps.append((line.targets[0].id, line.value))
    if not steps:
        raise ValueError("an empty formula has no value")
    return tuple(steps)


def names_read(formula: str) -> set[str]:
    """The names that a formula takes from outside: no constants, functions, or results of its own earlier steps."""
    read: set[str] = set()
    made = set(CONSTANTS)
    for name, expression in steps(formula):
        called = {id(node.func) for node in ast.walk(expression) if isinstance(node, ast.Call)}
        read |= {n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and id(n) not in called} - made
        made.add(name)
    return read


def renamed(formula: str, names: Mapping[str, str]) -> str:
    """The formula with other names, e.g. renamed("db = a.T @ g", {"db": "dW_Q", "a": "X", "g": "dQ"}).

    Unchanged where a new name would mean two things.
    """
    new = {old: name for old, name in names.items() if name != old}
    if set(new.values()) & set(NAME.findall(formula)):
        return formula
    return NAME.sub(lambda found: new.get(found.group(), found.group()), formula)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of one expression."""
    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            return number
        case ast.Name(id=name) if name in values or name in CONSTANTS:
            return values[name] if name in values else CONSTANTS[name]
        case ast.Name(id=name):
            raise ValueError(f"{name!r} is no name of this rule; it has {', '.join(values)}, and pi and inf")
        case ast.Tuple(elts=parts):
            return tuple(_value(part, values) for part in parts)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand, values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.Attribute(value=matrix, attr="T"):
            return np.swapaxes(_value(matrix, values), -1, -2)
        case ast.Subscript(value=array, slice=index):
            return _value(array, values)[_value(index, values)]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(argument, values) for argument in arguments))
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            raise ValueError(f"{name!r} is no function of the language; it has {', '.join(sorted(FUNCTIONS))}")
    raise ValueError(f"{ast.unparse(node)!r} has no meaning in the language of formulas")


def _power(base: Any, exponent: Any) -> Any:
    """base ** exponent; of two Python integers as a float, which cannot grow without end."""
    return (float(base) if isinstance(base, int) else base) ** exponent


NAME = re.compile(r"(?<![.\w])[A-Za-z_]\w*(?!\w|\s*\()")  # not a function, not the T of `.T`

CONSTANTS = {"pi": math.pi, "inf": math.inf}

OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
    ast.MatMult: operator.matmul,
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Invert: np.logical_not,
}


def _add_at(g: Any, index: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros of `shape` with g added at `index`, once for every time that an element is named."""
    out = np.zeros(shape, np.asarray(g).dtype)
    np.add.at(out, index, g)
    return out


def _add_rows(g: Any, ids: np.ndarray, rows: int) -> np.ndarray:
    """Zeros (rows, width) with g (..., width) added to the rows that ids (...) names."""
    return _add_at(g, ids, (rows, g.shape[-1]))


def _product_of_others(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """For every element the product of all the others along `axes`."""
    out = np.empty_like(x)
    for i in np.ndindex(x.shape):
        line = tuple(slice(None) if axis in axes else i[axis] for axis in range(x.ndim))
        rest = x.copy()
        rest[i] = 1
        out[i] = np.prod(rest[line])
    return out


def _sum_over_copies(g: np.ndarray, split: tuple[int, ...]) -> np.ndarray:
    """The sum over the copies that tile made; `split` is (copies, size) of each axis in turn."""
    return np.sum(np.reshape(g, split), axis=tuple(range(0, len(split), 2)))


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def _one_hot(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(N, C) with a 1 at each of ids (N,), C as in rows (N, C); an id outside has no 1."""
    return (ids[..., None] == np.arange(rows.shape[-1])).astype(float)


def _smoothed(q: np.ndarray, s: float) -> np.ndarray:
    """Of a distribution over C classes: a share s is spread evenly over all of them."""
    return (1 - s) * q + s / q.shape[-1]


def _kept(g: np.ndarray, p: float, seed: int) -> np.ndarray:
    """Which elements of an array like g dropout keeps under the seed."""
    return kernels.dropout(np.ones_like(g), p, seed) != 0


def _mix(weights: np.ndarray, x: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """weights (..., T, S) @ x (..., S, d) of the pairs in `keep` (..., T, S) alone: a NaN in others stays out."""
    return np.sum(np.where(keep[..., None], weights[..., None] * x[..., None, :, :], 0), -2)


def _dropped(x: np.ndarray, rules: Any) -> np.ndarray:
    """x after the dropout of attention's rules."""
    return kernels.dropout(x, rules.dropout_p, rules.seed)


FUNCTIONS: dict[str, Callable] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "where": np.where,
    "same": lambda a, b: (a == b) | (np.isnan(a) & np.isnan(b)),
    "sum": lambda x, axis: np.sum(x, axis=axis, keepdims=True),
    "mean": lambda x, axis: np.mean(x, axis=axis, keepdims=True),
    "cumsum": np.cumsum,
    "product_of_others": _product_of_others,
    "softmax": _softmax,
    "one_hot": _one_hot,
    "smoothed": _smoothed,
    "zeros_like": np.zeros_like,
    "column": lambda x: x[..., None],
    "reshape": np.reshape,
    "permute": np.transpose,
    "swapaxes": np.swapaxes,
    "flip": np.flip,
    "roll": np.roll,
    "tril": np.tril,
    "triu": np.triu,
    "sum_over_copies": _sum_over_copies,
    "split": np.split,
    "unbind": lambda x, axis: np.moveaxis(x, axis, 0),
    "add_at": _add_at,
    "add_rows": _add_rows,
    "kept": _kept,
    "dropped": _dropped,
    "mix": _mix,
    "capped": lambda S, rules: rules.softcap * np.tanh(S / rules.softcap),
    "cap_slope": lambda S, rules: 1 - np.tanh(S / rules.softcap) ** 2,
    "visible": visible,
    "per_head": lambda x, q: np.repeat(x, q.shape[1] // x.shape[1], 1),
    "per_group": lambda x, k: np.sum(x.reshape(*k.shape[:2], -1, *x.shape[2:]), 2),
}
