"""A heat map of attention as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinygrad_qkv.viz import svg
from tinygrad_qkv.viz.labels import FAINT, INK, width
from tinygrad_qkv.viz.panels import Panel, panels, shortened, token_labels

LIGHT, DARK = (255, 255, 255), (11, 60, 111)  # weight 0 and weight 1; the colours between are linear in the weight
GRID = "#C8D1DA"
NUMBERS = 8  # up to 8 x 8, each cell has its number
LARGEST = 128  # tokens a side
LETTERS = 24  # of a label; the tooltip has all of them
SMALL, LARGE = 11, 14  # points
MARGIN, GAP, FOOT = 16, 28, 44
PAGE = 1400  # panels that do not fit into this width go below
SLANT = 0.71  # how far a label at 45 degrees goes across and up


def attention_map(
    weights: Any,
    queries: Sequence[Any] | None = None,
    keys: Sequence[Any] | None = None,
    *,
    title: str | None = None,
    attend: Any = None,
) -> svg.Picture:
    """A heat map of attention weights: a row a query, a column a key, darker where more weight lies.

    `weights` is (T, S), (H, T, S) or a mapping of titles to (T, S) arrays, which stand side by side, from any
    framework; `queries` and `keys` are the labels of the rows and the columns. The colours are linear in the weight
    and always run from 0 to 1, so that two maps can be compared. Up to 8 x 8 the cells have numbers. `attend` is
    True where a query may look: other cells are empty with a dot. A NaN is a cross.
    """
    shown = panels(weights, attend)
    x, top = float(MARGIN), MARGIN + (LARGE + 12.0 if title else 0)
    right, bottom, body = x + max(width(title or "", LARGE), 200), top, []
    for panel in shown:
        rows, columns = _labels(panel, queries, keys)
        drawing, wide, high = _panel(panel, rows, columns)
        if x > MARGIN and x + wide > PAGE:
            x, top = float(MARGIN), bottom + GAP
        body.append(f'<g transform="translate({x:.1f} {top:.1f})">{drawing}</g>')
        right, bottom = max(right, x + wide), max(bottom, top + high)
        x += wide + GAP
    if title:
        body.insert(0, svg.text(title, MARGIN, MARGIN + LARGE, LARGE, 'font-weight="bold"'))
    body.append(_scale(MARGIN, bottom + 16))
    what = ", ".join(f"{panel.title} {panel.weights.shape}".strip() for panel in shown)
    description = f"Heat map of attention weights from 0 to 1, a row for each query and a column for each key: {what}"
    return svg.document(right + MARGIN, bottom + FOOT, title or "Attention", description, "\n".join(body))


def _labels(panel: Panel, queries: Sequence[Any] | None, keys: Sequence[Any] | None) -> tuple[list[str], list[str]]:
    """The labels of a panel's rows and columns, if it is not too large to be drawn."""
    if max(panel.weights.shape) > LARGEST:
        raise ValueError(
            f"a map shows at most {LARGEST} x {LARGEST} weights, got {panel.weights.shape}; "
            "show a part of them, e.g. weights[:64, :64]"
        )
    height, breadth = panel.weights.shape
    return token_labels(queries, height, "queries"), token_labels(keys, breadth, "keys")


def _panel(panel: Panel, rows: list[str], columns: list[str]) -> tuple[str, float, float]:
    """One heat map with its upper left corner at the origin; its width and height."""
    tokens = max(panel.weights.shape)
    size = 42.0 if tokens <= NUMBERS else max(8.0, min(26.0, 640 / tokens))
    font = max(6.0, min(float(SMALL), 0.75 * size))
    left = 8 + max(width(shortened(label, LETTERS), font) for label in [*rows, "query"])
    heads, high, overhang = _heads(columns, size, font)
    top = high + (SMALL + 10 if panel.title else 0)
    parts = [svg.text(panel.title, left, SMALL, SMALL + 1, 'font-weight="bold"')] if panel.title else []
    parts.append(f'<g transform="translate({left:.1f} {top:.1f})">{heads}</g>')
    parts.append(svg.text("query", left - 6, top - 6, font, 'text-anchor="end" font-style="italic"', FAINT))
    for i, label in enumerate(rows):
        y = top + i * size
        parts.append(_label(label, left - 6, y + size / 2 + 0.35 * font, font, 'text-anchor="end"'))
        parts += [_cell(panel, i, j, left + j * size, y, size, f"{label} → {key}") for j, key in enumerate(columns)]
    right = left + len(columns) * size + overhang
    return "\n".join(parts), max(right, left + width(panel.title, SMALL + 1)), top + len(rows) * size


def _heads(columns: list[str], size: float, font: float) -> tuple[str, float, float]:
    """The labels of the keys above the origin, slanted where a cell is too narrow; how far they go up and out."""
    wide = [width(shortened(label, LETTERS), font) for label in columns]
    level = max(wide) <= size - 4
    parts = []
    for j, label in enumerate(columns):
        x = (j + 0.5) * size
        look = 'text-anchor="middle"' if level else f'transform="rotate(-45 {x:.1f} -6)"'
        parts.append(_label(label, x, -6, font, look))
    if level:
        return "".join(parts), font + 8, 0
    beyond = max(SLANT * w - (len(columns) - j - 0.5) * size for j, w in enumerate(wide))
    return "".join(parts), SLANT * max(wide) + 16, max(beyond, 0)


def _label(label: str, x: float, y: float, font: float, look: str) -> str:
    """The label of a token, cut if it is long, with all of it in the tooltip."""
    short = svg.text(shortened(label, LETTERS), x, y, font, look)
    return f"<g><title>{svg.escaped(label)}</title>{short}</g>" if len(label) > LETTERS else short


def _cell(panel: Panel, i: int, j: int, x: float, y: float, size: float, pair: str) -> str:
    """One weight: its colour, its number where there is room, and pair and weight in the tooltip."""
    weight, numbers = panel.weights[i, j], max(panel.weights.shape) <= NUMBERS
    fill, mark, said = "white", "", "masked"
    if not panel.attend[i, j]:
        radius = min(1.5, size / 6)
        mark = f'<circle cx="{x + size / 2:.1f}" cy="{y + size / 2:.1f}" r="{radius:.1f}" fill="{FAINT}"/>'
    elif np.isnan(weight):
        cross = f"M{x:.1f} {y:.1f}l{size:.1f} {size:.1f}m0 -{size:.1f}l-{size:.1f} {size:.1f}"
        mark, said = f'<path d="{cross}" stroke="{INK}"/>', "nan"
    else:
        fill, said = _color(weight), f"{weight:.4g}"
        if numbers:
            ink = "white" if weight > 0.5 else INK
            mark = svg.text(f"{weight:.2f}", x + size / 2, y + size / 2 + 4, SMALL, 'text-anchor="middle"', ink)
    return f"<g><title>{svg.escaped(pair)}: {said}</title>{svg.box(x, y, size, size, fill, GRID)}{mark}</g>"


def _color(weight: float) -> str:
    red, green, blue = (round(a + (b - a) * min(max(weight, 0), 1)) for a, b in zip(LIGHT, DARK, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _scale(x: float, y: float) -> str:
    """The colours from 0 to 1."""
    steps = "".join(svg.box(x + 16 + 10 * i, y, 10, 10, _color(i / 10), GRID) for i in range(11))
    zero, one = (
        svg.text("0", x, y + 9, SMALL, fill=FAINT),
        svg.text("1 weight", x + 132, y + 9, SMALL, fill=FAINT),
    )
    return zero + steps + one
