"""What can be measured of a head that searches the phone book of lesson 08: pure functions, arrays in, numbers out."""

from __future__ import annotations

import math

import numpy as np
from phonebook_data import LETTERS, NAME, PLACES


def right(answers: np.ndarray, phones: np.ndarray) -> float:
    """The share of numbers (..., 6) with all six digits right."""
    return float((answers == phones).all(axis=-1).mean())


def found(weights: np.ndarray) -> float:
    """The share of calls whose largest weight is on the right entry; caller i wants entry i.  weights (..., T, S)."""
    return float((weights.argmax(axis=-1) == np.arange(weights.shape[-2])).mean())


def name_share(book: np.ndarray, W: np.ndarray) -> float:
    """How much of the variance of book @ W comes from the names; the rest comes from the numbers.

    Exact, because names and numbers are drawn independently: their variances add up.  book (n, 320), W (320, d).
    """
    name = np.var(book[:, :NAME] @ W[:NAME], axis=0).sum()
    phone = np.var(book[:, NAME:] @ W[NAME:], axis=0).sum()
    return float(name / (name + phone))


def same_letter_bonus(W_Q: np.ndarray, W_K: np.ndarray) -> np.ndarray:
    """(10, 10): what a score gains if place p of the question and place q of the entry hold the same letter.

    W_Q W_K^T is all that scores depend on; its block for two places is a table of letter against letter.
    """
    circuit = W_Q[:NAME] @ W_K[:NAME].T / math.sqrt(W_Q.shape[1])
    circuit = circuit.reshape(PLACES, LETTERS, PLACES, LETTERS)
    same = np.einsum("pcqc->pq", circuit) / LETTERS
    other = (circuit.sum(axis=(1, 3)) - LETTERS * same) / (LETTERS * (LETTERS - 1))
    return same - other


def mean_at_distance(bonus: np.ndarray, places: int) -> float:
    """The mean of the two diagonals that lie so many places off the main one."""
    return float(np.concatenate([np.diagonal(bonus, places), np.diagonal(bonus, -places)]).mean())
