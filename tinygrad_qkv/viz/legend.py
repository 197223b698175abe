"""The legend and the notes below a drawing."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad_qkv.viz.labels import HTML


def legend(entries: Sequence[tuple[str, str, str]], notes: Sequence[str], ink: str) -> str:
    """An HTML-like label: a chip (fill, border, text) for each entry, and one line for each note.

    NOTE: the table is as wide as the widest note, and Graphviz spreads its cells; a swatch beside its text would drift
    away from it, so the text stands inside.
    """
    cells = "".join(
        f'<TD BORDER="1" COLOR="{border}" BGCOLOR="{fill}" CELLPADDING="3">{_text(text, ink)}</TD>'
        for fill, border, text in entries
    )
    rows = f'<TR><TD BORDER="0"><TABLE BORDER="0" CELLSPACING="4"><TR>{cells}</TR></TABLE></TD></TR>' if cells else ""
    rows += "".join(f'<TR><TD BORDER="0">{_text(note, ink)}</TD></TR>' for note in notes)
    return f'<<TABLE BORDER="0" CELLSPACING="2">{rows}</TABLE>>'


def _text(text: str, ink: str) -> str:
    return f'<FONT COLOR="{ink}" POINT-SIZE="9">{text.translate(HTML)}</FONT>'
