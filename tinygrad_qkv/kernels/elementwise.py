"""How elementwise kernels walk over arrays: as one line of elements, in stretches, one stretch a task."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import types

from tinygrad_qkv.kernels.arrays import contiguous, one_dtype, plain, shapes_fit
from tinygrad_qkv.kernels.buffers import empty
from tinygrad_qkv.kernels.compile import array_in, array_out, kernel
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

STRETCH = 4096  # elements of one task: of three float32 arrays, 48 KB


def over_elements(
    run: Callable[..., None], x: np.ndarray, *gradient: np.ndarray, rule: str = "elementwise"
) -> np.ndarray:
    """A new array of x's shape, filled by run(x, out), or by run(x, g, out) of two arrays of one shape and dtype.

    `rule` says in `threads.PARALLEL_FROM` from which size on in threads.

    `run` is a kernel, and gets lines of n elements. A g that is one number everywhere, as the gradient of a sum is,
    comes as one stretch of it, which serves every stretch: see `piece`.
    """
    name = run.__self__.function.__name__[1:]  # type: ignore[attr-defined]
    x = contiguous(x, name)
    line, out = x.ravel(), empty(x.shape, x.dtype)
    parallel = out.size >= PARALLEL_FROM[rule]
    if not gradient:
        run(line, out.ravel(), parallel=parallel)
        return out
    g = plain(gradient[0], name)
    if g.shape != out.shape:
        shapes_fit(name, g=(g, out.shape))
    g = line_of(g, name)
    if g.dtype is not line.dtype:
        one_dtype(name, line, g)
    run(line, g, out.ravel(), parallel=parallel)
    return out


def line_of(x: np.ndarray, name: str) -> np.ndarray:
    """The elements of x as a line (n,), or one stretch of them where they are one number, spread by broadcasting."""
    if x.size > STRETCH and not any(x.strides):
        x = np.full(STRETCH, x[(0,) * x.ndim])
    return contiguous(x, name).ravel()


def unary(scalar: types.Type) -> tuple[types.Type, ...]:
    """The arguments of a kernel of one array."""
    return array_in(scalar, 1), array_out(scalar, 1)


def binary(scalar: types.Type) -> tuple[types.Type, ...]:
    """The arguments of a kernel of two arrays."""
    return array_in(scalar, 1), array_in(scalar, 1), array_out(scalar, 1)


@kernel
def stretches(x: Any) -> int:
    """How many stretches x has."""
    return (x.shape[0] + STRETCH - 1) // STRETCH


@kernel
def piece(x: Any, stretch: int, n: int) -> Any:
    """The elements of a stretch of n elements in all; an array of one stretch serves all of them."""
    first, last = stretch * STRETCH, min(stretch * STRETCH + STRETCH, n)
    return x[first:last] if x.shape[0] == n else x[: last - first]
