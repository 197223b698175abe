"""P7, P12, P13 and P15: what is measured of whole fresh processes, peak memory and growth."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import Case
from pairs import Plan, Result
from serve import ROOT, environment

# Above it a side is out of memory: 16384 queries and keys, with all their scores, would bring the machine to a halt.
MEMORY_LIMIT = 8 * 2**30

FIRST_GRADIENT = {
    "ours": """
import numpy as np
from tinygrad_qkv import Tensor, nn
nn.MultiHeadAttention(512, 8)(Tensor(np.ones((8, 128, 512), np.float32))).sum().backward()
""",
    "torch": """
import torch
x = torch.ones(8, 128, 512)
torch.nn.MultiheadAttention(512, 8, batch_first=True)(x, x, x, need_weights=False)[0].sum().backward()
""",
}

COMPILING = """
import contextlib, io, json, runpy, sys, tempfile
with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
    sys.path.insert(0, "examples")
    sys.argv = ["08_phonebook.py", "--steps", "20", "--out", out]
    with contextlib.suppress(SystemExit):  # after so few steps it has not learnt what it checks
        runpy.run_path("examples/08_phonebook.py", run_name="__main__")
import numpy as np
from tinygrad_qkv.kernels.compile import KERNELS
forms = [(kernel, dtype, parallel) for kernel in KERNELS.values() for dtype in "fd" for parallel in (False, True)]
stored = {f"{k.name} {np.dtype(d)} {'parallel' if p else 'serial'}": k.stored(np.dtype(d), p) for k, d, p in forms}
print(json.dumps({name: one.seconds for name, one in stored.items() if one and one.current}))
"""

MEMORY = """
import json, resource, sys, time
sys.path.insert(0, {folder!r})
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
import attention
attention.{side}(64, True, True)()  # loads the kernels
step = attention.{side}({T}, True, True)
def resident(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before, start = resident("VmRSS"), time.perf_counter()
step()
print(json.dumps({{"MiB": resident("VmHWM") - before, "seconds": time.perf_counter() - start}}))
"""

GROWTH = """
import json, sys
sys.path.insert(0, {folder!r})
import engine
engine.backward_seconds(1000), engine.drawing_seconds(100)
print(json.dumps({{
    "backward": {{n: min(engine.backward_seconds(n) for _ in range(3)) for n in (1000, 10_000, 100_000)}},
    "drawing": {{n: min(engine.drawing_seconds(n) for _ in range(2)) for n in (100, 1000, 10_000)}},
}}))
"""


def _run(code: str, **env: str) -> str:
    """stdout of the code in a fresh process at the checkout's root."""
    env = environment() | {"PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:200])
    return done.stdout


def first_gradient(peers: list[str], plan: Plan) -> Result:
    """P12, in pairs; the first runs, which fill the disk cache, do not count."""
    result = Result(Case("P12", "fresh process: import, base layer, first gradient", {}, {}, {"torch": 2.0}))
    sides = [side for side in FIRST_GRADIENT if side == "ours" or side in peers]
    result.times = {side: [[]] for side in sides}
    for pair in range(-1, plan.pairs):
        for side in sides:
            time.sleep(plan.pause)
            start = time.perf_counter()
            _run(FIRST_GRADIENT[side])
            if pair >= 0:
                result.times[side][0].append(time.perf_counter() - start)
    return result


def compiling() -> dict[str, Any]:
    """P13: seconds of each kernel that the main example compiles into an empty cache, and the whole run's."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        kernels = json.loads(_run(COMPILING, NUMBA_CACHE_DIR=folder))
        cold = time.perf_counter() - start
        start = time.perf_counter()
        _run(COMPILING, NUMBA_CACHE_DIR=folder)
        warm = time.perf_counter() - start
    if not kernels:
        raise RuntimeError("the example left no compiled kernel in NUMBA_CACHE_DIR")
    return {"kernels": kernels, "cold": cold, "warm": warm}


def memory(peers: list[str], lengths: list[int]) -> dict[str, dict[int, Any]]:
    """P7: by side and T, the MiB that causal attention f+b takes at its peak beside its inputs, or an error's text."""
    found: dict[str, dict[int, Any]] = {}
    for side in ["ours", *(peer for peer in peers if peer == "torch")]:
        found[side] = {}
        for T in lengths:
            code = MEMORY.format(folder=str(Path(__file__).parent), side=side, T=T, limit=MEMORY_LIMIT)
            try:
                found[side][T] = json.loads(_run(code))
            except RuntimeError as error:
                found[side][T] = str(error)
    return found


def growth() -> dict[str, dict[str, float]]:
    """P15: seconds of backward and of drawing, by the number of ops."""
    return json.loads(_run(GROWTH.format(folder=str(Path(__file__).parent))))
