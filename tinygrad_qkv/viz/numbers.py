"""Values and gradients in a few words."""

from __future__ import annotations

from typing import Any

import numpy as np

FULL = 6  # arrays of up to this many elements are written out


def number(value: Any, digits: int = 4) -> str:
    """A number with so many significant digits; integers and bools as they are."""
    return f"{value:.{digits}g}" if isinstance(value, (float, np.floating)) else str(value)


def value_words(array: np.ndarray) -> list[str]:
    """The elements, one line a row, if there are at most 6 of them; else mean ± standard deviation [min, max]."""
    if array.size == 0:
        return ["empty"]
    if array.size <= FULL:
        if array.ndim == 0:
            return [number(array[()])]
        return ["[" + ", ".join(map(number, row)) + "]" for row in array.reshape(-1, array.shape[-1])]
    if array.dtype.kind not in "fiu":
        return [f"{np.count_nonzero(array)} of {array.size} true"]
    exact = array.astype(np.float64)
    with np.errstate(all="ignore"):
        mean, deviation, low, high = (number(v, 3) for v in (exact.mean(), exact.std(), exact.min(), exact.max()))
    return [f"{mean} ± {deviation} [{low}, {high}]"]


def gradient_words(array: np.ndarray) -> list[str]:
    """`value_words` of a gradient, but a NaN in it and one that is zero throughout are said in words."""
    nans = int(np.count_nonzero(np.isnan(array)))
    if nans:
        return [f"nan! ({nans} of {array.size})" if array.size > 1 else "nan!"]
    return value_words(array) if np.any(array) else ["0 (exactly)"]
