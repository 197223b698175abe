"""Labels in DOT: lines of text, each in a style, written so that any text reads as it is.

A label is HTML-like, with a font for each line, or plain where that would change the text. An HTML-like label cannot
say a backslash before N, G, E, T, H, L or another backslash: Graphviz puts the node's own name in its place, however
the backslash is written. It drops line breaks and tabs too. A plain label can say all of these.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

INK, FAINT = "#1F2328", "#57606A"  # of text and lines in all pictures
FONT = "Arial"  # graphviz-pure knows its widths; viewers without it have a font of the same widths
PLAIN_ONLY = re.compile(r"[\\\n\t]|^\s|\s$")
HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
# XML can hold no control character but tab and line break: those have a visible picture of their own in Unicode.
UNSEEN = str.maketrans({c: chr(0x2400 + c) for c in range(32) if c not in (9, 10)} | {127: "\u2421"})
NO_CHARACTER = re.compile("[\x80-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


class Style(NamedTuple):
    """The look of one line of a label: colour, size in points, and weight."""

    color: str
    size: int = 9
    bold: bool = False


class Line(NamedTuple):
    """One line of a label."""

    text: str
    style: Style


def printable(text: str) -> str:
    """`text` with what no picture can hold (control characters, lone surrogates) replaced by visible signs."""
    return NO_CHARACTER.sub("\ufffd", text.replace("\r\n", "\n").translate(UNSEEN))


def quoted(text: str) -> str:
    """`text` as a quoted DOT string whose plain label reads exactly so.

    A semicolon is written as an escape where it could end an entity: Graphviz decodes `&lt;` in plain labels too.
    """
    text = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + (text.replace(";", "\\;") if "&" in text else text) + '"'


def label_attributes(lines: Sequence[Line]) -> str:
    """The `label` attribute of a node, edge or box, and what else its text asks for."""
    texts = [printable(line.text) for line in lines]
    if any(PLAIN_ONLY.search(text) for text in texts):
        color, size, _ = lines[0].style
        inches = max(width(part, size) for text in texts for part in text.split("\n")) / 72
        text = "\n".join(texts)
        return f'label={quoted(text)} fontcolor="{color}" fontsize={size} width={inches + 0.2:.2f}'
    rows = "".join(_row(text, line.style) for text, line in zip(texts, lines, strict=True))
    return f'label=<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="1">{rows}</TABLE>>'


def _row(text: str, style: Style) -> str:
    """One line as a table row, as wide as its text where Graphviz may not know how wide that is."""
    wide = "" if text.isascii() else f' WIDTH="{width(text, style.size):.0f}"'
    inner = f'<FONT COLOR="{style.color}" POINT-SIZE="{style.size}">{text.translate(HTML)}</FONT>'
    return f"<TR><TD{wide}>{f'<B>{inner}</B>' if style.bold else inner}</TD></TR>"


def width(text: str, size: float) -> float:
    """About how wide `text` is in points: a CJK letter or an emoji is as wide as it is high, others about half."""
    return size * sum(map(ems, text))


def ems(letter: str) -> float:
    """About how wide a letter is, as a part of the size of the font."""
    if unicodedata.combining(letter):
        return 0.0
    return 1.25 if unicodedata.east_asian_width(letter) in "WF" else 0.57
