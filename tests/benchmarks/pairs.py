"""Timing the sides in turn: pairs of measurements, over several fresh processes a side."""

import statistics
import sys
from dataclasses import dataclass, field

import numpy as np
from cases import Case
from catalog import CASES
from serve import Process

SLOW = 1.4  # a process is slow when its median is so many times that of the side's fastest process


@dataclass
class Plan:
    """How much is measured."""

    processes: int = 4  # fresh ones a side
    pairs: int = 16  # in all
    seconds: float = 0.1  # of timed calls in each measurement
    pause: float = 0.1  # before each; OpenBLAS's and OpenMP's threads spin for some 25 ms after their work
    alone: int = 3  # measurements of ours in each process before any peer is started


@dataclass
class Result:
    """What was measured of a case: seconds of a call, in a list for each process."""

    case: Case
    times: dict[str, list[list[float]]] = field(default_factory=dict)
    alone: list[list[float]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def seconds(self, side: str) -> float:
        """The median."""
        return statistics.median(t for process in self.times[side] for t in process)

    def ratios(self, peer: str) -> list[float]:
        """Peer's time / ours, pair by pair."""
        both = zip(self.times["ours"], self.times[peer], strict=True)
        return [b / a for ours, theirs in both for a, b in zip(ours, theirs, strict=True)]

    def quartiles(self, peer: str) -> tuple[float, float, float]:
        """Of the ratios; the middle one is what counts."""
        ratios = self.ratios(peer)
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        return float(low), float(middle), float(high)

    def slow_share(self, side: str) -> float:
        """The share of processes that ran at a lower speed throughout."""
        medians = [statistics.median(process) for process in self.times[side] if process]
        return sum(m > SLOW * min(medians) for m in medians) / len(medians)

    def control(self) -> float | None:
        """Our time beside the peers / our time alone: 1 where their processes do not slow ours."""
        if not self.alone:
            return None
        alone = statistics.median(t for process in self.alone for t in process)
        return self.seconds("ours") / alone

    def peers(self) -> list[str]:
        """The sides that ours was compared with."""
        return [side for side in self.times if side != "ours"]


def run(numbers: list[int], peers: list[str], plan: Plan) -> tuple[list[Result], list[float]]:
    """Measure the numbered cases; gives their results, and the rates of the register block, one a process."""
    results = {n: Result(CASES[n]) for n in numbers}
    rates: list[float] = []
    for turn in range(plan.processes):
        _say(f"process {turn + 1} of {plan.processes}: ours alone")
        ours = Process("ours", plan.pause)
        if any(result.case.flops for result in results.values()):
            rates.append(ours.ask("peak"))
        for n, result in results.items():
            if result.case.control and plan.alone:
                result.alone.append([ours.ask("time", n, plan.seconds) for _ in range(plan.alone)])
        processes = {"ours": ours, **{peer: Process(peer, plan.pause) for peer in peers}}
        for n, result in results.items():
            _say(f"process {turn + 1} of {plan.processes}: {result.case.row} {result.case.name}")
            sides = [side for side in processes if side in result.case.sides and side not in result.errors]
            if turn == 0:
                sides = _agreeing(n, result, sides, processes)
            for side in sides:
                result.times.setdefault(side, []).append([])
            for pair in range(-(-plan.pairs // plan.processes)):
                for i in range(len(sides)):
                    _time(n, result, sides[(pair + i) % len(sides)], processes, plan)  # nobody always comes first
        for process in processes.values():
            process.close()
    _say("")
    return list(results.values()), rates


def _time(n: int, result: Result, side: str, processes: dict[str, Process], plan: Plan) -> None:
    """Add one measurement, unless the side failed in this case before."""
    if side in result.errors:
        return
    try:
        result.times[side][-1].append(processes[side].ask("time", n, plan.seconds))
    except RuntimeError as error:
        result.errors[side] = str(error)
        del result.times[side]


def _agreeing(n: int, result: Result, sides: list[str], processes: dict[str, Process]) -> list[str]:
    """The sides that compute what ours does; what the others say is kept as their error."""
    answers = {}
    for side in sides:
        try:
            answers[side] = processes[side].ask("check", n)
        except RuntimeError as error:
            if side == "ours":
                raise RuntimeError(f"{result.case.row} {result.case.name}: {error}") from None
            result.errors[side] = str(error)
    for side in answers:
        wrong = difference(answers["ours"], answers[side], result.case.tolerance)
        if wrong:
            result.errors[side] = wrong
    return [side for side in answers if side not in result.errors]


def difference(ours: list[dict], theirs: list[dict], tolerance: float) -> str | None:
    """How two sides' results differ, or None where they agree."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a["shape"] != b["shape"]:
            return f"result {i} has shape {b['shape']}, ours {a['shape']}"
        off = np.abs(np.subtract(a["elements"], b["elements"])).max()
        if not off <= tolerance * max(b["largest"], 1e-30):
            return f"result {i} differs by {off:.2g}, of {b['largest']:.2g}"
    return None


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)
