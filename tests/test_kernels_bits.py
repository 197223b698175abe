"""Every kernel gives the same bits for any number of threads, on every threading layer, and on one thread."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from kernel_calls import CALLS
from test_kernels_threads import needs

from tinygrad_qkv import kernels

SCRIPT = Path(__file__).with_name("kernel_calls.py")


def test_every_public_kernel_has_a_call():
    assert sorted(CALLS) == sorted(set(kernels.__all__) - {"get_num_threads", "set_num_threads"})


@pytest.fixture(scope="module")
def serial():
    return run("serial", 1)


def run(form, count, layer="default"):
    """What the script says of all kernels, in a process that launches so many threads."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_") or k == "NUMBA_CACHE_DIR"}
    env |= {"NUMBA_NUM_THREADS": str(count), "NUMBA_THREADING_LAYER": layer}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), form]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="one compiled run of the suite is enough")
@pytest.mark.parametrize(("count", "layer"), [(1, "tbb"), (2, "tbb"), (3, "omp"), (4, "workqueue"), (7, "tbb")])
def test_bits_are_those_of_one_thread(serial, count, layer):
    """7 threads are more than most machines have cores."""
    needs(layer)
    found = run("parallel", count, layer)
    assert found["layer"] == layer
    assert found["in threads"] == found["kernels"], "no call in kernel_calls.py runs a kernel in threads"
    assert found["bits"] == serial["bits"]
