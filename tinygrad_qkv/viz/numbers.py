"""Values and gradients in a few words."""

from __future__ import annotations

from typing import Any

import numpy as np


def number(value: Any, digits: int = 4) -> str:
    """A number with so many significant digits; integers and bools as they are."""
    return f"{value:.{digits}g}" if isinstance(value, (float, np.floating)) else str(value)


def value_words(array: np.ndarray, full: int) -> list[str]:
    """The elements, one line a row, if there are at most `full` of them; else mean ± standard deviation [min, max].

    NaN and infinite elements of a larger array are counted, and the figures are of the others.
    """
    if array.size == 0:
        return ["empty"]
    if array.ndim == 0:
        return [number(array[()])]
    if array.size <= full:
        return ["[" + ", ".join(map(number, row)) + "]" for row in array.reshape(-1, array.shape[-1])]
    finite = array[np.isfinite(array)]
    counts = [(np.isnan(array), "nan!"), (array == np.inf, "inf"), (array == -np.inf, "-inf")]
    lines = [f"{word} ({np.count_nonzero(found)} of {array.size})" for found, word in counts if found.any()]
    return ([_figures(finite)] if finite.size else []) + lines


def _figures(array: np.ndarray) -> str:
    low, high = number(array.min(), 3), number(array.max(), 3)
    if array.min() == array.max():
        return f"all {low}"
    exact = array.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return f"{number(exact.mean(), 3)} ± {number(exact.std(), 3)} [{low}, {high}]"


def gradient_words(array: np.ndarray, full: int) -> list[str]:
    """`value_words` of a gradient, but one that is zero throughout, and NaN in it, are said in words."""
    nans = int(np.count_nonzero(np.isnan(array)))
    if nans:
        return [f"nan! ({nans} of {array.size})" if array.size > 1 else "nan!"]
    return value_words(array, full) if np.any(array) or not array.size else ["0 (exactly)"]
