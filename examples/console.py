"""What the lessons print with: headings, paragraphs, matrices side by side, a progress bar, checks that fail loudly."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

WIDTH = 78  # fits a terminal of 80 columns


def terminal() -> Any:
    """rich's Console if the output goes to a terminal and rich is installed, else None."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(highlight=False, markup=False)


def heading(text: str) -> None:
    """A line that opens a part of the story, bold on a terminal."""
    line = f"---- {text} {'-' * (WIDTH - len(text) - 6)}"
    screen = terminal()
    print(line) if screen is None else screen.print(line, style="bold")
    print()


def speaks_unicode() -> bool:
    """Whether what is printed may hold block characters; some consoles and pipes on Windows take none."""
    return "utf" in (sys.stdout.encoding or "").lower()


def say(text: str) -> None:
    """A paragraph, wrapped, with an empty line after it."""
    print(textwrap.fill(" ".join(text.split()), WIDTH) + "\n")


def matrices(rows: list[str], blocks: dict[str, np.ndarray], columns: list[str] | None = None) -> None:
    """Matrices with the same rows side by side, each under its title (and under names for its columns)."""
    margin = max(map(len, rows)) + 4
    above = 1 if columns is None else 2
    lines = [" " * margin] * above + [f"  {row:<{margin - 2}}" for row in rows]
    for title, values in blocks.items():
        numbers = np.round(np.atleast_2d(values), 4) + 0.0  # + 0.0 makes 0 of -0
        names = [] if columns is None else ["".join(f"{name:>9}" for name in columns)]
        block = [f"   {title}", *names, *("".join(f"{_short(x):>9}" for x in row) for row in numbers)]
        width = max(map(len, block)) + 1
        lines = [f"{line}{part:<{width}}" for line, part in zip(lines, block, strict=True)]
    print("\n".join(line.rstrip() for line in lines) + "\n")


def _short(x: float) -> str:
    """A whole number without decimals, any other with four."""
    return f"{x:.0f}" if float(x).is_integer() else f"{x:.4f}"


def table(header: list[str], rows: Sequence[Sequence[Any]]) -> None:
    """Lines of aligned columns; a column of numbers is set to the right, and floats have three decimals."""
    lines = [header, *([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in rows)]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1] in "0123456789-" for cell in column[1:]) for column in columns]
    for row in lines:
        cells = [f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(row, widths, right, strict=True)]
        print(("  " + "   ".join(cells)).rstrip())
    print()


def grid(values: np.ndarray, smallest: float = 0.15) -> None:
    """A square of numbers with one decimal; a dot for what is small."""
    print("       " + "".join(f"{column:>5}" for column in range(1, len(values) + 1)))
    for row, numbers in enumerate(values, start=1):
        print(f"  {row:>5}" + "".join(f"{x:>5.1f}" if abs(x) >= smallest else "    ." for x in numbers))
    print()


@contextmanager
def progress(steps: int) -> Iterator[Callable[..., None]]:
    """Gives `report(step, line="")`, which prints the line; on a terminal a bar moves below the lines."""
    screen = terminal()
    if screen is None:
        yield lambda step, line="": print(line, flush=True) if line else None
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = "  step", MofNCompleteColumn(), BarColumn(30), TimeRemainingColumn()
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task("", total=steps)

            def report(step: int, line: str = "") -> None:
                bar.update(task, completed=step)
                if line:
                    screen.print(line)

            yield report
    print()


class Measure(NamedTuple):
    """A number that a lesson promises, and the bound that it must keep."""

    name: str
    value: float
    relation: str  # ">=" or "<="
    bound: float

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.relation == ">=" else self.value <= self.bound


def check(measures: list[Measure]) -> None:
    """Print each promise beside its number; a broken one ends the program with an error that names it."""
    for m in measures:
        print(f"  {'ok   ' if m.holds else 'WRONG'}  {m.name:<46} {m.value:>8.3g}  {m.relation} {m.bound:g}")
    print()
    broken = [f"{m.name} is {m.value:.3g}, not {m.relation} {m.bound:g}" for m in measures if not m.holds]
    if broken:
        raise SystemExit("This run did not keep its promise: " + ";\n  ".join(broken))
