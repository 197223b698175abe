"""Losses, each as a function and as a module; shapes must agree exactly, because broadcasting here is always a mistake.

`reduction` is "mean" (over all elements), "sum" or "none". Targets need no gradient, but get one where they ask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.nn.module import Module
from tinygrad_qkv.ops import cross_entropy
from tinygrad_qkv.ops.entropy import class_targets
from tinygrad_qkv.tensor import Tensor

__all__ = [
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "NLLLoss",
    "bce_with_logits",
    "cross_entropy",
    "huber",
    "kl_div",
    "l1",
    "mse",
    "nll",
]


def mse(prediction: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """The squared error (prediction - target)^2."""
    prediction, target = _same_shape("mse", prediction, target)
    return _reduce(ops.square(prediction - target), reduction)


def l1(prediction: Any, target: Any, *, reduction: str = "mean") -> Tensor:
    """The absolute error |prediction - target|; its gradient at 0 is 0."""
    prediction, target = _same_shape("l1", prediction, target)
    return _reduce(ops.abs(prediction - target), reduction)


def huber(prediction: Any, target: Any, *, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """Half the squared error up to `delta`, from there linear: delta * (|error| - delta / 2).

    Source: Huber 1964.
    """
    if not delta > 0:
        raise ValueError(f"huber's delta is positive, got {delta}")
    prediction, target = _same_shape("huber", prediction, target)
    error = ops.abs(prediction - target)
    small = error <= delta
    near = ops.where(small, error, 0)  # keeps the square of a large error from overflowing
    return _reduce(ops.where(small, 0.5 * near * near, delta * (error - 0.5 * delta)), reduction)


def bce_with_logits(logits: Any, target: Any, *, pos_weight: Any = None, reduction: str = "mean") -> Tensor:
    """Binary cross-entropy of sigmoid(logits) with targets from 0 to 1, exact for logits of any size.

    `pos_weight` multiplies the part of the positive class: a number, or a tensor that broadcasts to the logits.
    """
    logits, target = _same_shape("bce_with_logits", logits, target)
    if target.size and not (target.data.min() >= 0 and target.data.max() <= 1):
        raise ValueError(f"targets are probabilities from 0 to 1, got {target.data.min()} to {target.data.max()}")
    positive = target * ops.softplus(-logits)
    if pos_weight is not None:
        try:
            weight = ops.broadcast_to(pos_weight, logits.shape)
        except ValueError as error:
            raise ValueError(f"pos_weight: {error}") from None
        positive = weight.astype(positive.dtype) * positive
    return _reduce(positive + (1 - target) * ops.softplus(logits), reduction)


def nll(log_probs: Any, targets: Any, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """-log_probs[target]: log_probs (..., C), integer targets (...) from 0 to C - 1 or `ignore_index`.

    "mean" divides by the number of targets that are not ignored (0 if all are). A target outside the range raises
    IndexError.
    """
    log_probs = ops.tensor(log_probs)
    ids = class_targets(targets, "log_probs", log_probs.shape, ignore_index).reshape(log_probs.shape[:-1])
    kept = ids != ignore_index
    chosen = ops.take_along_axis(log_probs, np.where(kept, ids, 0)[..., None], -1).squeeze(-1)
    losses = ops.where(kept, -chosen, 0)
    if reduction == "mean":
        return losses.sum() / max(int(kept.sum()), 1)
    return _reduce(losses, reduction)


def kl_div(log_probs: Any, target: Any, *, log_target: bool = False, reduction: str = "mean") -> Tensor:
    """The terms of the divergence KL(target || prediction): target * (log target - log_probs).

    `log_probs` are the prediction's log-probabilities; `target` are probabilities, or their logarithms under
    `log_target`. A target of 0 contributes 0.  "mean" is over all elements; the divergence itself is the sum over
    the classes.
    """
    log_probs, target = _same_shape("kl_div", log_probs, target)
    if log_target:
        present = ~np.isneginf(target.data)
        log_p = ops.where(present, target, 0)
        p = ops.exp(log_p)
    else:
        if target.size and target.data.min() < 0:
            raise ValueError("kl_div's target holds negative probabilities; pass log_target=True for logarithms")
        present = target.data != 0
        p = ops.where(present, target, 1)
        log_p = ops.log(p)
    return _reduce(ops.where(present, p * (log_p - log_probs), 0), reduction)


class CrossEntropyLoss(Module):
    """`cross_entropy(logits, targets)` with its settings kept."""

    def __init__(self, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"):
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction

    def forward(self, logits: Any, targets: Any) -> Tensor:
        return cross_entropy(
            logits,
            targets,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
        )


class MSELoss(Module):
    """`mse(prediction, target)` with its reduction kept."""

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, prediction: Any, target: Any) -> Tensor:
        return mse(prediction, target, reduction=self.reduction)


class L1Loss(Module):
    """`l1(prediction, target)` with its reduction kept."""

    def __init__(self, *, reduction: str = "mean"):
        self.reduction = reduction

    def forward(self, prediction: Any, target: Any) -> Tensor:
        return l1(prediction, target, reduction=self.reduction)


class HuberLoss(Module):
    """`huber(prediction, target)` with its settings kept."""

    def __init__(self, *, delta: float = 1.0, reduction: str = "mean"):
        self.delta, self.reduction = delta, reduction

    def forward(self, prediction: Any, target: Any) -> Tensor:
        return huber(prediction, target, delta=self.delta, reduction=self.reduction)


class BCEWithLogitsLoss(Module):
    """`bce_with_logits(logits, target)` with its settings kept."""

    def __init__(self, *, pos_weight: Any = None, reduction: str = "mean"):
        self.pos_weight, self.reduction = pos_weight, reduction

    def forward(self, logits: Any, target: Any) -> Tensor:
        return bce_with_logits(logits, target, pos_weight=self.pos_weight, reduction=self.reduction)


class NLLLoss(Module):
    """`nll(log_probs, targets)` with its settings kept."""

    def __init__(self, *, ignore_index: int = -100, reduction: str = "mean"):
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, log_probs: Any, targets: Any) -> Tensor:
        return nll(log_probs, targets, ignore_index=self.ignore_index, reduction=self.reduction)


class KLDivLoss(Module):
    """`kl_div(log_probs, target)` with its settings kept."""

    def __init__(self, *, log_target: bool = False, reduction: str = "mean"):
        self.log_target, self.reduction = log_target, reduction

    def forward(self, log_probs: Any, target: Any) -> Tensor:
        return kl_div(log_probs, target, log_target=self.log_target, reduction=self.reduction)


def _same_shape(name: str, prediction: Any, target: Any) -> tuple[Tensor, Tensor]:
    prediction, target = ops.tensor(prediction), ops.tensor(target)
    if prediction.shape != target.shape:
        raise ValueError(
            f"{name} compares element by element: prediction {prediction.shape} and target {target.shape} must have "
            "the same shape; reshape or broadcast one of them yourself"
        )
    return prediction, target


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    return losses.mean() if reduction == "mean" else losses.sum()
