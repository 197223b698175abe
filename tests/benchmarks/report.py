"""The measurements as lines of one table: on the terminal, in Markdown, and as data for JSON."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from cases import geometric
from pairs import SLOW, Result

PEAK_SHARES = {"P1": 0.9, "P6": 0.75}  # least share of the peak rate, in the rows' large cases
LARGE = ("matmul (1024, 1024) @ (1024, 1024)", "matmul (2048, 2048) @ (2048, 2048)", "T 2048", "T 4096")
COMPILE_SECONDS, KERNEL_SECONDS, DRAWING_SECONDS = 15, 5, 2  # P13 and P15
COLUMNS = ("torch", "jax", "numpy")  # peers of many rows; the others get lines of their own
GROWTH = 1.5  # the most that an op may cost more, or a MiB hold less, when there are ten times as many


@dataclass
class Line:
    """One line: what it is, our figure, the peers' time / ours, what was aimed at, and whether that was met."""

    row: str
    work: str
    ours: str
    peers: dict[str, str] = field(default_factory=dict)
    target: str = ""
    met: bool | None = None


def duration(seconds: float) -> str:
    """Three digits with the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def paired(result: Result, rates: list[float]) -> list[Line]:
    """The line of a case, and one for its share of the peak rate where that is aimed at."""
    case = result.case
    cells: dict[str, str] = {}
    for peer in result.peers():
        low, middle, high = result.quartiles(peer)
        cells[peer] = f"{middle:.2f} ({low:.2f}-{high:.2f})"
    cells |= dict.fromkeys(result.errors, "fails")
    medians = {peer: result.quartiles(peer)[1] for peer in result.peers()}
    if medians:
        medians["best"] = min(medians.values())
    wanted = {peer: least for peer, least in case.target.items() if peer in medians}
    met = all(medians[peer] >= least for peer, least in wanted.items()) if wanted else None
    target = ", ".join(f"{peer} {least:g}" for peer, least in case.target.items())
    seconds = result.seconds("ours")
    rate = f", {case.flops / seconds / 1e9:.0f} GF/s" if case.flops else ""
    beside = {peer: cells.pop(peer) for peer in list(cells) if peer not in COLUMNS}
    lines = [Line(case.row, case.name, duration(seconds) + rate, cells, target, met)]
    lines += [Line(case.row, f"  {peer} / ours", cell) for peer, cell in beside.items()]
    least = PEAK_SHARES.get(case.row)
    if rates and least and any(words in case.name for words in LARGE) and "forward" not in case.name:
        share = case.flops / seconds / statistics.median(rates)
        lines.append(Line(case.row, "  its share of the peak rate", f"{share:.2f}", {}, f"{least:g}", share >= least))
    return lines


def products_mean(results: list[Result]) -> list[Line]:
    """P1's geometric mean against the best peer of each case."""
    best = [min(r.quartiles(p)[1] for p in r.peers()) for r in results if r.case.row == "P1" and r.peers()]
    if not best:
        return []
    mean = geometric(best)
    work = f"  geometric mean of {len(best)} cases: best peer / ours"
    return [Line("P1", work, f"{mean:.2f}", {}, "best 1", mean >= 1)]


def memory(found: dict[str, dict[int, Any]]) -> list[Line]:
    """P7: a line for each length, and one for the growth."""
    lines = []
    for T, ours in found["ours"].items():
        theirs = found.get("torch", {}).get(T)
        line = Line("P7", f"attention T {T}, causal, f+b: peak memory", "fails", {}, "torch 0.77", False)
        if isinstance(ours, dict):
            line.ours, line.met = f"{ours['MiB']:.0f} MiB, {duration(ours['seconds'])}", None
            if isinstance(theirs, dict):
                ratio = theirs["MiB"] / ours["MiB"]
                line.peers, line.met = {"torch": f"{ratio:.2f}"}, ratio >= 1 / 1.3
        else:
            line.ours = f"fails: {ours}"[:24]
        lines.append(line)
    sizes = {T: one["MiB"] for T, one in found["ours"].items() if isinstance(one, dict)}
    if len(sizes) == len(found["ours"]) > 1:
        short, long = min(sizes), max(sizes)
        growth = sizes[long] / sizes[short] / (long / short)
        lines.append(
            Line("P7", f"  memory for each of {long} / {short} positions", f"{growth:.2f}", {}, "", growth <= GROWTH)
        )
    return lines


