"""The gradient ledger as text: a table of contributions, and one contribution with all its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tinygrad_qkv.ledger.entry import Entry

SIGNS = {"starts": "=", "accumulates into": "+=", "replaces": ":="}


def table(entries: Sequence[Entry], width: int, limit: int) -> str:
    """One line for each entry, cut to `width` characters, and of more than `limit` those in the middle left out."""
    n, tensors = len(entries), len({entry.into for entry in entries})
    title = f"{n} contribution{'s' * (n != 1)} to the gradients of {tensors} tensor{'s' * (tensors != 1)}"
    head = list(entries) if n <= limit else [entries[i] for i in range((limit + 1) // 2)]
    tail = [] if n <= limit else [entries[i] for i in range(n - limit // 2, n)]
    rows = [_row(entry) for entry in (*head, *tail)]
    header = ["#", "rule of", "formula", "", "into", "norm", "module", "line"]
    used = [i for i in range(len(header)) if i < 6 or any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in (header, *rows)) for i in used}
    # Where it is too wide the formula gives way first, then the labels, then what stands in the margin.
    for column, least in ((2, 24), (4, 20), (1, 12), (7, 0), (6, 0), (4, 12)):
        over = sum(widths.values()) + 2 * (len(widths) - 1) - width
        if over > 0 and least == 0:
            widths.pop(column, None)
        elif over > 0:
            widths[column] = max(widths[column] - over, min(least, widths[column]))
    lines = [title, "", _line(header, widths, width), *(_line(row, widths, width) for row in rows)]
    if n > limit:
        note = f"... {n - len(head) - len(tail)} more; table(limit=...) shows them, filters choose among them ..."
        lines.insert(3 + len(head), note[:width])
    return "\n".join(lines)


def _row(entry: Entry) -> list[str]:
    """The cells of one line."""
    of = entry.op if entry.result is None else f"{entry.op} {_bare(entry.result)}".strip()
    if entry.result is not None and entry.result.startswith(entry.op + "#"):
        of = _bare(entry.result)
    into = f"{_bare(entry.into)} {entry.shape}"
    formula = entry.named or "(none stated)" if entry.op != "hook" else "(a hook changed it)"
    return [
        str(entry.number),
        of,
        formula,
        SIGNS[entry.effect],
        into,
        f"{entry.norm:.3g}",
        entry.path or "",
        _file(entry.line),
    ]


def _file(line: str | None) -> str:
    """A source line without the folders of its file."""
    return "" if line is None else line.replace("\\", "/").rsplit("/", 1)[-1]


def _bare(label: str) -> str:
    """A label without its shape."""
    return label.split(" (")[0]


def _line(cells: list[str], widths: dict[int, int], width: int) -> str:
    parts = []
    for i, room in widths.items():
        cell = _cut(cells[i], room, last_step=i == 2)
        parts.append(f"{cell:>{room}}" if i in (0, 3, 5) else f"{cell:<{room}}")
    return "  ".join(parts)[:width].rstrip()


def _cut(text: str, room: int, last_step: bool) -> str:
    """`text` in `room` characters; of a formula with several steps the last one."""
    if last_step and len(text) > room and "; " in text:
        text = "...; " + text.rsplit("; ", 1)[-1]
    return text if len(text) <= room else text[: room - 3] + "..."


def entry_text(entry: Entry, digits: int = 4, full: int = 64) -> str:
    """The formula, every factor's numbers and the contribution; arrays of more than `full` elements summarised."""
    place = "".join(f", {word} {x}" for word, x in (("in module", entry.path), ("at", _file(entry.line))) if x)
    if entry.op == "hook":
        first = f"{entry.number}: a hook on {entry.into}"
    elif entry.result is None:
        first = f"{entry.number}: backward() begins"
    else:
        first = f"{entry.number}: {entry.op}, which made {entry.result}, for its operand {entry.operand}{place}"
    lines = [first, ""]
    if entry.formula is None:
        lines.append("    " + ("(a hook is code of its own)" if entry.op == "hook" else "(the op states no formula)"))
    else:
        steps = entry.formula.split("; ")
        lines += [f"    {step}" for step in steps]
        if len(steps) == 1 and entry.named != entry.formula:
            lines.append(f"    {entry.named}")
    for i, (name, factor) in enumerate(entry.factors.items()):
        tensor = "" if factor.tensor is None else f", {'the gradient of' * (i == 0)} {_bare(factor.tensor)}"
        lines += ["", *_value_lines(name, tensor.replace(",  ", ", "), factor.value, digits, full)]
    what = {"starts": "starts", "accumulates into": "is added to", "replaces": "replaces"}[entry.effect]
    about = f", {what} the gradient of {_bare(entry.into)}, norm {entry.norm:.{digits}g}"
    return "\n".join([*lines, "", *_value_lines(entry.target or "value", about, entry.value, digits, full)])


def _value_lines(name: str, about: str, value: Any, digits: int, full: int) -> list[str]:
    """A name and what it stands for."""
    if not isinstance(value, np.ndarray):
        return [f"    {name} = {_short(value)}{about}"]
    if value.ndim == 0:
        return [f"    {name} = {value.item():.{digits}g}{about}"]
    lines = [f"    {name} {value.shape} {value.dtype}{about}"]
    if value.size <= full or value.ndim <= 2:
        lines += ["        " + row for row in _numbers(value, digits, full).split("\n") if row]
    if value.size > full:
        least, most = value.min(), value.max()
        lines.append(f"        from {least:.{digits}g} to {most:.{digits}g}, mean {value.mean():.{digits}g}")
    return lines


def _numbers(value: np.ndarray, digits: int, full: int) -> str:
    """An array's numbers, with decimals where that shows them and powers of ten where it does not."""
    largest = np.max(np.abs(value), where=np.isfinite(value), initial=0)
    plain = bool(largest == 0 or 10.0 ** (1 - digits) <= largest < 1e5)
    if plain and value.dtype.kind == "f":
        value = np.round(value, digits) + 0.0  # + 0.0 makes 0 of -0
    options: Any = {"precision": digits, "suppress_small": plain, "threshold": full, "edgeitems": 2}
    return np.array2string(value, max_line_width=92, **options)


def _short(value: Any) -> str:
    """A number, a tuple, the rules of attention: those that are set, arrays by their shapes."""
    if isinstance(value, np.ndarray):
        return f"<{value.dtype} {value.shape}>"
    if hasattr(value, "_asdict"):
        default = type(value)()
        pairs = zip(value._fields, value, default, strict=True)
        said = {name: x for name, x, absent in pairs if isinstance(x, (np.ndarray, tuple)) or x != absent}
        return f"{type(value).__name__}({', '.join(f'{name}={_short(x)}' for name, x in said.items())})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))}{',' * (len(value) == 1)})"
    return repr(value)
