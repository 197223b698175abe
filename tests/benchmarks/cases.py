"""What a benchmark case is: one piece of work, and for each side a function that makes the call to be timed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Given the case's sizes, a side prepares its inputs and returns the function to be timed, which returns its results.
Side = Callable[..., Callable[[], Sequence[Any]]]
PEERS = ("torch", "jax", "numpy", "mygrad", "tinygrad")


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    row: str  # P1 to P16
    name: str
    sides: dict[str, Side]
    sizes: dict[str, Any]
    target: dict[str, float] = field(default_factory=dict)  # peer, or "best" of them -> its time / ours, at least
    quick: bool = False  # part of --quick
    flops: float = 0.0  # floating-point operations of a call, for its rate
    tolerance: float = 1e-4  # of the results, relative to their largest element
    control: bool = False  # is ours timed alone too, to see whether the other sides' processes slow it?


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 from a normal distribution: the same for every side."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def calls(
    function: Callable[..., Any], leaves: Sequence[Any], g: Any, no_grad: Callable[..., Any], backward: bool
) -> Callable[[], Sequence[Any]]:
    """What is timed of a function of tensors, torch's or ours: forward alone, or with the gradients of y from g."""

    def forward():
        with no_grad():
            return [function(*leaves)]

    def both():
        for leaf in leaves:
            leaf.grad = None
        y = function(*leaves)
        y.backward(g)
        return [y, *(leaf.grad for leaf in leaves)]

    return both if backward else forward


def geometric(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return float(np.exp(np.mean(np.log(ratios))))
