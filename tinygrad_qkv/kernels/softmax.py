"""Softmax and log-softmax over one axis, with their pullbacks."""

import numpy as np


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """exp(x) / sum(exp(x)) over `axis`."""
    if x.size == 0 or x.ndim == 0:
        return np.ones_like(x)
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)


def softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """y * (g - sum(g * y)) over `axis`."""
    if y.ndim == 0:
        return np.zeros_like(y)
    return y * (g - (g * y).sum(axis, keepdims=True))


def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """x - log(sum(exp(x))) over `axis`."""
    if x.size == 0 or x.ndim == 0:
        return np.zeros_like(x)
    with np.errstate(all="ignore"):
        shifted = x - x.max(axis, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def log_softmax_pullback(g: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    """g - exp(y) * sum(g) over `axis`."""
    if y.ndim == 0:
        return np.zeros_like(y)
    return g - np.exp(y) * g.sum(axis, keepdims=True)
