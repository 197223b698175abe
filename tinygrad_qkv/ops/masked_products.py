"""The two products of attention with the mask inside: what stands behind it, NaN and inf too, takes no part.

A mask after an ordinary product keeps the value clean but not the gradient, where 0 * NaN is NaN. The two are each
other's derivatives, so every order of them is clean. They are no public ops: attention alone uses them, when one of
its numbers is not finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.autograd import record
from tinygrad_qkv.ops.operands import Operand, tensor
from tinygrad_qkv.tensor import Tensor


def masked_scores(q: Operand, k: Operand, keep: np.ndarray) -> Tensor:
    """where(keep, q @ k.mT, 0): q (..., T, d), k (..., S, d), boolean keep (..., T, S) -> (..., T, S)."""
    q, k = tensor(q), tensor(k)
    rules = (
        lambda g, q, k, keep: _mix(g, k, keep),
        lambda g, q, k, keep: _mix(np.swapaxes(g, -1, -2), q, np.swapaxes(keep, -1, -2)),
    )
    formulas = ("dq = mix(g, k, keep)", "dk = mix(g.T, q, keep.T)")
    return record(_scores(q._data, k._data, keep), "masked_scores", (q, k), (q, k, keep), rules, formulas)


def masked_mix(weights: Operand, x: Operand, keep: np.ndarray) -> Tensor:
    """sum over S of where(keep, weights * x, 0): weights, keep (..., T, S), x (..., S, d) -> (..., T, d)."""
    weights, x = tensor(weights), tensor(x)
    rules = (
        lambda g, weights, x, keep: _scores(g, x, keep),
        lambda g, weights, x, keep: _mix(np.swapaxes(weights, -1, -2), g, np.swapaxes(keep, -1, -2)),
    )
    formulas = ("dweights = where(keep, g @ x.T, 0)", "dx = mix(weights.T, g, keep.T)")
    return record(_mix(weights._data, x._data, keep), "masked_mix", (weights, x), (weights, x, keep), rules, formulas)


def _scores(q: Any, k: Any, keep: np.ndarray) -> Any:
    """`masked_scores` of arrays, or of Tensors, recorded."""
    if isinstance(q, Tensor) or isinstance(k, Tensor):
        return masked_scores(q, k, keep)
    return np.where(keep, kernels.matmul(q, np.swapaxes(k, -1, -2)), 0)


def _mix(weights: Any, x: Any, keep: np.ndarray) -> Any:
    """`masked_mix` of arrays, or of Tensors, recorded.

    Rows of x that are finite go through one matmul. The others go one by one, each added only where it is kept.
    """
    if isinstance(weights, Tensor) or isinstance(x, Tensor):
        return masked_mix(weights, x, keep)
    weights = np.where(keep, weights, 0)
    finite = np.isfinite(x).all(-1)  # (..., S)
    if finite.all():
        return kernels.matmul(weights, x)
    y = kernels.matmul(weights, np.where(finite[..., None], x, 0))
    spoiled = keep & ~finite[..., None, :]  # (..., T, S)
    for j in np.flatnonzero(spoiled.any(tuple(range(spoiled.ndim - 1)))):
        y += np.where(spoiled[..., j, None], weights[..., j, None] * x[..., None, j, :], 0)
    return y
