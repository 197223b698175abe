"""Our matmul against NumPy's: `python tests/benchmarks/matmul.py`.

Each side runs in a process of its own, since the idle threads of one slow the other down. The processes take turns:
one is asked for a size, then the other, so that a busy moment of the machine falls on both; a pause before each lets
the other side's threads, which spin for a while after their work, go to sleep. A ratio is NumPy's time / ours: above 1
we are faster. Printed is the median over the pairs, with quartiles. NumPy is at its best only with OPENBLAS_CORETYPE
and OPENBLAS_L2_SIZE unset, so both are removed for its side.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CALLS = 7  # calls timed in a row; their median counts
PAUSE = 0.1  # seconds; OpenBLAS's threads spin for some 25 ms
WARM_UP = 0.02  # seconds of untimed calls: they compile, wake the threads and fill the caches


def serve(side: str) -> None:
    """Answer lines "n dtype" with the seconds that one product took."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if side == "ours":
        from tinygrad_qkv.kernels import matmul
    else:
        matmul = np.matmul
    for line in sys.stdin:
        n, dtype = line.split()
        a, b = np.random.default_rng(0).standard_normal((2, int(n), int(n))).astype(dtype)
        end = time.perf_counter() + WARM_UP
        while time.perf_counter() < end:
            matmul(a, b)
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            matmul(a, b)
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


def start(side: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    command = [sys.executable, __file__, "--serve", side]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def ask(process: subprocess.Popen, question: str) -> float:
    time.sleep(PAUSE)
    process.stdin.write(question + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main(sizes: list[int], dtypes: list[str], pairs: int, processes: int) -> None:
    """Print one line for each size and dtype, over `processes` fresh pairs of processes."""
    print(f"median of {pairs} pairs, over {processes} processes a side")
    print(f"{'n':>5} {'dtype':>8} {'ours GF/s':>10} {'NumPy GF/s':>11} {'ratio':>6} {'quartiles':>13}")
    results: dict[tuple[int, str], list[tuple[float, float]]] = {(n, d): [] for n in sizes for d in dtypes}
    for _ in range(processes):
        ours, theirs = start("ours"), start("numpy")
        for n, dtype in results:
            for _ in range(-(-pairs // processes)):
                results[n, dtype].append((ask(ours, f"{n} {dtype}"), ask(theirs, f"{n} {dtype}")))
        for process in (ours, theirs):
            process.stdin.close()
            process.wait()
    for (n, dtype), times in results.items():
        ratios = [theirs / ours for ours, theirs in times]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rates = [2 * n**3 / statistics.median(side) / 1e9 for side in zip(*times, strict=True)]
        print(f"{n:>5} {dtype:>8} {rates[0]:>10.0f} {rates[1]:>11.0f} {middle:>6.2f}   {low:.2f} - {high:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", choices=("ours", "numpy"), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 768, 1024, 2048])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float64"])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--processes", type=int, default=4, help="fresh processes a side, which share the pairs")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    else:
        main(options.sizes, options.dtypes, options.pairs, options.processes)
