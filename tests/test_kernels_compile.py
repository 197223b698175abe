"""The kernel decorator: when it compiles, what its disk cache survives, and plain Python in place of it.

Each test copies the kernels into a folder of its own and runs them in fresh processes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from tinygrad_qkv import kernels, locks
from tinygrad_qkv.kernels import compile as compiling

# Adds up rows 0..3 under the ids 0, 1, 1, 0; prints the result and whether it came from the disk.
USE = """
import numpy as np
from tinygrad_qkv.kernels import scatter
out = scatter.scatter_add(np.arange(4, dtype=np.float32)[:, None], np.array([0, 1, 1, 0]), 2)
(form,) = scatter._add_rows._compiled.values()
print(out.ravel().tolist(), "loaded" if sum(form.stats.cache_hits.values()) else "compiled")
"""
RIGHT = "[3.0, 3.0]"


class Copy:
    """A copy of the kernels package that fresh processes import."""

    def __init__(self, folder):
        self.kernels = folder / "tinygrad_qkv" / "kernels"
        shutil.copytree(Path(kernels.__file__).parent, self.kernels, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tinygrad_qkv" / "__init__.py").touch()
        shutil.copy(locks.__file__, folder / "tinygrad_qkv")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
        self.env |= {"PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "cache")}
        self.folder = folder

    def files(self):
        return sorted((self.folder / "cache").rglob("*.kernel"))

    def start(self, code, **env):
        command = [sys.executable, "-c", code]
        env = self.env | env
        return subprocess.Popen(
            command, env=env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, code=USE, **env):
        process = self.start(code, **env)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "Traceback" not in err and "Warning" not in err, err
        return out.strip()


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def test_importing_compiles_nothing_and_the_second_process_loads(copy):
    copy.run("import tinygrad_qkv.kernels")
    assert copy.files() == []
    assert copy.run() == f"{RIGHT} compiled"
    assert len(copy.files()) == 1
    assert copy.run() == f"{RIGHT} loaded"


def test_an_edited_building_block_is_never_stale(copy):
    assert copy.run() == f"{RIGHT} compiled"
    rows = copy.kernels / "rows.py"
    text = rows.read_text()
    assert text.count("out[i] += x[i]") == 1
    rows.write_text(text.replace("out[i] += x[i]", "out[i] += 2 * x[i]"))
    assert copy.run() == "[6.0, 6.0] compiled"
    assert copy.run() == "[6.0, 6.0] loaded"
    assert len(copy.files()) == 1  # the stale file was overwritten


DAMAGE = """
import glob, shutil
import numpy as np
from tinygrad_qkv.kernels import scatter

def use():
    "As a fresh process would: nothing compiled is left in memory."
    scatter._add_rows._compiled.clear()
    out = scatter.scatter_add(np.arange(4, dtype=np.float32)[:, None], np.array([0, 1, 1, 0]), 2)
    assert out.ravel().tolist() == [3.0, 3.0]
    (form,) = scatter._add_rows._compiled.values()
    return "loaded" if sum(form.stats.cache_hits.values()) else "compiled"

def flip(data):
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]

