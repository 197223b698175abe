"""What the kernels run on, and what of them is compiled: `python -m tinygrad_qkv.kernels`.

`--warm` compiles all that is missing, so that no program waits for it later; `--clear` removes what was compiled.
"""

import argparse
import importlib
import os
import pkgutil
import platform
import sys
import time
from pathlib import Path

import llvmlite
import numba
import numpy as np

from tinygrad_qkv import kernels
from tinygrad_qkv.kernels import cache, progress, simd, threads
from tinygrad_qkv.kernels.compile import JIT, KERNELS, Kernel, host_features
from tinygrad_qkv.kernels.cpu_caches import cache_sizes

DTYPES = {"float32": ["float32"], "float64": ["float64"], "both": ["float32", "float64"]}
FORMS = {"serial": False, "parallel": True}
WORTH_NAMING = ("avx512f", "avx2", "fma", "avx", "sse4.2", "neon", "sve", "asimd")  # features that vectors depend on


def all_kernels() -> list[Kernel]:
    """Every kernel, in the order of their names; all files of the package are imported for that."""
    for file in pkgutil.iter_modules(kernels.__path__):
        if file.name != "__main__":
            importlib.import_module(f"{kernels.__name__}.{file.name}")
    return [KERNELS[name] for name in sorted(KERNELS)]


def describe_machine() -> list[tuple[str, str]]:
    """Versions, vectors and threads, as rows of a name and a text."""
    compilers = ("NumPy", np), ("numba", numba), ("llvmlite", llvmlite)
    versions = [f"Python {platform.python_version()}", *(f"{name} {module.__version__}" for name, module in compilers)]
    features = [name for name in WORTH_NAMING if name in host_features()]
    columns = [f"{simd.block_columns(size)} {dtype}" for dtype, size in (("float32", 4), ("float64", 8))]
    rows = [
        ("versions", ", ".join(versions)),
        ("processor", f"{platform.machine()}, {numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()}"),
        ("vectors", f"{simd.VECTOR_BYTES} bytes ({', '.join(features) or 'no features known'})"),
        ("caches", "L1 {} KiB, L2 {} KiB, to which matmul's tiles are cut".format(*(n // 1024 for n in cache_sizes()))),
        ("register block", f"{simd.BLOCK_ROWS} rows x {' or '.join(columns)} columns"),
    ]
    if not JIT:
        return [*rows, ("threads", "none: NUMBA_DISABLE_JIT is set, so kernels run as plain Python")]
    count, most = threads.get_num_threads(), numba.config.NUMBA_NUM_THREADS
    layer = f"{count} of at most {most} on {numba.threading_layer()}"
    return [*rows, ("threads", layer + (f" ({threads.tbb_library})" if threads.tbb_library else ""))]


def files(folders: set[Path]) -> list[Path]:
    """What kernels left in their cache folders, pieces of interrupted writes too."""
    return sorted(path for folder in folders for path in folder.glob(f"*{cache.SUFFIX}*") if path.is_file())


def describe_cache(found: list[Kernel], folders: set[Path]) -> list[tuple[str, str]]:
    """The cache's folder and its size, as rows of a name and a text."""
    kept = files(folders)
    size = sum(path.stat().st_size for path in kept)
    where = ", ".join(map(str, sorted(folders))) or "none can be written: every process compiles anew"
    return [("kernels", str(len(found))), ("cache", where), ("files", f"{len(kept)}, {size / 2**20:.1f} MiB")]


def table(found: list[Kernel]) -> str:
    """One line a kernel: seconds that each form took to compile, where it is on disk, and KiB of them all."""
    columns = [(dtype, form) for dtype in DTYPES["both"] for form in FORMS]
    width = max(len(kernel.name) for kernel in found)
    lines = [" " * width + "".join(f"{dtype:>10}" for dtype, _ in columns) + "       KiB"]
    lines += [f"{'kernel':{width}}" + "".join(f"{form:>10}" for _, form in columns)]
    for kernel in found:
        stored = [kernel.stored(np.dtype(dtype), FORMS[form]) for dtype, form in columns]
        cells = ["-" if one is None else f"{one.seconds:.2f} s" if one.current else "stale" for one in stored]
        cells = [cell if form in _forms_of(kernel) else "" for cell, (_, form) in zip(cells, columns, strict=True)]
        size = sum(one.size for one in stored if one is not None)
        lines.append(f"{kernel.name:{width}}" + "".join(f"{cell:>10}" for cell in cells) + f"{size / 1024:>10.0f}")
    return "\n".join(lines)


def _forms_of(kernel: Kernel) -> list[str]:
    return list(FORMS) if kernel.has_threads else ["serial"]


def warm(found: list[Kernel], dtypes: list[str]) -> None:
    """Compile every form of the kernels that is not on disk, and say how long each took."""
    progress.silent = True
    wanted = [
        (kernel, dtype, form) for kernel in found for dtype in dtypes for form in FORMS if form in _forms_of(kernel)
    ]
    width = max(len(kernel.name) for kernel in found)
    start = time.perf_counter()
    compiled = 0
    for n, (kernel, dtype, form) in enumerate(wanted, 1):
        print(f"{n:>3}/{len(wanted)}  {kernel.name:{width}}  {dtype}  {form:8}", end="  ", flush=True)
        before = time.perf_counter()
        loaded = sum(kernel.form(np.dtype(dtype), FORMS[form]).stats.cache_hits.values())
        compiled += not loaded
        print("on disk already" if loaded else f"{time.perf_counter() - before:.1f} s", flush=True)
    print(f"{compiled} compiled in {time.perf_counter() - start:.0f} s, {len(wanted) - compiled} on disk already")


def clear(folders: set[Path]) -> None:
    """Remove the kernels' own files, and nothing else, from the cache folders."""
    kept = files(folders)
    for path in kept:
        path.unlink(missing_ok=True)
    print(f"{len(kept)} files removed from {', '.join(map(str, sorted(folders))) or 'no folder'}")


def main(arguments: list[str] | None = None) -> None:
    """Report, or do what the options say."""
    parser = argparse.ArgumentParser(prog="python -m tinygrad_qkv.kernels", description=__doc__)
    parser.add_argument("--warm", action="store_true", help="compile what is not on disk")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="what --warm compiles for; default float32")
    parser.add_argument("--clear", action="store_true", help="remove the compiled kernels; before --warm, if both")
    options = parser.parse_args(arguments)
    found = all_kernels()
    folders = {Path(folder) for kernel in found if (folder := kernel.cache_folder())}
    if options.clear:
        clear(folders)
    if options.warm and not JIT:
        sys.exit("NUMBA_DISABLE_JIT is set: kernels run as plain Python, and there is nothing to compile")
    if options.warm:
        warm(found, DTYPES[options.dtype])
    if not options.clear and not options.warm:
        for name, text in [*describe_machine(), *describe_cache(found, folders)]:
            print(f"{name:15} {text}")
        print("\nSeconds that each form took to compile; '-' is not compiled yet, 'stale' is from other sources.\n")
        print(table(found) if JIT else "nothing is compiled under NUMBA_DISABLE_JIT")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the report has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        sys.exit(1)
