"""The legend and the notes below a drawing."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad_qkv.viz.labels import HTML


def legend(entries: Sequence[tuple[str, str, str]], notes: Sequence[str], ink: str) -> str:
    """An HTML-like label: a swatch (fill, border) and a text for each entry, and one line for each note."""
    cells = "".join(
        f'<TD BORDER="1" COLOR="{border}" BGCOLOR="{fill}" FIXEDSIZE="TRUE" WIDTH="14" HEIGHT="10"></TD>'
        f'<TD BORDER="0">{_text(text, ink)}</TD>'
        for fill, border, text in entries
    )
    rows = f'<TR><TD BORDER="0"><TABLE BORDER="0" CELLSPACING="3"><TR>{cells}</TR></TABLE></TD></TR>' if cells else ""
    rows += "".join(f'<TR><TD BORDER="0">{_text(note, ink)}</TD></TR>' for note in notes)
    return f'<<TABLE BORDER="0" CELLSPACING="2">{rows}</TABLE>>'


def _text(text: str, ink: str) -> str:
    return f'<FONT COLOR="{ink}" POINT-SIZE="9">{text.translate(HTML)}</FONT>'
