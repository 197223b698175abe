"""Cross-entropy of logits against class numbers, fused with its log-softmax."""

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous, integers, one_dtype, shapes_fit, two_axes
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.passes import row_pass
from tinygrad_qkv.kernels.rows import row_max, row_sum_above, row_sum_exp
from tinygrad_qkv.kernels.scalars import log
from tinygrad_qkv.kernels.threads import PARALLEL_FROM


def cross_entropy(
    logits: np.ndarray, targets: np.ndarray, ignore_index: int, label_smoothing: float
) -> tuple[np.ndarray, np.ndarray]:
    """loss[n] = (1 - s) * (lse[n] - x[n, t]) + s * mean over c of (lse[n] - x[n, c]), lse = log(sum over c of exp(x)).

    x = logits (N, C), float32 or float64; t = targets[n] (N,), integers; IndexError unless each is ignore_index or in
    [0, C); s = label_smoothing. Gives losses (N,), 0 where ignored, and lse in two parts (2, N): the maximum
    and the logarithm of the sum of exp(x - maximum). Without smoothing a logit of -inf in another class leaves the loss
    finite. Logits that share an offset of any size cost no precision: the maximum is taken off before anything is
    rounded, and no single number has to hold both parts.
    """
    x = contiguous(logits, "cross_entropy")
    targets = _checked("cross_entropy", x, targets, ignore_index)
    losses, logsumexp = np.empty(len(x), x.dtype), np.empty((2, len(x)), x.dtype)
    parallel = x.size >= PARALLEL_FROM["cross_entropy"]
    if len(x):
        _losses(x, targets, ignore_index, 1 - label_smoothing, label_smoothing, losses, logsumexp, parallel=parallel)
    return losses, logsumexp


def cross_entropy_pullback(
    g: np.ndarray,
    logits: np.ndarray,
    targets: np.ndarray,
    logsumexp: np.ndarray,
    ignore_index: int,
    label_smoothing: float,
) -> np.ndarray:
    """dx[n, c] = g[n] * (exp(x[n, c] - lse[n]) - (1 - s) * (c == t) - s / C); exactly 0 in ignored rows.

    g (N,) is the gradient of the losses; the rest, with lse in its two parts (2, N), as given to, and by,
    `cross_entropy`. Gives dx (N, C). An ignored row is 0 whatever stands in it.
    """
    name = "cross_entropy_pullback"
    x, g, logsumexp = contiguous(logits, name), contiguous(g, name), contiguous(logsumexp, name)
    targets = _checked(name, x, targets, ignore_index)
    one_dtype(name, x, g, logsumexp)
    shapes_fit(name, g=(g, (len(x),)), logsumexp=(logsumexp, (2, len(x))))
    dx = empty(x.shape, x.dtype)
    if x.size:
        spread = label_smoothing / x.shape[1]
        parallel = x.size >= PARALLEL_FROM["cross_entropy"]
        _logit_gradients(x, targets, logsumexp, g, ignore_index, 1 - label_smoothing, spread, dx, parallel=parallel)
    return dx


def _checked(name: str, x: np.ndarray, targets: np.ndarray, ignore_index: int) -> np.ndarray:
    two_axes(name, "logits", x, "(N, C)")
    targets = integers(targets, name, "targets")
    shapes_fit(name, targets=(targets, (len(x),)))
    # As unsigned numbers the negative ones are large: one pass is enough where nothing is ignored.
    if targets.size and targets.view(np.uint64).max() >= x.shape[1]:
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= x.shape[1]))
        if wrong.any():
            allowed = f"0 to {x.shape[1] - 1}, or ignore_index={ignore_index}"
            raise IndexError(f"{name}: targets must be {allowed}, got {targets[wrong][0]}")
    return targets


def _losses_types(scalar: types.Type) -> tuple[types.Type, ...]:
    rows, classes, column = array_in(scalar, 2), array_in(types.int64, 1), array_out(scalar, 1)
    return rows, classes, types.int64, scalar, scalar, column, array_out(scalar, 2)


@kernel(arguments=_losses_types)
def _losses(x, targets, ignore_index, sure, smoothing, losses, logsumexp):
    """One pass for the row's maximum, one for its sum of exponentials, both while the row is in the cache."""
    for n in prange(x.shape[0]):
        top = row_max(x[n])
        above = log(row_sum_exp(x[n], top))
        logsumexp[0, n], logsumexp[1, n] = top, above
        losses[n] = 0
        if targets[n] != ignore_index:
            losses[n] = sure * (above - (x[n, targets[n]] - top))
            if smoothing != 0:  # else 0 * inf, from a logit of -inf, would be NaN
                losses[n] += smoothing * (above - row_sum_above(x[n], top) / x.dtype.type(x.shape[1]))


def _gradient_types(scalar: types.Type) -> tuple[types.Type, ...]:
    rows, classes, column = array_in(scalar, 2), array_in(types.int64, 1), array_in(scalar, 1)
    return rows, classes, array_in(scalar, 2), column, types.int64, scalar, scalar, array_out(scalar, 2)


@kernel(arguments=_gradient_types)
def _logit_gradients(x, targets, logsumexp, g, ignore_index, sure, spread, dx):
    """Each row is read and written once."""
    for n in prange(x.shape[0]):
        if targets[n] == ignore_index:
            dx[n] = 0
        else:
            _share_gradients(x[n], logsumexp[0, n], logsumexp[1, n], spread, g[n], dx[n])
            dx[n, targets[n]] -= g[n] * sure


@row_pass(into=1)
def _share_gradients(x, top, above, spread, g):
    return (np.exp((x - top) - above) - spread) * g
