"""The profiler: where the time of a block goes, and what its ops keep for backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np

from tinygrad_qkv.autograd import OUTPUT, Node
from tinygrad_qkv.hooks import pass_notes
from tinygrad_qkv.modes import Frame, module_frame
from tinygrad_qkv.observers import Observer, Part, Watch
from tinygrad_qkv.tensor import Tensor

FORWARD, BACKWARD = 0, 2  # where the columns of a row begin, its name left out
SORTS = ("time", "calls", "saved", "name")


class Row(NamedTuple):
    """One op, or one module: calls and seconds, forward and backward, and the bytes that it was the first to save."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    backward_calls: int = 0
    backward_seconds: float = 0.0
    saved_bytes: int = 0

    def plus(self, other: Row) -> Row:
        """The two rows as one, under this one's name."""
        return Row(
            self.name,
            self.calls + other.calls,
            self.seconds + other.seconds,
            self.backward_calls + other.backward_calls,
            self.backward_seconds + other.backward_seconds,
            self.saved_bytes + other.saved_bytes,
        )


class profile(Watch):  # noqa: N801, named like the functions beside it
    """Time, calls and saved bytes, by op and by module, forward and backward: `with profile() as p:`, `print(p)`.

    Time runs from event to event: an op has what passed since the op before it had ended, its Python included. What
    passed before a module began or ended, a backward pass began or ended, or the block ended, lies outside of ops and
    is a row of its own, and so is the profiler's own work: the rows add up to the time in the block. Looking on costs
    about 2 us an op and as much again in backward, where a tiny op takes 3.0 us for both; not all of it can be seen
    from inside. Ops inside a backward pass, as under create_graph, count as backward, in the module of the rule.

    Bytes are those that the rules read, each buffer once, under the op that saved it first; leaves that require grad
    are not counted, for they live anyway. A thread is seen where it enters the block itself. One object adds up over
    several blocks, and as a decorator over all calls. `print(p)` is by op; `p.table("module")` is by module, and
    `p.rows("module")` its numbers. A kernel is compiled or loaded at its first call, inside its op: run once before.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, _Clock] = {}  # by thread
        self._buffers = _Buffers()

    def inside(self, former: tuple[Observer, ...]) -> tuple[Observer, ...]:
        """Once is enough."""
        return former if self in former else (*former, self)

    def again(self) -> Self:
        """One object for all calls of a decorated function."""
        return self

    def __enter__(self) -> Self:
        super().__enter__()
        self._clock().start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._clock().stop()
        super().__exit__(*exc)

    # ---- what the engine tells

    def op_ran(self, out: Tensor, op: str, parents: tuple[Tensor | float, ...]) -> None:
        """Note an op's time and bytes, in a backward pass until its rule says where it belongs."""
        clock = self._clock()
        elapsed = clock.elapsed()
        saved = 0 if out._node is None or out._node.is_leaf else sum(map(self._buffers.first_seen, _saved(out)))
        if pass_notes.get() is None:
            clock.add(op, module_frame.get(), FORWARD, elapsed, saved)
        else:
            clock.pending.append((op, elapsed, saved))
        clock.go_on()

    def rules_ran(self, node: Node, inputs: tuple, parts: list[Part]) -> None:
        """Note the time of a node's rules, less that of the ops that they called."""
        clock = self._clock()
        elapsed = clock.elapsed()
        clock.place_pending(node.frame)
        clock.add(node.op, node.frame, BACKWARD, elapsed)
        clock.go_on()

    def module_entered(self, frame: Frame) -> None:
        """What came before lies outside of ops."""
        self._clock().step_outside()

    def module_left(self, frame: Frame) -> None:
        """What came after the last op lies outside of ops."""
        self._clock().step_outside()

    def backward_started(self, roots: dict[Node, Any]) -> None:
        """What came before lies outside of ops."""
        self._clock().step_outside()

    def backward_ended(self) -> None:
        """What came after the last rule lies outside of ops."""
        self._clock().step_outside()

    def _clock(self) -> _Clock:
        ident = threading.get_ident()
        return self._clocks.get(ident) or self._clocks.setdefault(ident, _Clock())

    # ---- what it found

    @property
    def outside(self) -> float:
        """Seconds between the ops, such as loading data and the optimiser's step."""
        return sum(clock.outside for clock in self._clocks.values())

    @property
    def looking_on(self) -> float:
        """Seconds that the profiler itself took, as far as it can see them."""
        return sum(clock.looking_on for clock in self._clocks.values())

    @property
    def seconds(self) -> float:
        """All seconds in the block, of all threads that entered it."""
        rows = self.rows()
        return sum(row.seconds + row.backward_seconds for row in rows) + self.outside + self.looking_on

    def rows(self, by: str = "op", sort: str = "time") -> list[Row]:
        """One row for each op, or for each module: by="op" or "module"; sort="time", "calls", "saved" or "name"."""
        if by not in ("op", "module"):
            raise ValueError(f'a profile is by="op" or by="module", got {by!r}')
        if sort not in SORTS:
            raise ValueError(f"a profile is sorted by one of {', '.join(SORTS)}, got {sort!r}")
        rows: dict[str, Row] = {}
        for clock in list(self._clocks.values()):
            for (op, module), row in list(clock.rows.items()):
                name = op if by == "op" else module
                rows[name] = rows.get(name, Row(name)).plus(Row(name, *row))
        keys = {
            "time": lambda row: -(row.seconds + row.backward_seconds),
            "calls": lambda row: -(row.calls + row.backward_calls),
            "saved": lambda row: -row.saved_bytes,
            "name": lambda row: row.name,
        }
        return sorted(rows.values(), key=keys[sort])

    def table(self, by: str = "op", sort: str = "time") -> str:
        """The rows as text, with what lies outside of ops, the profiler's own time, and the total."""
        rows, total = self.rows(by, sort), self.seconds
        whole = Row("total")
        for row in rows:
            whole = whole.plus(row)
        header = (by, "calls", "ms", "backward", "ms", "share", "saved")
        lines = [header, *(_cells(row, total) for row in rows)]
        for name, seconds in (("outside of ops", self.outside), ("the profiler", self.looking_on)):
            lines.append((name, "", f"{1e3 * seconds:.3f}", "", "", _share(seconds, total), ""))
        calls, backward_calls = str(whole.calls), str(whole.backward_calls)
        lines.append(("total", calls, f"{1e3 * total:.3f}", backward_calls, "", "100 %", _bytes(whole.saved_bytes)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join([f"{line[0]:<{widths[0]}}", *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        rule = "-" * len(texts[0])
        return "\n".join([texts[0], rule, *texts[1:-3], rule, *texts[-3:]])

    def __str__(self) -> str:
        return self.table()


class _Clock:
    """The time of one thread, and what it was spent on."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list] = {}  # by op and module: a Row without its name
        self.pending: list[tuple[str, float, int]] = []  # ops in a backward pass whose rule has not ended
        self.outside = self.looking_on = 0.0
        self.blocks = 0
        self.last = self.now = perf_counter()

    def start(self) -> None:
        self.blocks += 1
        if self.blocks == 1:
            self.last = perf_counter()

    def stop(self) -> None:
        self.step_outside()
        self.blocks -= 1

    def elapsed(self) -> float:
        """Seconds since the event before."""
        self.now = perf_counter()
        return self.now - self.last

    def go_on(self) -> None:
        """What passed since `elapsed` was the profiler's own."""
        self.last = perf_counter()
        self.looking_on += self.last - self.now

    def step_outside(self) -> None:
        """What passed was outside of ops."""
        self.outside += self.elapsed()
        self.place_pending(module_frame.get())
        self.go_on()

    def place_pending(self, frame: Frame | None) -> None:
        for op, seconds, saved in self.pending:
            self.add(op, frame, BACKWARD, seconds, saved)
        self.pending.clear()

    def add(self, op: str, frame: Frame | None, column: int, seconds: float, saved: int = 0) -> None:
        """Count one call in the columns that begin at `column`."""
        key = op, (frame.path or frame.kind) if frame is not None else "(no module)"
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = [0, 0.0, 0, 0.0, 0]
        row[column] += 1
        row[column + 1] += seconds
        row[-1] += saved


class _Buffers:
    """Which buffers were seen already; those that are gone are forgotten."""

    def __init__(self) -> None:
        self.seen: dict[int, weakref.ref[np.ndarray]] = {}
        self.lock = threading.RLock()  # again in the same thread: collecting garbage may forget a buffer at any time

    def first_seen(self, array: np.ndarray) -> int:
        """The bytes of the buffer that an array looks into, 0 if it was seen before."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        key = id(array)
        with self.lock:
            known = self.seen.get(key)
            if known is not None and known() is array:
                return 0
            self.seen[key] = weakref.ref(array, lambda gone: self._forget(key, gone))
        return array.nbytes

    def _forget(self, key: int, gone: weakref.ref) -> None:
        with self.lock:
            if self.seen.get(key) is gone:
                del self.seen[key]


def _saved(out: Tensor) -> Iterator[np.ndarray]:
    """The arrays that an op saved for its rules."""
    assert out._node is not None
    for s in out._node.saved:
        if s is OUTPUT:
            yield out._data
        elif isinstance(s, Tensor):
            if not (s.is_leaf and s.requires_grad):
                yield s._data
        elif isinstance(s, np.ndarray):
            yield s


def _cells(row: Row, total: float) -> tuple[str, ...]:
    """A row as text."""
    seconds, backward = f"{1e3 * row.seconds:.3f}", f"{1e3 * row.backward_seconds:.3f}"
    share = _share(row.seconds + row.backward_seconds, total)
    return row.name, str(row.calls), seconds, str(row.backward_calls), backward, share, _bytes(row.saved_bytes)


def _share(seconds: float, total: float) -> str:
    return f"{100 * seconds / total if total else 0.0:.1f} %"


def _bytes(n: int) -> str:
    return f"{n} B" if n < 1000 else f"{n / 1e3:.1f} kB" if n < 10**6 else f"{n / 1e6:.1f} MB"
