"""Scatter-add: the pullback of a row lookup."""

import numpy as np


def scatter_add(g: np.ndarray, ids: np.ndarray, rows: int) -> np.ndarray:
    """out (rows, D) with out[ids[n]] += g[n], for g (N, D) and ids (N,)."""
    out = np.zeros((rows, g.shape[1]), g.dtype)
    np.add.at(out, ids, g)
    return out
