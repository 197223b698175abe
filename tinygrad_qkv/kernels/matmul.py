"""Matrix product."""

import numpy as np


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product (..., M, N) of a (..., M, K) and b (..., K, N)."""
    if a.dtype != b.dtype or a.dtype == np.float16:
        raise TypeError(f"matmul needs two arrays of one dtype, float32 or float64, got {a.dtype} and {b.dtype}")
    return np.ascontiguousarray(np.matmul(a, b))
