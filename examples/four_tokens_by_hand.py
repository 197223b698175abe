"""The head of lesson 05 without the engine: by a pocket calculator, by the formulas on paper, by moving each number.

Gradients stand under the name d_...: `d_W_Q` is dL/dW_Q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# What a pocket calculator finds, to four places; of the 4 x 4 matrices the row of "This" alone.
CALCULATOR = {
    "scores": [0, 0.7071, 0.7071, 0],
    "weights": [0.1651, 0.3349, 0.3349, 0.1651],
    "output": [0.3302, 0.5],
    "loss": 1.5191,
    "d_output": [-1.6698, 0.5],
    "d_weights": [0.5, 0, 0.5, -3.3395],
    "d_scores": [0.1323, 0.1009, 0.2684, -0.5016],
    "d_Q": [0.2611, -0.3547],
    "d_W_Q": [[0.2611, -0.3547], [0, 0], [0, 0]],
    "d_W_K": [[0.2833, 0], [0.2611, 0], [-0.3547, 0]],
    "d_W_V": [[-0.8349, 0.25], [-1.1183, 0.3349], [-0.2757, 0.0826]],
}


def by_the_formulas(
    *, X: np.ndarray, target: np.ndarray, W_Q: np.ndarray, W_K: np.ndarray, W_V: np.ndarray
) -> dict[str, np.ndarray]:
    """Every number, forward and backward, in NumPy: X (4, 3), target (2,), each matrix (3, 2)."""
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V
    S = Q @ K.T / np.sqrt(2)
    A = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    O = A @ V  # noqa: E741, the paper's name
    loss = ((O[0] - target) ** 2).sum() / 2

    dO = np.zeros_like(O)
    dO[0] = O[0] - target  # the loss sees the row of "This" alone
    dV = A.T @ dO  # a value is pushed by everyone who read it, in proportion
    dA = dO @ V.T  # would more of this value have helped, or hurt?
    dS = A * (dA - (A * dA).sum(axis=1, keepdims=True))  # hurt more than the present mix?
    dQ = dS @ K / np.sqrt(2)
    dK = dS.T @ Q / np.sqrt(2)
    return {
        "Q": Q, "K": K, "V": V, "scores": S, "weights": A, "output": O, "loss": loss,
        "d_output": dO, "d_V": dV, "d_weights": dA, "d_scores": dS, "d_Q": dQ, "d_K": dK,
        "d_W_Q": X.T @ dQ, "d_W_K": X.T @ dK, "d_W_V": X.T @ dV, "d_loss": np.array(1.0),
    }  # fmt: skip


def by_nudging(
    loss: Callable[..., float], matrices: Mapping[str, np.ndarray], h: float = 1e-6
) -> dict[str, np.ndarray]:
    """dL/dW of each matrix with no calculus at all: move one number a little up and down, and look at the loss."""
    slopes = {f"d_{name}": np.zeros(matrix.shape) for name, matrix in matrices.items()}
    for name, matrix in matrices.items():
        for index in np.ndindex(matrix.shape):
            nudge = np.zeros(matrix.shape)
            nudge[index] = h
            up, down = (loss(**{**matrices, name: matrix + move}) for move in (nudge, -nudge))
            slopes[f"d_{name}"][index] = (up - down) / (2 * h)
    return slopes


def worst(expected: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> float:
    """The largest difference; where one row is expected, it is the row of "This"."""
    differences = []
    for name, value in expected.items():
        row = found[name] if np.ndim(value) == found[name].ndim else found[name][0]
        differences.append(np.abs(row - value).max())
    return float(max(differences))
