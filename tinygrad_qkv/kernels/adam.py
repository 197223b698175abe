"""One step of Adam or AdamW over a parameter: every array is read and written once."""

import math

import numpy as np
from numba import prange
from numba.core import types

from tinygrad_qkv.kernels.arrays import one_dtype, shapes_fit
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

STRETCH = 4096  # elements of one task


def adam_step(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    shrink: float = 1.0,
) -> None:
    """Change p, m and v in place by the gradient g, all of one shape and dtype, float32 or float64; `step` is from 1.

    p = shrink * p;  m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g^2 - v)
    p -= lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
    """
    one_dtype("adam_step", p, g, m, v)
    shapes_fit("adam_step", g=(g, p.shape), m=(m, p.shape), v=(v, p.shape))
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (p, g, m, v)]
    rate, root = lr / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step)
    if p.size:
        parallel = p.size >= PARALLEL_FROM["adam"]
        _move(*flat, shrink, rate, 1 - betas[0], 1 - betas[1], root, eps, parallel=parallel)
    for x, line in zip((p, m, v), (flat[0], *flat[2:]), strict=True):
        if not np.may_share_memory(x, line):  # x is not contiguous
            x[...] = line.reshape(x.shape)


def _types(scalar: types.Type) -> tuple[types.Type, ...]:
    return array_out(scalar, 1), array_in(scalar, 1), array_out(scalar, 1), array_out(scalar, 1), *(scalar,) * 6


@kernel(arguments=_types)
def _move(p, g, m, v, shrink, rate, part1, part2, root, eps):
    """for each stretch of elements, in parallel: the formula of `adam_step`."""
    for stretch in prange((p.shape[0] + STRETCH - 1) // STRETCH):
        a, b = stretch * STRETCH, min(stretch * STRETCH + STRETCH, p.shape[0])
        _move_stretch(p[a:b], g[a:b], m[a:b], v[a:b], shrink, rate, part1, part2, root, eps)


def _move_plain(p, g, m, v, shrink, rate, part1, part2, root, eps):
    m += part1 * (g - m)
    v += part2 * (g * g - v)
    p *= shrink
    p -= rate * (m / (np.sqrt(v) / root + eps))


@kernel(plain=_move_plain)
def _move_stretch(p, g, m, v, shrink, rate, part1, part2, root, eps):
    for i in range(p.shape[0]):
        m[i] += part1 * (g[i] - m[i])
        v[i] += part2 * (g[i] * g[i] - v[i])
        p[i] = p[i] * shrink - rate * (m[i] / (math.sqrt(v[i]) / root + eps))
