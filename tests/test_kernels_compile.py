"""The kernel decorator: when it compiles, what its disk cache survives, and plain Python in place of it.

Each test copies the kernels into a folder of its own and runs them in fresh processes.
"""

import io
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
from tinygrad_qkv.kernels import progress
from tinygrad_qkv.kernels.__main__ import all_kernels

# Adds up rows 0..3 under the ids 0, 1, 1, 0; prints the result and whether it came from the disk.
USE = """
import numpy as np
from tinygrad_qkv.kernels import scatter
from tinygrad_qkv.kernels.compile import KERNELS
out = scatter.scatter_add(np.arange(4, dtype=np.float32)[:, None], np.array([0, 1, 1, 0]), 2)
form = KERNELS["scatter._add_rows"].form(out.dtype, False)
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


COLUMNS = """
import sys
import numpy as np
from tinygrad_qkv.kernels import reductions
from tinygrad_qkv.kernels.compile import KERNELS

def use(dtype):
    out = np.zeros((1, 1, 2), dtype)
    reductions._sum_columns(np.ones((1, 3, 2), dtype), 1, out, parallel=False)
    form = KERNELS["reductions._sum_columns"].form(out.dtype, False)
    return out.tolist(), "loaded" if sum(form.stats.cache_hits.values()) else "compiled"

print(*use(np.float32))
# What numba makes np.zeros and matrix products of; the second imports SciPy's BLAS.
print([name in sys.modules for name in ("numba.np.arrayobj", "numba.np.linalg")])
"""


def test_loading_needs_nothing_of_the_compiler_which_works_after_it(copy):
    assert copy.run(COLUMNS).split("\n") == ["[[[3.0, 3.0]]] compiled", "[True, True]"]
    loaded = ["[[[3.0, 3.0]]] loaded", "[False, False]"]
    both = COLUMNS + "print(*use(np.float64))"
    assert copy.run(both).split("\n") == [*loaded, "[[[3.0, 3.0]]] compiled"]
    assert len(copy.files()) == 2
    assert copy.run(both).split("\n") == [*loaded, "[[[3.0, 3.0]]] loaded"]


def test_an_edited_building_block_is_never_stale(copy):
    assert copy.run() == f"{RIGHT} compiled"
    rows = copy.kernels / "rows.py"
    text = rows.read_text()
    assert text.count("return y + x\n") == 1
    rows.write_text(text.replace("return y + x\n", "return y + 2 * x\n"))
    assert copy.run() == "[6.0, 6.0] compiled"
    assert copy.run() == "[6.0, 6.0] loaded"
    assert len(copy.files()) == 1  # the stale file was overwritten


DAMAGE = """
import glob, shutil
import numpy as np
from tinygrad_qkv.kernels import scatter
from tinygrad_qkv.kernels.compile import KERNELS

def use():
    "As a fresh process would: nothing compiled is left in memory."
    KERNELS["scatter._add_rows"]._compiled[False].clear()
    out = scatter.scatter_add(np.arange(4, dtype=np.float32)[:, None], np.array([0, 1, 1, 0]), 2)
    assert out.ravel().tolist() == [3.0, 3.0]
    form = KERNELS["scatter._add_rows"].form(out.dtype, False)
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
from tinygrad_qkv.kernels.compile import KERNELS
results = []
def work():
    results.append(scatter.scatter_add(np.ones((5, 3), np.float32), np.zeros(5, np.int64), 2)[0].tolist())
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(results == [[5.0] * 3] * 4, len(KERNELS['scatter._add_rows']._compiled[False]))
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


REPORT = """
from pathlib import Path
from tinygrad_qkv.kernels import __main__ as report

found = {kernel.name: kernel for kernel in report.all_kernels()}
scatter = found["scatter._add_rows"]
folder = Path(scatter.cache_folder())

def row():
    return report.table([scatter]).splitlines()[-1].split()

assert row() == ["scatter._add_rows", "-", "-", "-", "-", "0"], row()
report.warm([scatter], ["float32"])
for forms in scatter._compiled:
    forms.clear()  # as in a fresh process
report.warm([scatter], ["float32"])
assert row()[2] == row()[4] == "s" and row()[5:7] == ["-", "-"] and int(row()[7]) > 5, row()
path = next(folder.glob("scatter._add_rows-serial.*"))
path.write_bytes(path.read_bytes()[:-1])
assert row()[1] == "stale", row()
(folder / "somebody's own file").touch()
report.main(["--clear"])
assert [path.name for path in folder.iterdir()] == ["somebody's own file"]
report.main([])
"""