def compiling(found: dict[str, Any]) -> list[Line]:
    """P13: seconds in all, and of the kernel that takes longest."""
    times = found["kernels"]
    total, longest = sum(times.values()), max(times, key=times.get)
    work = f"main example on a fresh machine: {len(times)} kernels compile"
    lines = [Line("P13", work, f"{total:.1f} s", {}, f"{COMPILE_SECONDS} s", total <= COMPILE_SECONDS)]
    met = times[longest] <= KERNEL_SECONDS
    return [*lines, Line("P13", f"  longest: {longest}", f"{times[longest]:.1f} s", {}, f"{KERNEL_SECONDS} s", met)]


def growth(found: dict[str, dict[str, float]]) -> list[Line]:
    """P15: time of backward and of drawing, and what an op costs at the most against a tenth as many."""
    lines = []
    for what, times in found.items():
        each = {int(n): seconds / int(n) for n, seconds in times.items()}
        sizes = sorted(each)
        figures = ", ".join(duration(times[str(n)]) for n in sizes)
        rise = each[sizes[-1]] / each[sizes[-2]]
        met = rise <= GROWTH and (what != "drawing" or times[str(sizes[-1])] < DRAWING_SECONDS)
        limit = f"linear, last {DRAWING_SECONDS} s" if what == "drawing" else "linear"
        lines.append(Line("P15", f"{what} of {', '.join(f'{n:,}' for n in sizes)} ops", figures, {}, limit, met))
    return lines


def notes(results: list[Result], rates: list[float]) -> list[str]:
    """What stands below the table: the peak, slow processes, the control, and what failed."""
    found = []
    if rates:
        figures = ", ".join(f"{rate / 1e9:.0f}" for rate in rates)
        found.append(f"Peak rate of fused multiply-adds, all threads, in each process: {figures} GF/s.")
    sides = sorted({side for result in results for side in result.times}, key=lambda side: side != "ours")
    several = [result for result in results if len(result.times.get("ours", [])) > 1]
    if several:
        shares = {side: [r.slow_share(side) for r in several if side in r.times] for side in sides}
        words = [f"{side} {statistics.fmean(share):.0%}" for side, share in shares.items() if share]
        found.append(f"Slow processes (at {SLOW} times the fastest one's median or more): {', '.join(words)}.")
    for result in results:
        if (control := result.control()) is not None:
            found.append(f"Control, {result.case.name}: ours beside the peers takes {control:.2f} of its time alone.")
        found += [f"{side} has no figure for {result.case.name}: {why}" for side, why in result.errors.items()]
    return found


def text(lines: list[Line], peers: list[str], markdown: bool = False) -> str:
    """The table, in columns or in Markdown."""
    peers = [peer for peer in peers if any(peer in line.peers for line in lines)]
    rows = [["", "work", "ours", *(f"{peer} / ours" for peer in peers), "target", "met"]]
    for line in lines:
        met = {True: "yes", False: "no", None: ""}[line.met]
        rows.append([line.row, line.work, line.ours, *(line.peers.get(p, "") for p in peers), line.target, met])
    if markdown:
        rows.insert(1, ["---"] * len(rows[0]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def data(results: list[Result]) -> list[dict[str, Any]]:
    """All that was measured of each case, for JSON."""
    return [
        {
            "row": r.case.row,
            "work": r.case.name,
            "sizes": r.case.sizes,
            "target": r.case.target,
            "seconds": r.times,
            "alone": r.alone,
            "ratios": {peer: r.ratios(peer) for peer in r.peers()},
            "quartiles": {peer: r.quartiles(peer) for peer in r.peers()},
            "slow processes": {side: r.slow_share(side) for side in r.times},
            "errors": r.errors,
        }
        for r in results
    ]


def lines_data(lines: list[Line]) -> list[dict[str, Any]]:
    """The table's lines, for JSON."""
    return [asdict(line) for line in lines]
