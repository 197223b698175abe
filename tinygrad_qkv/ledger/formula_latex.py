"""LaTeX from the text of a formula, so that the two cannot say different things."""

from __future__ import annotations

import ast
from functools import lru_cache

from tinygrad_qkv.formulas import steps

# How tightly a piece of LaTeX holds together; a looser one gets brackets inside a tighter one. MINUS is a product that
# begins with a minus; MATRIX a product that needs no brackets beside a matrix.
OR, AND, COMPARISON, SUM, MINUS, PRODUCT, MATRIX, POWER, ATOM = range(9)

Piece = tuple[str, int]


@lru_cache(maxsize=512)
def latex(formula: str) -> str:
    r"""A formula of the language in formulas.py as LaTeX, e.g. "db = a.T @ g" as `\mathrm{d}b = a^{\top}\, g`.

    Several steps become an `aligned` block, `where` a `cases` block. `*` is \odot, or a space next to a number.
    Broadcasting is not written (`column(x)` is x). ValueError for what the language does not have.
    """
    lines = steps(formula)
    gradients = {lines[-1][0]}
    equals = [(_name(name, gradients), _tex(expression, gradients)[0]) for name, expression in lines]
    if len(equals) == 1:
        return f"{equals[0][0]} = {equals[0][1]}"
    body = r" \\ ".join(f"{left} &= {right}" for left, right in equals)
    return rf"\begin{{aligned}} {body} \end{{aligned}}"


SYMBOLS = {
    **{name: f"\\{name}" for name in ("alpha", "beta", "gamma", "delta", "lambda", "mu", "sigma", "tau", "pi")},
    "inf": r"\infty",
    "eps": r"\varepsilon",
    "xhat": r"\hat{x}",
}
NUMBERS = {"scale", "n", "slope", "alpha", "pi"}  # names that stand for a number in every rule

# The sign of an operator, its own level, and the one that its right side needs.
OPERATORS: dict[type, tuple[str, int, int]] = {
    ast.BitOr: (r"\vee", OR, AND),
    ast.BitAnd: (r"\wedge", AND, COMPARISON),
    ast.Eq: ("=", COMPARISON, SUM),
    ast.NotEq: (r"\neq", COMPARISON, SUM),
    ast.Lt: ("<", COMPARISON, SUM),
    ast.LtE: (r"\leq", COMPARISON, SUM),
    ast.Gt: (">", COMPARISON, SUM),
    ast.GtE: (r"\geq", COMPARISON, SUM),
    ast.Add: ("+", SUM, PRODUCT),
    ast.Sub: ("-", SUM, PRODUCT),
    ast.Mult: (r"\odot", PRODUCT, PRODUCT),
    ast.MatMult: (r"\,", MATRIX, MATRIX),
}

NAMED = {name: f"\\{name}" for name in ("exp", "log", "sin", "cos", "sinh", "cosh", "tanh")}
NAMED |= {"sigmoid": r"\sigma", "minimum": r"\min", "maximum": r"\max"}
OVER_AN_AXIS = {"mean", "softmax", "cumsum"}


def _tex(node: ast.expr, gradients: set[str]) -> Piece:
    """An expression, and how tightly it holds together."""
    match node:
        case ast.Constant(value=bool() | int() | float() as number):
            return _number(number), ATOM
        case ast.Name(id=name):
            return _name(name, gradients), ATOM
        case ast.Tuple(elts=parts):
            return _bracketed(", ".join(_tex(part, gradients)[0] for part in parts)), ATOM
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"-{_inside(operand, PRODUCT, gradients)}", MINUS
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return rf"\neg {_inside(operand, ATOM, gradients)}", POWER
        case ast.BinOp(left=left, op=op, right=right):
            return _operation(left, op, right, gradients)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _operation(left, op, right, gradients)
        case ast.Attribute(value=matrix, attr="T"):
            return rf"{_inside(matrix, ATOM, gradients)}^{{\top}}", POWER
        case ast.Subscript(value=array, slice=index):
            return f"{_inside(array, ATOM, gradients)}[{_tex(index, gradients)[0]}]", ATOM
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _call(name, arguments, gradients)
    raise ValueError(f"{ast.unparse(node)!r} has no meaning in the language of formulas")


