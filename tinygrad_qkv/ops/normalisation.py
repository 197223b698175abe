"""Softmax, log-softmax, layer norm and RMS norm, each one call of a kernel forward and one back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import OUTPUT, record
from tinygrad_qkv.ops.operands import Operand, floating, numeric, refuse_names, tensor
from tinygrad_qkv.tensor import Tensor


def softmax(x: Operand, axis: int = -1, **unknown: Any) -> Tensor:
    """exp(x) / sum(exp(x)) along one axis, shifted by the row's maximum; a row of -inf alone is NaN."""
    refuse_names(unknown)
    x, v = floating(x)
    axis = normalize_axis_index(axis, max(v.ndim, 1))
    formula = "dx = y * (g - sum(g * y, axis))"
    return record(kernels.softmax(v, axis), "softmax", (x,), (OUTPUT, axis), (softmax_pullback,), (formula,))


def softmax_pullback(g: Any, y: Any, axis: int) -> Any:
    """y * (g - sum(g * y)) along one axis: what softmax's operand gets. Array in, array out; Tensor in, recorded.

    An op of its own, because second derivatives of attention are mostly made of it.
    """
    if isinstance(g, np.ndarray) and isinstance(y, np.ndarray):
        return kernels.softmax_pullback(g, y, axis)
    g, y = tensor(g), tensor(y)
    rules = (
        lambda g, up, y, axis: softmax_pullback(g, y, axis),
        lambda g, up, y, axis: g * (up - _sum(up * y, axis)) - up * _sum(g * y, axis),
    )
    formulas = ("dup = y * (g - sum(g * y, axis))", "dy = g * (up - sum(up * y, axis)) - up * sum(g * y, axis)")
    dx = kernels.softmax_pullback(g._data, y._data, axis)
    return record(dx, "softmax_pullback", (g, y), (g, y, axis), rules, formulas)


def _sum(x: Any, axis: int) -> Any:
    """The sum along one axis, which stays; x may be a scalar."""
    return np.sum(x, axis=axis if x.ndim else None, keepdims=True)


def log_softmax(x: Operand, axis: int = -1, **unknown: Any) -> Tensor:
    """x - log(sum(exp(x))) along one axis, shifted by the row's maximum."""
    refuse_names(unknown)
    x, v = floating(x)
    axis = normalize_axis_index(axis, max(v.ndim, 1))
    y = kernels.log_softmax(v, axis)
    formula = "dx = g - exp(y) * sum(g, axis)"
    return record(y, "log_softmax", (x,), (OUTPUT, axis), (_log_softmax_pullback,), (formula,))


def _log_softmax_pullback(g: Any, y: Any, axis: int) -> Any:
    if isinstance(g, np.ndarray):
        return kernels.log_softmax_pullback(g, y, axis)
    return g - np.exp(y) * np.sum(g, axis=axis if y.ndim else None, keepdims=True)


def layer_norm(x: Operand, weight: Operand, bias: Operand, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis: x (..., D), weight and bias (D,).

    Biased variance in two passes, eps inside the root. Source: Ba, Kiros, Hinton 2016.
    """
    x, v = floating(x)
    x = x if v is x._data else Tensor.wrap(v)  # integers: the rules read the floats
    (weight, w), (bias, b), eps = numeric(weight), numeric(bias), float(eps)
    if v.ndim == 0 or weight.shape != v.shape[-1:] or bias.shape != v.shape[-1:]:
        raise ValueError(
            f"layer_norm of shape {v.shape} needs weight and bias of shape {v.shape[-1:]}, "
            f"got {weight.shape} and {bias.shape}"
        )
    w, b = np.asarray(w, dtype=v.dtype), np.asarray(b, dtype=v.dtype)
    y, mu, rstd = kernels.layer_norm(_rows(v), w, b, eps)
    formulas = (
        "xhat = (x - mu) * rstd; gw = g * weight; dx = rstd * (gw - mean(gw, -1) - xhat * mean(gw * xhat, -1))",
        "dweight = g * (x - mu) * rstd",
        "dbias = g",
    )
    rows = (*v.shape[:-1], 1)
    saved = (x, weight, mu.reshape(rows), rstd.reshape(rows), eps)
    return record(y.reshape(v.shape), "layer_norm", (x, weight, bias), saved, _layer_norm_pullback, formulas)


def _rows(x: np.ndarray) -> np.ndarray:
    """(..., D) as (N, D); by the product of sizes, because -1 is ambiguous where D is 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _layer_norm_pullback(g: Any, x: Any, weight: Any, mu: Any, rstd: Any, eps: float) -> tuple[Any, Any, Any]:
    """All three gradients: by the kernel on arrays, composed on Tensors (the statistics then are functions of x)."""
    if isinstance(g, np.ndarray):
        rows, w = _rows(x), np.asarray(weight, dtype=x.dtype)
        dx, dweight, dbias = kernels.layer_norm_pullback(g.reshape(rows.shape), rows, w, mu.ravel(), rstd.ravel())
        return dx.reshape(x.shape), dweight, dbias
    centred = x - np.mean(x, axis=-1, keepdims=True)
    scale = 1 / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
    xhat, gw = centred * scale, g * weight
    dx = scale * (gw - np.mean(gw, axis=-1, keepdims=True) - xhat * np.mean(gw * xhat, axis=-1, keepdims=True))
    leading = tuple(range(x.ndim - 1))
    return dx, np.sum(g * xhat, axis=leading), np.sum(g, axis=leading)


def rms_norm(x: Operand, weight: Operand, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: x (..., D), weight (D,).

    Source: Zhang, Sennrich 2019.
    """
    x, v = floating(x)
    x = x if v is x._data else Tensor.wrap(v)  # integers: the rules read the floats
    (weight, w), eps = numeric(weight), float(eps)
    if v.ndim == 0 or weight.shape != v.shape[-1:]:
        raise ValueError(f"rms_norm of shape {v.shape} needs weight of shape {v.shape[-1:]}, got {weight.shape}")
    y, rrms = kernels.rms_norm(_rows(v), np.asarray(w, dtype=v.dtype), eps)
    formulas = (
        "gw = g * weight; dx = rrms * (gw - x * rrms * mean(gw * x * rrms, -1))",
        "dweight = g * x * rrms",
    )
    saved = (x, weight, rrms.reshape(*v.shape[:-1], 1), eps)
    return record(y.reshape(v.shape), "rms_norm", (x, weight), saved, _rms_norm_pullback, formulas)


def _rms_norm_pullback(g: Any, x: Any, weight: Any, rrms: Any, eps: float) -> tuple[Any, Any]:
    """Both gradients: by the kernel on arrays, composed on Tensors (rrms then is a function of x)."""
    if isinstance(g, np.ndarray):
        rows, w = _rows(x), np.asarray(weight, dtype=x.dtype)
        dx, dweight = kernels.rms_norm_pullback(g.reshape(rows.shape), rows, w, rrms.ravel())
        return dx.reshape(x.shape), dweight
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    xhat, gw = x * scale, g * weight
    dx = scale * (gw - xhat * np.mean(gw * xhat, axis=-1, keepdims=True))
    return dx, np.sum(g * xhat, axis=tuple(range(x.ndim - 1)))
