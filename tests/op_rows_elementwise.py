"""Rows of the table of ops: arithmetic, functions, activations, selection, comparisons and creation."""

import numpy as np
from op_table import ids, inside, normal, positive, row
from scipy import special

from tinygrad_qkv import ops

PATTERNS = {
    "same": ((3, 5), (3, 5)),
    "outer": ((3, 1), (1, 5)),
    "row": ((3, 5), (5,)),
    "column": ((3, 1), (3, 5)),
    "0-d": ((), (3, 5)),
    "both 0-d": ((), ()),
    "one element": ((1, 1), (5,)),
    "batch": ((2, 1, 5), (3, 1)),
    "four axes": ((2, 1, 3, 1), (5, 1, 7)),
    "empty": ((0, 3), (3,)),
}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "mod": np.mod,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "logaddexp": np.logaddexp,
}
ARITHMETIC = [
    *(row(op, (normal(*a), positive(*b)), f, note=n) for op, f in BINARY.items() for n, (a, b) in PATTERNS.items()),
    *(row(op, (normal(3, 5),), f, 2.5) for op, f in BINARY.items()),
    *(row(op, (2, positive(3, 5)), f, note="2 . x") for op, f in BINARY.items()),
    *(row("pow", (positive(*a), normal(*b)), np.power, note=n) for n, (a, b) in PATTERNS.items()),
    *(row("pow", (positive(5),), np.power, exponent) for exponent in (2, 3, -1.0, 0.5, 0, 1.0)),
    row("pow", (normal(5),), np.power, 3, note="negative base"),
    row("pow", (normal(5),), lambda x: 1.7**x, call=lambda x: ops.pow(1.7, x), note="1.7 ** x"),
    row("floordiv", (normal(3, 5), positive(5)), np.floor_divide, gradient=False),
    row("astype", (normal(3, 5),), lambda x, dtype: x.astype(dtype), np.int64, note="int64", gradient=False),
    row("astype", (normal(3, 5),), np.copy, call=lambda x: ops.astype(x, x.dtype), note="same dtype"),
]


def rectified(x: np.ndarray, slope: float = 0.01) -> np.ndarray:
    return np.where(x > 0, x, slope * x)