def _operation(left: ast.expr, op: ast.operator | ast.cmpop, right: ast.expr, gradients: set[str]) -> Piece:
    """Two expressions and what stands between them."""
    if isinstance(op, ast.Div):
        return rf"\frac{{{_tex(left, gradients)[0]}}}{{{_tex(right, gradients)[0]}}}", MATRIX
    if isinstance(op, ast.Pow):
        return f"{_inside(left, ATOM, gradients)}^{{{_tex(right, gradients)[0]}}}", POWER
    if type(op) not in OPERATORS:
        raise ValueError(f"{type(op).__name__} is no operator of the language of formulas")
    sign, level, level_right = OPERATORS[type(op)]
    if isinstance(op, ast.Mult) and (_is_number(left) or _is_number(right)):
        level = level_right = MATRIX
        sign = r"\cdot" if isinstance(right, ast.Constant) else r"\,"
    first, own = _tex(left, gradients)
    if own == MINUS and level in (PRODUCT, MATRIX):
        level = MINUS
    return f"{_bracketed(first) if own < level else first} {sign} {_inside(right, level_right, gradients)}", level


def _inside(node: ast.expr, level: int, gradients: set[str]) -> str:
    """An expression as part of one that holds together at `level`."""
    text, own = _tex(node, gradients)
    return _bracketed(text) if own < level else text


def _call(name: str, arguments: list[ast.expr], gradients: set[str]) -> Piece:
    parts = [_tex(argument, gradients)[0] for argument in arguments]
    match name, parts:
        case "column", [part]:
            return _tex(arguments[0], gradients)
        case "sqrt", [part]:
            return rf"\sqrt{{{part}}}", ATOM
        case "abs", [part]:
            return rf"\left|{part}\right|", ATOM
        case "floor", [part]:
            return rf"\left\lfloor {part} \right\rfloor", ATOM
        case "where", [_, _, _]:
            lines = r" \\ ".join(_cases(arguments, gradients))
            return rf"\begin{{cases}} {lines} \end{{cases}}", OR
        case "sum", [_, axis]:
            return rf"\sum_{{{axis}}} {_bracketed(parts[0])}", ATOM
        case _, [part, axis] if name in OVER_AN_AXIS:
            return rf"\mathrm{{{name}}}_{{{axis}}} {_bracketed(part)}", ATOM
    return f"{NAMED.get(name) or _upright(name)}{_bracketed(', '.join(parts))}", ATOM


def _cases(arguments: list[ast.expr], gradients: set[str]) -> list[str]:
    """The lines of where(condition, yes, no); a `where` in place of `no` adds its own."""
    condition, yes, no = arguments
    first = rf"{_tex(yes, gradients)[0]} & \text{{if }} {_tex(condition, gradients)[0]}"
    if isinstance(no, ast.Call) and isinstance(no.func, ast.Name) and no.func.id == "where" and len(no.args) == 3:
        return [first, *_cases(no.args, gradients)]
    return [first, rf"{_tex(no, gradients)[0]} & \text{{otherwise}}"]


def _is_number(node: ast.expr) -> bool:
    """Whether an expression holds no array, so that a product with it needs no sign."""
    names = (child.id for child in ast.walk(node) if isinstance(child, ast.Name))
    return all(name in NUMBERS or name == "sqrt" for name in names)


def _name(name: str, gradients: set[str]) -> str:
    r"""dW_Q as \mathrm{d}W_{Q}, x0 as x_{0}, words upright."""
    if name in SYMBOLS:
        return SYMBOLS[name]
    rest = name[1:]
    if name.startswith("d") and rest and (name in gradients or rest[0].isupper() or len(rest) == 1):
        return rf"\mathrm{{d}}{_name(rest.lstrip('_') or rest, set())}"
    first, *below = name.strip("_").split("_")
    letters = first.rstrip("0123456789")
    if letters and letters != first:
        first, below = letters, [first[len(letters) :], *below]
    subscript = f"_{{{', '.join(map(_word, below))}}}" if below else ""
    return _word(first) + subscript


def _word(text: str) -> str:
    """One letter is a variable, more are a word."""
    return SYMBOLS.get(text) or (text if len(text) == 1 or text.isdigit() else _upright(text))


def _upright(text: str) -> str:
    escaped = text.replace("_", r"\_")
    return rf"\mathrm{{{escaped}}}"


def _number(x: float) -> str:
    """Digits; a power of ten where Python writes one."""
    digits, _, power = str(x).partition("e")
    if isinstance(x, bool):
        return _upright(digits)
    return rf"{digits} \cdot 10^{{{int(power)}}}" if power else digits


def _bracketed(text: str) -> str:
    return rf"\left({text}\right)"
