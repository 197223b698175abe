"""NumPy's .npz format: a zip archive with one .npy file a name, written and read without pickle."""

from __future__ import annotations

import errno
import io
import json
import math
import struct
import zipfile
import zlib
from typing import IO

import numpy as np
from numpy.lib import format as npy

ALIASES = "__aliases__"  # an entry of our own: JSON of further names, as bytes


def write(file: IO[bytes], arrays: dict[str, np.ndarray], aliases: dict[str, str]) -> None:
    """Write arrays by name; `aliases` (further name -> name) become one more entry."""
    for name in (*arrays, *aliases):
        if name == ALIASES or not name or "\0" in name:
            raise ValueError(f"{name!r} cannot be a name in an npz file")
    entries = dict(arrays)
    if aliases:
        entries[ALIASES] = np.frombuffer(json.dumps(aliases).encode(), np.uint8)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in entries.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                npy.write_array(entry, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)


def read(file: IO[bytes]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays by name, and the aliases; what is no such archive raises ValueError."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                if name == entry.filename or name in arrays:
                    raise ValueError(f"its entry {entry.filename!r} is no .npy file, or stands there twice")
                arrays[name] = _array(name, archive.read(entry))
    except (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"it is no npz archive, or damaged: {error}") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # the archive's directory points before the start of the file
            raise ValueError("it is a damaged npz archive") from None
        raise
    if ALIASES not in arrays:
        return arrays, {}
    return arrays, _aliases(arrays.pop(ALIASES), arrays)


def _array(name: str, data: bytes) -> np.ndarray:
    """One .npy file; its header must announce exactly the data that is there, before memory is taken for it."""
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"version {version} of the .npy format is not known")
        shape, _, dtype = readers[version](stream)
        if dtype.hasobject:
            raise ValueError("it holds pickled objects, which would run code")
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ValueError(f"dtype {dtype} is not one of bools, integers and floats")
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
            raise ValueError(f"shape {shape} and {dtype} do not fit its {len(data) - stream.tell()} bytes")
        stream.seek(0)
        array = npy.read_array(stream, allow_pickle=False)
    except Exception as error:  # NumPy's reader of headers raises many kinds, down to those of Python's tokenizer
        raise ValueError(f"its entry {name!r} is damaged: {error}") from None
    return array.astype(dtype.newbyteorder("="), copy=False)


def _aliases(entry: np.ndarray, arrays: dict[str, np.ndarray]) -> dict[str, str]:
    try:
        aliases = json.loads(entry.tobytes())
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(isinstance(v, str) and v in arrays for v in aliases.values()):
        raise ValueError("its list of aliases is damaged")
    return aliases
