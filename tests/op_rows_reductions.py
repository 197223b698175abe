"""Rows of the table of ops: reductions, softmax, norms and cross-entropy."""

from typing import Any

import numpy as np
from op_table import ids, normal, row
from scipy import special

from tinygrad_qkv.ops.normalisation import softmax_pullback


def logsumexp(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))


def norm(x: np.ndarray, ord: float = 2, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    return np.sum(np.abs(x) ** ord, axis=axis, keepdims=keepdims) ** (1 / ord)


REDUCE = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "var": np.var,
    "std": np.std,
    "logsumexp": logsumexp,
    "norm": norm,
}
AXES = (None, 0, -1, (0, 2), (-1, 1), (2, 0, 1), ())
REDUCTIONS = [
    *(
        row(op, (normal(2, 3, 5),), f, axis=axis, keepdims=keepdims)
        for op, f in REDUCE.items()
        for axis in AXES
        for keepdims in (False, True)
        if (op, axis) != ("std", ())  # it is 0 everywhere, where it has no slope
    ),
    *(row(op, (normal(7),), f, note="1-d") for op, f in REDUCE.items()),
    *(row(op, (normal(),), f, note="0-d") for op, f in REDUCE.items() if op != "std"),
    *(row(op, (normal(0, 3),), f, axis=1) for op, f in REDUCE.items()),
    *(row(op, (normal(3, 5),), f, axis=1, ddof=1) for op, f in (("var", np.var), ("std", np.std))),
    *(row("norm", (normal(3, 5),), norm, order, 1) for order in (1, 3, 2.5)),
    row("norm", (normal(3, 5),), np.linalg.norm, np.inf, 1),
    *(row("cumsum", (normal(2, 3, 5),), np.cumsum, axis) for axis in (0, 1, -1)),
    *(
        row(op, (normal(3, 5),), getattr(np, op), axis=axis, keepdims=True, gradient=False)
        for op in ("argmax", "argmin")
        for axis in (None, 0, -1)
    ),
    *(
        row(op, (ids(3, 3, 5, 7),), getattr(np, op), axis=axis, gradient=False)
        for op in ("any", "all")
        for axis in (None, 0, (0, 1))
    ),
]


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    return special.softmax(x, axis) if x.size else x


def pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    return y * (g - np.sum(g * y, axis=axis if y.ndim else None, keepdims=True))


def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    return special.log_softmax(x, axis) if x.size else x


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


SHAPES = ((-1, (3, 5)), (0, (3, 5)), (1, (2, 3, 5)), (-1, (3, 1)), (0, ()), (-1, (2, 0)), (0, (7,)), (0, (0, 3)))
NORMALISATION = [
    *(row("softmax", (normal(*shape),), softmax, axis, note=f"{axis} of {shape}") for axis, shape in SHAPES),
    *(
        row("softmax_pullback", (normal(*n), normal(*n)), pullback, i, call=softmax_pullback, note=f"{i} of {n}")
        for i, n in SHAPES
    ),
    *(row("log_softmax", (normal(*shape),), log_softmax, axis, note=f"{axis} of {shape}") for axis, shape in SHAPES),
    *(
        row("layer_norm", (normal(*shape), normal(shape[-1]), normal(shape[-1])), layer_norm, note=f"{shape}")
        for shape in ((3, 5), (5,), (2, 3, 7), (0, 3), (3, 1))
    ),
    row("layer_norm", (normal(3, 5), normal(5), normal(5)), layer_norm, 0.5),
    *(
        row("rms_norm", (normal(*shape), normal(shape[-1])), rms_norm, note=f"{shape}")
        for shape in ((3, 5), (5,), (2, 3, 7), (0, 3), (3, 1))
    ),
    row("rms_norm", (normal(3, 5), normal(5)), rms_norm, 0.5),
]


def cross_entropy(z: np.ndarray, t: np.ndarray, *, label_smoothing: float = 0.0, reduction: str = "mean") -> Any:
    """From the definition: -sum(q * log p) with q the smoothed one-hot; a negative target is left out."""
    classes = z.shape[-1]
    q = (1 - label_smoothing) * np.eye(classes)[np.maximum(t, 0)] + label_smoothing / classes
    losses = np.where(t < 0, 0.0, -np.sum(q * log_softmax(z, -1), -1))
    return {"mean": losses.sum() / max((t >= 0).sum(), 1), "sum": losses.sum(), "none": losses}[reduction]


def targets(shape: tuple[int, ...]) -> np.ndarray:
    """Class numbers for logits of `shape`, the second one ignored."""
    t = ids(shape[-1], *shape[:-1])
    if len(shape) > 1 and len(t) > 1:
        t[1] = -100
    return t


ENTROPY = [
    row(
        "cross_entropy",
        (normal(*shape), targets(shape)),
        cross_entropy,
        label_smoothing=smoothing,
        reduction=reduction,
        note=f"{shape} {reduction}",
    )
    for shape in ((3, 5), (2, 3, 5), (5,), (0, 3))
    for smoothing, reduction in ((0.0, "mean"), (0.2, "sum"), (0.3, "none"))
]

ROWS = [*REDUCTIONS, *NORMALISATION, *ENTROPY]
