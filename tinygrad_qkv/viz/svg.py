"""SVG as text: a picture, and the few elements that it is made of."""

from __future__ import annotations

import os
from pathlib import Path

from tinygrad_qkv.viz.labels import HTML, INK, printable


class Picture:
    """A drawing as SVG text, `picture.svg`, which a notebook shows."""

    def __init__(self, svg: str):
        self.svg = svg

    def save(self, path: str | os.PathLike) -> Path:
        """Write the SVG file, whole or not at all; a name that promises another format raises ValueError."""
        path = Path(path)
        if path.suffix.lower() not in ("", ".svg"):
            raise ValueError(f"a picture is saved as SVG, got the name {path.name!r}; write {path.stem}.svg")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {str(path.parent)!r} to save {path.name!r} in; make it first")
        part = path.with_name(path.name + ".part")
        part.write_text(self.svg, encoding="utf-8")
        return part.replace(path)

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture of {len(self.svg):,} letters of SVG; .save('picture.svg') or .svg>"


def document(width: float, height: float, title: str, description: str, body: str) -> Picture:
    """A whole SVG file, with what a screen reader says."""
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="Helvetica, Arial, sans-serif">\n'
        f"<title>{escaped(title)}</title>\n<desc>{escaped(description)}</desc>\n"
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def text(words: str, x: float, y: float, size: float, look: str = "", fill: str = INK) -> str:
    """A line of text whose baseline starts at (x, y), or ends there or has its middle there by `look`."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" {look}>{escaped(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, border: str) -> str:
    """A rectangle with a thin border."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}" stroke="{border}" stroke-width="0.5"/>'
    )


def escaped(words: str) -> str:
    """`words` as they read in SVG, whatever they hold."""
    return printable(words).translate(HTML)
