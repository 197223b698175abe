"""Cross-entropy with its log-softmax inside: one pass over the logits forward and one back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.normalisation import softmax
from tinygrad_qkv.ops.operands import Operand, floating, plain
from tinygrad_qkv.ops.reductions import sum
from tinygrad_qkv.ops.shapes import reshape
from tinygrad_qkv.tensor import Tensor


def cross_entropy(
    logits: Operand,
    targets: Operand,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """-log softmax(logits)[target]: logits (..., C), integer targets (...) from 0 to C - 1 or `ignore_index`.

    `label_smoothing` s takes (1 - s) from the target and s / C from every class.  reduction "mean" divides by the
    number of targets that are not ignored (0 with zero gradient if all are), "sum" adds, "none" keeps (...).
    A target outside the range raises IndexError.
    """
    logits, x = floating(logits)
    wanted = class_targets(targets, "logits", x.shape, ignore_index)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing lies between 0 and 1, got {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    shape = (math.prod(x.shape[:-1]), x.shape[-1])
    flat = reshape(logits, shape) if x.ndim != 2 else logits
    losses, logsumexp = kernels.cross_entropy(x.reshape(shape), wanted, ignore_index, float(label_smoothing))
    saved = (flat, wanted, logsumexp, ignore_index, float(label_smoothing))
    formula = (
        "dlogits = where(column(targets) == ignore_index, 0, column(g) * "
        "(softmax(logits, -1) - smoothed(one_hot(targets, logits), label_smoothing)))"
    )
    y = record(losses, "cross_entropy", (flat,), saved, (_cross_entropy_pullback,), (formula,))
    if reduction == "none":
        return reshape(y, *x.shape[:-1]) if x.ndim != 2 else y
    kept = int(np.count_nonzero(wanted != ignore_index))
    return sum(y) if reduction == "sum" else sum(y) / max(kept, 1)


def class_targets(targets: Operand, name: str, shape: tuple[int, ...], ignore_index: int) -> np.ndarray:
    """Targets (...) as (N,) int64, checked against the classes of the argument `name`, of shape (..., C)."""
    targets = np.asarray(plain(targets))
    if not isinstance(ignore_index, (int, np.integer)):
        raise TypeError(f"ignore_index is an integer, got {ignore_index!r}; the default -100 stands for no class")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index fits in int64, got {ignore_index}; the default -100 stands for no class")
    if len(shape) == 0:
        raise ValueError(f"{name} have shape (..., C), the classes on the last axis; got ()")
    if targets.shape != shape[:-1]:
        moved = targets.ndim + 1 == len(shape) and targets.shape == (shape[0], *shape[2:])
        hint = (
            f"; the classes are the last axis here: move axis 1 there with np.moveaxis({name}, 1, -1)" if moved else ""
        )
        if targets.shape == shape:
            hint = "; the class numbers of one-hot targets are targets.argmax(-1)"
        raise ValueError(f"{name} of shape {shape} need targets of shape {shape[:-1]}, got {targets.shape}{hint}")
    if targets.dtype.kind not in "iu":
        raise TypeError(f"targets are class numbers (integers), got {targets.dtype}")
    targets = targets.reshape(-1)
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= shape[-1]))  # before uint64 could wrap to int64
    if wrong.any():
        raise IndexError(
            f"target {targets[wrong][0]} is outside the {shape[-1]} classes of {name} of shape {shape} "
            f"(0 to {shape[-1] - 1}, or ignore_index={ignore_index})"
        )
    return targets.astype(np.int64)


def _cross_entropy_pullback(
    g: Any, logits: Any, targets: np.ndarray, logsumexp: np.ndarray, ignore_index: int, label_smoothing: float
) -> Any:
    if isinstance(g, np.ndarray):
        return kernels.cross_entropy_pullback(g, logits, targets, logsumexp, ignore_index, label_smoothing)
    classes = logits.shape[-1]
    kept = (targets != ignore_index)[:, None]
    q = (
        np.equal(np.where(kept, targets[:, None], 0), np.arange(classes)) * (1 - label_smoothing)
        + label_smoothing / classes
    )
    safe = np.where(kept, logits, 0)  # an ignored row may hold NaN
    return np.where(kept, np.reshape(g, (-1, 1)) * (softmax(safe, -1) - q.astype(logits.dtype)), 0)
