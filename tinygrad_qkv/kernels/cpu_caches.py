"""Sizes of the processor's data caches: the blocks of a matrix product are cut to fit into them."""

import ctypes
import functools
import sys
from pathlib import Path

USUAL = 32 * 1024, 512 * 1024  # bytes of the first two levels where the machine does not tell
FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


@functools.cache
def cache_sizes() -> tuple[int, int]:
    """Bytes of the first- and the second-level data cache that a core works with."""
    found = _from_sysctl() if sys.platform == "darwin" else _from_sysfs(FOLDER)
    l1, l2 = (found.get(level) or usual for level, usual in enumerate(USUAL, 1))
    return l1, max(l2, 2 * l1)


def _from_sysfs(folder: Path) -> dict[int, int]:
    """Bytes of each level, as Linux tells: files `level`, `type` and `size` ("48K") for each cache."""
    found = {}
    try:
        for cache in sorted(folder.glob("index*")):
            level, kind, size = ((cache / name).read_text().strip() for name in ("level", "type", "size"))
            if kind in ("Data", "Unified"):
                found[int(level)] = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(size[-1:], 1)
    except (OSError, ValueError):
        return {}
    return found


def _from_sysctl() -> dict[int, int]:
    """Bytes of each level, as macOS tells; Apple's fast cores share the second level, four or more to one cache."""
    library = ctypes.CDLL(None)
    found = {}
    for level, name, sharers in ((1, b"hw.perflevel0.l1dcachesize", 1), (2, b"hw.perflevel0.l2cachesize", 4)):
        value, length = ctypes.c_int64(), ctypes.c_size_t(8)
        if library.sysctlbyname(name, ctypes.byref(value), ctypes.byref(length), None, ctypes.c_size_t(0)) == 0:
            found[level] = value.value // sharers
    return found
