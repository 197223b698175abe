"""The table of ops: for each public op its call, NumPy's answer, and sample inputs; `test_ops_table.py` runs every row.

The rows stand in `op_rows_<family>.py`. All sizes of a row are different primes, so that a swapped axis cannot go
unnoticed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv import ops

# Public names of `ops` that are no ops: how operands are taken, how writes in place are made, NumPy's own functions.
NOT_OPS = {"is_numeric", "tensor", "write", "protocol"}

# Ops that are recorded but not offered: `affine` and the heads in layers; attention on its fused path, and the masked
# products where a number behind its mask is not finite; the rule of softmax under create_graph.
PRIVATE = {
    *("affine", "split_heads", "merge_heads", "attention", "masked_scores", "masked_mix", "softmax_pullback"),
}

random = np.random.default_rng(20)


def normal(*shape: int) -> np.ndarray:
    return random.normal(size=shape)


def positive(*shape: int) -> np.ndarray:
    return np.asarray(0.3 + np.abs(random.normal(size=shape)))


def inside(*shape: int) -> np.ndarray:
    """Numbers between -1 and 1."""
    return random.uniform(-0.9, 0.9, shape)


def ids(high: int, *shape: int) -> np.ndarray:
    """Integers from 0 up to, without, `high`."""
    return random.integers(0, high, shape)


def is_leaf(x: Any) -> bool:
    """Whether a gradient is asked for: float arrays, and not integers, masks and Python numbers."""
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


class Row(NamedTuple):
    """One op on one set of inputs."""

    op: str
    inputs: tuple[np.ndarray, ...]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    note: str = ""
    gradient: bool = True

    def __str__(self) -> str:
        return f"{self.op} {self.note}".strip()


def row(
    op: str,
    inputs: tuple,
    ref: Callable[..., Any],
    *args: Any,
    call: Callable[..., Any] | None = None,
    note: str | None = None,
    gradient: bool = True,
    **options: Any,
) -> Row:
    """A row in which both sides get the same further arguments; `call` is the op itself unless it says otherwise."""
    function = call or getattr(ops, op)
    if note is None:
        note = " ".join([*(f"{a}".replace("\n", "") for a in args), *(f"{k}={v}" for k, v in options.items())])
    return Row(
        op,
        tuple(inputs),
        lambda *xs: function(*xs, *args, **options),
        lambda *xs: ref(*xs, *args, **options),
        note,
        gradient,
    )