assert (use(), use()) == ("compiled", "loaded")
(path,) = glob.glob("cache/**/*.kernel", recursive=True)
half = lambda data: data[: len(data) // 2]
for damage in (lambda data: b"", half, lambda data: data[:-1], flip, lambda data: b"x" * 9999):
    data = open(path, "rb").read()
    open(path, "wb").write(damage(data))
    assert (use(), use()) == ("compiled", "loaded")
shutil.rmtree("cache")
assert (use(), use()) == ("compiled", "loaded")
print("repaired")
"""


def test_a_damaged_or_missing_file_is_compiled_anew_and_repaired(copy):
    """Emptied, halved, one byte short, one bit flipped, overwritten, and the folder gone."""
    assert copy.run(DAMAGE) == "repaired"


def test_no_folder_can_be_written(copy):
    """Root may write anywhere, so each folder that numba would use lies beneath a file, or is one."""
    (copy.folder / "file").touch()
    (copy.kernels / "__pycache__").touch()
    nowhere = str(copy.folder / "file" / "nowhere")
    homes = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "LOCALAPPDATA": nowhere, "NUMBA_CACHE_DIR": nowhere}
    for locators in ({}, {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}):
        assert copy.run(**homes, **locators) == f"{RIGHT} compiled"
    assert copy.run(NUMBA_CACHE_LOCATOR_CLASSES="NoSuchLocator").startswith(RIGHT)


@pytest.mark.parametrize("call", ["pathlib.Path.write_bytes", "os.replace"])
def test_a_full_disk(copy, call):
    full = f"""
import errno, os, pathlib
def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")
{call} = full
"""
    assert copy.run(full + USE) == f"{RIGHT} compiled"
    assert not [file for file in (copy.folder / "cache").rglob("*") if file.is_file()]


def test_processes_that_fill_the_cache_at_once(copy):
    processes = [copy.start(USE) for _ in range(2)]
    assert all(process.communicate(timeout=120)[0].startswith(RIGHT) for process in processes)
    assert copy.run() == f"{RIGHT} loaded"


def test_first_calls_from_several_threads(copy):
    code = """
import threading
import numpy as np
from tinygrad_qkv.kernels import scatter
results = []
def work():
    results.append(scatter.scatter_add(np.ones((5, 3), np.float32), np.zeros(5, np.int64), 2)[0].tolist())
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(results == [[5.0] * 3] * 4, len(scatter._add_rows._compiled))
"""
    assert copy.run(code) == "True 1"


def test_without_jit_everything_is_plain_python(copy):
    code = """
import numpy as np
from tinygrad_qkv import kernels as k
x = np.arange(12, dtype=np.float32).reshape(3, 4)
ids = np.array([0, 1, 1])
y = k.softmax(x, 1)
losses, lse = k.cross_entropy(x, ids, -100, 0.1)
_, mean, rstd = k.layer_norm(x, x[0], x[1], 1e-5)
k.softmax_pullback(x, y, 1), k.log_softmax_pullback(x, k.log_softmax(x, 1), 0), k.erf(x), k.scatter_add(x, ids, 2)
k.cross_entropy_pullback(losses, x, ids, lse, -100, 0.1), k.layer_norm_pullback(x, x, x[0], mean, rstd)
big = np.ones((70, 71), np.float32)
print(k.matmul(big, big.T)[0, 0], abs(y.sum(1) - 1).max() < 1e-6, k.get_num_threads() >= 1)
"""
    assert copy.run(code, NUMBA_DISABLE_JIT="1") == "71.0 True True"
    assert copy.files() == []


def test_a_long_compilation_says_so_once(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "_told", False)
    compiling._say_that_compiling_takes_time(0.5, "folder")
    assert capsys.readouterr().err == ""
    compiling._say_that_compiling_takes_time(1.5, "folder")
    compiling._say_that_compiling_takes_time(1.5, "folder")
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "folder" in err
    monkeypatch.setattr(compiling, "_told", False)
    compiling._say_that_compiling_takes_time(1.5, None)
    assert "no cache folder" in capsys.readouterr().err


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")
def test_one_compilation_serves_every_stride_and_read_only_arrays():
    x = np.ones((6, 5), np.float32)
    frozen = np.broadcast_to(x[0], (6, 5))
    from tinygrad_qkv.kernels.matmul import _four_axes, _in_blocks, _tiles

    for a in (x, x[::-1], np.asfortranarray(x), frozen, x[:, ::-1]):
        out = np.empty((6, 6), np.float32)
        _in_blocks(*_four_axes(a, a.T, out), parallel=True)
        assert (out == 5).all()
    form = _tiles._compiled[np.dtype(np.float32), True]
    assert len(form.signatures) == 1


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")
def test_options_that_hold_for_every_kernel():
    """No kernel assumes away NaN and inf, and all let other Python threads run."""
    from tinygrad_qkv.kernels import rows

    for name in ("row_max", "row_sum", "row_dot", "row_sum_exp", "row_exp_into", "row_add"):
        options = getattr(rows, name).targetoptions
        assert options["nogil"] and options["error_model"] == "numpy"
        allowed = options.get("fastmath") or set()
        assert allowed is not True and not {"nnan", "ninf", "fast", "afn"} & set(allowed)
