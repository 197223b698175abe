"""Cross-entropy of logits against class numbers, fused with its log-softmax."""

import numpy as np


def cross_entropy(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int, label_smoothing: float
) -> tuple[np.ndarray, np.ndarray]:
    """Losses (N,) and log-sum-exp (N,) of logits (N, C) for targets (N,)."""
    with np.errstate(all="ignore"):
        top = logits.max(1)
        lse = top + np.log(np.exp(logits - top[:, None]).sum(1))
        keep = targets != ignore_index
        at = logits[np.arange(len(targets)), np.where(keep, targets, 0)]
        losses = (1 - label_smoothing) * (lse - at)
        if label_smoothing:
            losses = losses + label_smoothing * (lse[:, None] - logits).mean(1)
    return np.where(keep, losses, 0).astype(logits.dtype), lse


def cross_entropy_pullback(
    g: np.ndarray,
    logits: np.ndarray,
    targets: np.ndarray,
    logsumexp: np.ndarray,
    ignore_index: int,
    label_smoothing: float,
) -> np.ndarray:
    """Gradient (N, C) of the logits."""
    keep = targets != ignore_index
    with np.errstate(all="ignore"):
        d = np.exp(logits - logsumexp[:, None]) - label_smoothing / logits.shape[1]
        d[np.arange(len(targets)), np.where(keep, targets, 0)] -= 1 - label_smoothing
        d = d * g[:, None]
    d[~keep] = 0
    return d.astype(logits.dtype)