def elu(x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    return np.where(x > 0, x, alpha * np.expm1(x))


def gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return x * (special.ndtr(x) if approximate == "none" else (1 + tanh) / 2)


UNARY = {
    "neg": (normal, np.negative),
    "abs": (normal, np.abs),
    "sign": (normal, np.sign),
    "reciprocal": (positive, np.reciprocal),
    "square": (normal, np.square),
    "clone": (normal, np.copy),
    "exp": (normal, np.exp),
    "expm1": (normal, np.expm1),
    "log": (positive, np.log),
    "log1p": (positive, np.log1p),
    "log2": (positive, np.log2),
    "log10": (positive, np.log10),
    "sqrt": (positive, np.sqrt),
    "rsqrt": (positive, lambda x: 1 / np.sqrt(x)),
    "sin": (normal, np.sin),
    "cos": (normal, np.cos),
    "tan": (inside, np.tan),
    "sinh": (normal, np.sinh),
    "cosh": (normal, np.cosh),
    "tanh": (normal, np.tanh),
    "arcsin": (inside, np.arcsin),
    "arccos": (inside, np.arccos),
    "arctan": (normal, np.arctan),
    "erf": (normal, special.erf),
    "relu": (normal, lambda x: np.maximum(x, 0)),
    "leaky_relu": (normal, rectified),
    "elu": (normal, elu),
    "sigmoid": (normal, special.expit),
    "silu": (normal, lambda x: x * special.expit(x)),
    "softplus": (normal, lambda x: np.log1p(np.exp(x))),
    "gelu": (normal, gelu),
}
SIZES = {"": (3, 5), "0-d": (), "empty": (0, 3)}
FUNCTIONS = [
    *(row(op, (sample(*n),), f, note=note) for op, (sample, f) in UNARY.items() for note, n in SIZES.items()),
    row("leaky_relu", (normal(7),), rectified, 0.3),
    row("elu", (normal(7),), elu, 1.7),
    row("gelu", (normal(3, 5),), gelu, "tanh"),
]

MASK = normal(3, 5) > 0
KEPT = np.asarray(ops.dropout(np.ones((3, 5)), 0.4, np.random.default_rng(5))) > 0
SELECTION = [
    row("where", (MASK, normal(3, 5), normal(3, 5)), np.where),
    row("where", (MASK, normal(3, 1), normal(5)), np.where, note="broadcast"),
    row("where", (MASK[:, :1], normal(2, 1, 5), normal()), np.where, note="mask broadcast"),
    row("where", (MASK, normal(3, 5)), np.where, 0, note="number"),
    row("masked_fill", (normal(2, 3, 5), MASK), lambda x, mask, v: np.where(mask, v, x), 7.0),
    row("masked_fill", (normal(3, 5), MASK, normal(5)), lambda x, mask, v: np.where(mask, v, x)),
    *(row("clip", (normal(3, 5),), np.clip, *limits) for limits in ((-0.5, 0.7), (None, 0.2), (-0.1, None), (-1, 1))),
    row("clip", (normal(3, 5), inside(5) - 1, inside(3, 1) + 1), np.clip, note="tensors as limits"),
    row(
        "dropout",
        (normal(3, 5),),
        lambda x: np.where(KEPT, x / 0.6, 0),
        call=lambda x: ops.dropout(x, 0.4, np.random.default_rng(5)),
    ),
    row("dropout", (normal(3, 5),), lambda x, p: np.zeros_like(x), 1.0),
]

COMPARE = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
BITS = {"logical_and": np.bitwise_and, "logical_or": np.bitwise_or, "logical_xor": np.bitwise_xor}
EDGES = np.array([0.0, 1.5, -np.inf, np.inf, np.nan])
COMPARISONS = [
    *(row(op, (np.round(normal(3, 5)), np.round(normal(5))), f, gradient=False) for op, f in COMPARE.items()),
    *(row(op, (ids(3, 3, 5),), f, 1, gradient=False) for op, f in COMPARE.items()),
    *(row(op, (MASK, normal(5) > 0), f, gradient=False) for op, f in BITS.items()),
    *(row(op, (ids(8, 3, 5), ids(8, 5)), f, note="bits", gradient=False) for op, f in BITS.items()),
    row("logical_not", (MASK,), np.logical_not, gradient=False),
    row("logical_not", (ids(8, 5),), np.invert, note="bits", gradient=False),
    *(row(op, (EDGES,), getattr(np, op), gradient=False) for op in ("isnan", "isinf", "isfinite")),
    row("allclose", (normal(3), normal(3)), np.allclose, gradient=False),
    row("allclose", (EDGES, EDGES), np.allclose, equal_nan=True, gradient=False),
]


def drawn(name: str, *args: object) -> np.ndarray:
    return getattr(np.random.default_rng(7), name)(*args)


def fresh() -> np.random.Generator:
    return np.random.default_rng(7)


CREATION = [
    row("zeros", (), np.zeros, (2, 3), gradient=False),
    row("ones", (), np.ones, 5, gradient=False),
    row("full", (), np.full, (2, 3), 0.5, gradient=False),
    row("zeros_like", (normal(2, 3),), np.zeros_like, gradient=False),
    row("ones_like", (normal(2, 3),), np.ones_like, gradient=False),
    row("full_like", (normal(2, 3),), np.full_like, 7, gradient=False),
    row("arange", (), np.arange, 2, 11, 3, gradient=False),
    row("arange", (), np.arange, 1, 0, -0.25, gradient=False),
    row("linspace", (), np.linspace, -1, 1, 5, gradient=False),
    row("eye", (), np.eye, 3, 5, gradient=False),
    row("one_hot", (ids(5, 2, 3),), lambda i, classes: np.eye(classes)[i], 5, gradient=False),
    row("from_dlpack", (), np.array, np.arange(6.0).reshape(2, 3), note="", gradient=False),
    row(
        "uniform",
        (),
        lambda shape, low, high: drawn("uniform", low, high, shape),
        (2, 3),
        -1,
        2,
        call=lambda *args: ops.uniform(*args, generator=fresh()),
        gradient=False,
    ),
    row(
        "normal",
        (),
        lambda shape, mean, std: drawn("normal", mean, std, shape),
        (2, 3),
        3,
        0.5,
        call=lambda *args: ops.normal(*args, generator=fresh()),
        gradient=False,
    ),
    row(
        "integers",
        (),
        lambda low, high, shape: drawn("integers", low, high, shape),
        -2,
        9,
        (2, 3),
        call=lambda *args: ops.integers(*args, generator=fresh()),
        gradient=False,
    ),
]

ROWS = [*ARITHMETIC, *FUNCTIONS, *SELECTION, *COMPARISONS, *CREATION]