def test_the_report_warms_and_clears_the_cache(copy):
    printed = copy.run(REPORT)
    assert printed.count("1/2  scatter._add_rows  float32  serial") == 2
    assert "2 compiled in" in printed and "0 compiled in" in printed and printed.count("on disk already") == 4
    assert "2 files removed from" in printed
    for word in ("NumPy 2", "register block", "threads", "cache", "matmul._tiles"):
        assert word in printed


def test_the_report_without_jit(copy):
    command = "from tinygrad_qkv.kernels.__main__ import main; main([])"
    assert "nothing is compiled under NUMBA_DISABLE_JIT" in copy.run(command, NUMBA_DISABLE_JIT="1")
    with pytest.raises(AssertionError, match="nothing to compile"):
        copy.run(command.replace("[]", "['--warm']"), NUMBA_DISABLE_JIT="1")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True

    def screen(self):
        """What stands there after carriage returns moved the cursor back: the last text of each line."""
        return [line.rpartition("\r")[2] for line in self.getvalue().split("\n")]


@pytest.fixture
def saying(monkeypatch):
    """The progress of a process that compiled nothing yet, with stderr as given."""

    def on(stream, whole=True):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "__stderr__", stream if whole else None)
        for name, value in {"_kernels": 0, "_seconds": 0.0, "_told": False, "_shown": "", "silent": False}.items():
            monkeypatch.setattr(progress, name, value)
        return stream

    return on


def compile_two(folder="folder", seconds=(0.6, 1.5)):
    for label, taken in zip(("a.quick (serial)", "b.slow (parallel)"), seconds, strict=True):
        progress.begin(label)
        progress.end(label, taken, folder)


def test_a_first_run_shows_what_it_compiles_in_a_line_that_vanishes(saying):
    err = saying(Terminal())
    progress.begin("a.quick (serial)")
    assert err.screen() == ["tinygrad_qkv: compiling kernel 1, a.quick (serial) ..."]
    progress.end("a.quick (serial)", 0.6, "folder")
    assert err.screen() == [""]
    progress.begin("b.slow (parallel)")
    assert err.screen() == ["tinygrad_qkv: compiling kernel 2, b.slow (parallel) ..."]
    progress.end("b.slow (parallel)", 1.5, "folder")
    stays = "tinygrad_qkv: compiling numerical kernels for this machine; later runs load them from folder"
    assert err.screen() == [stays, ""]
    compile_two()
    assert err.screen() == [stays, ""]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["a file", "a progress bar's stream"])
def test_elsewhere_only_slow_kernels_leave_a_line(saying, stream):
    err = saying(stream, whole=False)
    compile_two(seconds=(0.2, 0.7))
    assert err.getvalue() == ""
    compile_two(folder=None)
    first, second, rest = err.getvalue().split("\n")
    assert "no cache folder" in first and second == "tinygrad_qkv: compiled b.slow (parallel) in 1.5 s" and not rest


def test_a_program_without_stderr_compiles_too(saying):
    saying(None)
    compile_two()
    closed = saying(io.StringIO())
    closed.close()
    compile_two()


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")
def test_one_compilation_serves_every_stride_and_read_only_arrays():
    x = np.ones((6, 5), np.float32)
    frozen = np.broadcast_to(x[0], (6, 5))
    from tinygrad_qkv.kernels.matmul import _four_axes, _tiles

    for a in (x, x[::-1], np.asfortranarray(x), frozen, x[:, ::-1]):
        out = np.empty((6, 6), np.float32)
        _tiles(*_four_axes(a, a.T, out), 2**15, 2**19, parallel=True)
        assert (out == 5).all()
    form = compiling.KERNELS["matmul._tiles"].form(x.dtype, True)
    assert len(form.signatures) == 1


@pytest.mark.skipif(numba.config.DISABLE_JIT, reason="nothing is compiled")
def test_no_kernel_has_the_name_of_a_building_block():
    """Building blocks are told by their names when they are compiled as parts of a kernel."""
    names = {kernel.function.__name__ for kernel in all_kernels()}
    assert len(names) > 40 and not names & compiling._PARTS


def test_options_that_hold_for_every_kernel():
    """No kernel assumes away NaN and inf, and all let other Python threads run."""
    from tinygrad_qkv.kernels import vectors

    assert compiling.OPTIONS == {"nogil": True, "error_model": "numpy"}
    assert vectors.CONTRACT == ("contract",)
