"""A heat map of attention for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinygrad_qkv.viz.labels import ems, printable
from tinygrad_qkv.viz.panels import Panel, panels, token_labels

BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#%@"  # from weight 0 to weight 1, linear
NUMBERS = 8  # up to 8 x 8, each cell has its number beside the block
LABEL = 16  # letters of a query's label


def attention_text(
    weights: Any,
    queries: Sequence[Any] | None = None,
    keys: Sequence[Any] | None = None,
    *,
    title: str | None = None,
    attend: Any = None,
    ascii: bool = False,
    width: int = 80,
) -> str:
    """A heat map of attention weights as text: a block a cell, and the weight in percent up to 8 x 8.

    `weights` is (T, S), (H, T, S) or a mapping of titles to (T, S) arrays, from any framework; `queries` and `keys`
    are the labels of the rows and the columns. `attend` is True where a query may look: other cells show a dot.
    `ascii` uses ASCII letters alone. Lines are `width` letters long at most; columns that do not fit are counted.
    """
    ramp, letters = (ASCII, _ascii) if ascii else (BLOCKS, printable)
    parts = [] if title is None else [letters(title)]
    shown = panels(weights, attend)
    for panel in shown:
        rows = token_labels(queries, panel.weights.shape[0], "queries")
        columns = token_labels(keys, panel.weights.shape[1], "keys")
        lines = [letters(panel.title)] if panel.title else []
        lines += _table(panel, list(map(letters, rows)), list(map(letters, columns)), ramp, width)
        parts.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join([*parts, _scale(ramp, shown)])


def _ascii(text: str) -> str:
    return printable(text).encode("ascii", "backslashreplace").decode()


def _table(panel: Panel, rows: list[str], columns: list[str], ramp: str, width: int) -> list[str]:
    """The lines of one panel: the labels of the keys, and a line a query."""
    numbers = max(panel.weights.shape) <= NUMBERS
    margin = min(LABEL, max(columns_of(label) for label in [*rows, "query"]))
    narrowest, widest = (7, LABEL) if numbers else (3, 8)
    wanted = 1 + max(columns_of(label) for label in columns)
    cell = max(narrowest, min(widest, wanted, (width - margin) // len(columns)))
    shown = max(1, min(len(columns), (width - margin) // cell))
    heads = [_fitted(label, cell - 1, ramp, right=True) for label in columns[:shown]]
    lines = [_fitted("query", margin, ramp) + "".join(heads)]
    for label, w, attend in zip(rows, panel.weights, panel.attend, strict=True):
        cells = [_cell(*pair, ramp, numbers).rjust(cell) for pair in zip(w[:shown], attend[:shown], strict=True)]
        lines.append(_fitted(label, margin, ramp) + "".join(cells))
    if shown < len(columns):
        lines.append(f"({len(columns) - shown} more keys do not fit into {width} letters)")
    return lines


def _cell(weight: float, attend: bool, ramp: str, numbers: bool) -> str:
    if not attend:
        glyph, percent = _masked(ramp), ""
    elif np.isnan(weight):
        glyph, percent = "?", "nan"
    else:
        glyph, percent = ramp[round(min(max(weight, 0), 1) * (len(ramp) - 1))], f"{100 * weight:.0f}"
    return f"{glyph} {percent:>3}" if numbers else glyph * 2


def _masked(ramp: str) -> str:
    return "·" if ramp is BLOCKS else "'"


def _scale(ramp: str, shown: list[Panel]) -> str:
    """What the blocks mean."""
    words = [f"weight 0 [{ramp}] 1"]
    if any(max(panel.weights.shape) <= NUMBERS for panel in shown):
        words.append("numbers are percent")
    if not all(panel.attend.all() for panel in shown):
        words.append(f"{_masked(ramp)} is masked")
    return ", ".join(words)


def _fitted(label: str, letters: int, ramp: str, right: bool = False) -> str:
    """`label` cut or padded to exactly so many columns of a terminal, after a space if it is set to the right."""
    if columns_of(label) > letters:
        sign = "" if letters < 4 else "…" if ramp is BLOCKS else "~"
        while columns_of(label) > letters - len(sign):
            label = label[:-1]
        label += sign
    padding = " " * (letters - columns_of(label))
    return f" {padding}{label}" if right else label + padding


def columns_of(text: str) -> int:
    """How many columns of a terminal `text` takes: CJK letters and emoji take two, combining marks none."""
    return sum(2 if ems(letter) > 1 else ems(letter) > 0 for letter in text)
