"""From which size on threads pay: each kernel on one thread and in threads, beside the number in the code's table.

`python tests/benchmarks --size-rules`. "One thread" is what the kernel does below its rule, which may be NumPy.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_calls import CALLS, Call

from tinygrad_qkv.kernels import threads

FACTORS = [2.0**step for step in range(-4, 5)]  # sizes measured, as multiples of the table's
TURNS = 40  # of both forms at each size; their fastest counts, since what else the machine does only ever adds
SECONDS = 0.001  # of calls in a turn


def main() -> None:
    """Print a line for each kernel: the time ratio at each size, and the size at which both take equally long."""
    print(f"{threads.get_num_threads()} threads; one thread's time / theirs, at multiples of the rule's size\n")
    print(f"{'kernel':24} {'rule':>14} " + "".join(f"{factor:>7g}" for factor in FACTORS) + "   equal at")
    for name, call in CALLS.items():
        rule = threads.PARALLEL_FROM[call.rule]
        ratios = [ratio(call, round(rule * factor)) for factor in FACTORS]
        cells = "".join(f"{value:>7.2f}" for value in ratios)
        print(f"{name:24} {power(rule):>14} {cells}   {power(rule * crossing(ratios))}", flush=True)


def power(size: float) -> str:
    """As a power of two."""
    return f"2^{math.log2(size):.1f}".removesuffix(".0") if math.isfinite(size) and size > 0 else "beyond"


def ratio(call: Call, n: int) -> float:
    """One thread's time / that of threads for n units, in turns."""
    step = call.make(n)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TURNS):
        for parallel, found in times.items():
            found.append(seconds(step, call.rule, parallel))
    return min(times[False]) / min(times[True])


def seconds(step: Callable[[], Iterable[Any]], rule: str, parallel: bool) -> float:
    """Of a call in one form, which the rule is bent to give."""
    kept = threads.PARALLEL_FROM[rule]
    threads.PARALLEL_FROM[rule] = 0 if parallel else sys.maxsize
    try:
        step()
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            step()
            calls += 1
        return (time.perf_counter() - start) / calls
    finally:
        threads.PARALLEL_FROM[rule] = kept


def crossing(ratios: list[float]) -> float:
    """The multiple of the rule's size from which on threads are never slower, between the sizes measured."""
    slower = [i for i, value in enumerate(ratios) if value < 1]
    if not slower:
        return FACTORS[0]
    last = slower[-1]
    if last == len(ratios) - 1:
        return math.inf
    low, high = math.log(ratios[last]), math.log(ratios[last + 1])
    part = -low / (high - low) if high > low else 1.0
    return FACTORS[last] * (FACTORS[last + 1] / FACTORS[last]) ** part
