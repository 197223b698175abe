"""What a run was measured on."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, threads, versions and load, to be kept beside every figure."""
    from tinygrad_qkv.kernels import simd, threads
    from tinygrad_qkv.kernels.compile import host_features

    names = ("numpy", "numba", "llvmlite", "tbb", "torch", "jax", "mygrad", "tinygrad")
    vectors = [name for name in ("avx512f", "avx2", "fma", "neon") if name in host_features()]
    return {
        "processor": _processor(),
        "features": vectors,
        "register block": [simd.BLOCK_ROWS, simd.BLOCK_VECTORS, simd.VECTOR_BYTES],
        "cores": os.cpu_count(),
        "threads": threads.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in names if (version := _version(name))},
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else [],
    }


def in_words(machine: dict[str, Any]) -> str:
    """Two lines for the head of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f", load {machine['load'][0]:.1f}" if machine["load"] else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {' '.join(machine['features'])}{load}\n"
        f"Python {machine['python']}, {versions}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
