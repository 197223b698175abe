"""One side in a process of its own, which answers questions about cases on its standard input."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from catalog import CASES

ROOT = Path(__file__).resolve().parents[2]
# OpenBLAS is at its best only without them, so nobody's process has them.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
WARM_UP = 0.03  # seconds of untimed calls before timed ones: they wake the threads and fill the caches
HEAVY = 0.3  # seconds; a call that takes longer is not repeated to warm up
SAMPLES = 257  # elements of each result that are compared


def serve(side: str) -> None:
    """Answer each line, a question in JSON, by one line in JSON."""
    sys.path.insert(0, str(ROOT))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    current: tuple[int, Callable[[], Any]] | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["ask"] == "peak":
                from peak import peak_rate

                answer: Any = peak_rate()
            else:
                number = question["case"]
                if current is None or current[0] != number or question["ask"] == "check":  # from the case's start
                    current = None  # the old case's memory is free before the new one needs some
                    current = number, CASES[number].sides[side](**CASES[number].sizes)
                answer = sampled(current[1]()) if question["ask"] == "check" else timed(current[1], question["seconds"])
            text = json.dumps({"answer": answer})
        except Exception as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
        print(text, file=answers, flush=True)


def timed(step: Callable[[], Any], seconds: float) -> float:
    """The median time of a call, from as many as take `seconds`; calls far below a millisecond are timed in groups."""
    start = time.perf_counter()
    step()
    once = time.perf_counter() - start
    while once < HEAVY and time.perf_counter() - start < WARM_UP:
        before = time.perf_counter()
        step()
        once = min(once, time.perf_counter() - before)
    group = max(1, min(int(2e-4 / max(once, 1e-9)), 10_000))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(group):
            step()
        times.append((time.perf_counter() - start) / group)
    return statistics.median(times)


def sampled(results: Any) -> list[dict[str, Any]]:
    """Of each result: its shape, its largest absolute element, and elements at even distances."""
    found = []
    for result in results:
        array = np.asarray(result.detach() if hasattr(result, "detach") else result, dtype=np.float64)
        flat = array.reshape(-1)
        places = np.linspace(0, flat.size - 1, min(flat.size, SAMPLES)).astype(int)
        found.append({"shape": array.shape, "largest": float(np.abs(flat).max()), "elements": flat[places].tolist()})
    return found


def environment() -> dict[str, str]:
    """The variables of every process that is measured."""
    return {k: v for k, v in os.environ.items() if k not in UNSET}


class Process:
    """A process that serves a side."""

    def __init__(self, side: str, pause: float) -> None:
        self._side, self._pause = side, pause
        self._start()

    def _start(self) -> None:
        command = [sys.executable, str(Path(__file__).parent), "--serve", self._side]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment()
        )

    def ask(self, what: str, case: int | None = None, seconds: float = 0.0) -> Any:
        """The answer, after a pause in which the threads of the side that was asked before go to sleep.

        Errors: RuntimeError with what the side raised, or when its process ended; the next question starts a new one.
        """
        if self._process.poll() is not None:
            self.close()
            self._start()
        time.sleep(self._pause)
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"ask": what, "case": case, "seconds": seconds}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"its process ended with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """Let the process end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()
