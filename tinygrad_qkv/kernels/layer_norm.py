"""Layer normalisation over the last axis, with its pullback."""

import numpy as np


def layer_norm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, mean (N,), rstd (N,)) of x (N, D), weight (D,), bias (D,)."""
    mean = x.mean(1)
    centred = x - mean[:, None]
    rstd = (1 / np.sqrt((centred * centred).mean(1) + eps)).astype(x.dtype)
    return centred * rstd[:, None] * weight + bias, mean, rstd


def layer_norm_pullback(
    g: np.ndarray, x: np.ndarray, weight: np.ndarray, mean: np.ndarray, rstd: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx (N, D), dweight (D,), dbias (D,))."""
    xhat = (x - mean[:, None]) * rstd[:, None]
    gw = g * weight
    dx = rstd[:, None] * (gw - gw.mean(1, keepdims=True) - xhat * (gw * xhat).mean(1, keepdims=True))
    return dx, (g * xhat).sum(0), g.sum(0)
