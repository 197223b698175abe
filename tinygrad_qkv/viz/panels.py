"""What a map of attention shows, checked: one panel for each array of weights, and the labels of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv.viz.labels import printable

SIGNS = str.maketrans({"\n": "↵", "\t": "⇥"})


class Panel(NamedTuple):
    """Weights (T, S), where a query may look (T, S), and a title that may be empty."""

    title: str
    weights: np.ndarray
    attend: np.ndarray


def panels(weights: Any, attend: Any = None) -> list[Panel]:
    """`weights` as panels: (T, S) is one, (H, T, S) one a head, a mapping of titles to (T, S) arrays one each.

    `attend` is a mask that broadcasts against each panel: True where a query may look.
    ValueError for other shapes, for no weights at all, and for numbers that are not weights.
    """
    if isinstance(weights, Mapping):
        arrays = {str(title): _array(w) for title, w in weights.items()}
    else:
        w = _array(weights)
        arrays = {f"head {h}": part for h, part in enumerate(w)} if w.ndim == 3 else {"": w}
    if not arrays:
        raise ValueError("a map of attention needs at least one array of weights, got none")
    return [_panel(title, w, attend, i) for i, (title, w) in enumerate(arrays.items())]


def _array(weights: Any) -> np.ndarray:
    return np.asarray(weights).astype(np.float64)


def _panel(title: str, weights: np.ndarray, attend: Any, head: int) -> Panel:
    name = f"weights {title!r}" if title else "weights"
    if weights.ndim != 2 or weights.size == 0:
        raise ValueError(
            f"a map of attention needs (T, S), (H, T, S) or a mapping of titles to (T, S) arrays, got {name} of shape "
            f"{weights.shape}; choose one of a batch, e.g. weights[0]"
        )
    if np.any(weights < -1e-3) or np.any(weights > 1 + 1e-3):
        raise ValueError(
            f"attention weights lie between 0 and 1, got {name} from {np.nanmin(weights):.4g} to "
            f"{np.nanmax(weights):.4g}; these may be scores: the softmax over the keys makes weights of them"
        )
    if attend is None:
        return Panel(title, weights, np.ones(weights.shape, bool))
    mask = np.asarray(attend)
    if mask.dtype != bool:
        raise TypeError(f"attend is a boolean mask, True where a query may look; got {mask.dtype}")
    mask = mask[head if len(mask) > 1 else 0] if mask.ndim == 3 else mask
    try:
        return Panel(title, weights, np.broadcast_to(mask, weights.shape))
    except ValueError:
        raise ValueError(f"attend of shape {mask.shape} does not broadcast to {name} of {weights.shape}") from None


def token_labels(tokens: Sequence[Any] | None, count: int, word: str) -> list[str]:
    """One label a token, on one line: spaces and line breaks show as signs. Without tokens, their positions."""
    if tokens is None:
        return [str(i) for i in range(count)]
    labels = [str(token) for token in tokens]
    if len(labels) != count:
        raise ValueError(f"the weights have {count} {word}, got {len(labels)} labels for them")
    labels = [label if label.strip(" ") else label.replace(" ", "␣") for label in labels]
    return [printable(label).translate(SIGNS) for label in labels]


def shortened(label: str, letters: int) -> str:
    """`label`, cut to so many letters."""
    return label if len(label) <= letters else label[: letters - 1] + "…"
