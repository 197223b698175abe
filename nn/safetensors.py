"""The safetensors format: an 8-byte little-endian length, a JSON header of that length, then the data.

The header gives each tensor's dtype, shape and place in the data. Source: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from typing import IO, Any

import numpy as np

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of a float32
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
METADATA = "__metadata__"
MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library


def write(file: IO[bytes], arrays: dict[str, np.ndarray], aliases: dict[str, str]) -> None:
    """Write arrays by name; `aliases` (further name -> name) go into the metadata, where safetensors' own are."""
    if METADATA in arrays or METADATA in aliases:
        raise ValueError(f"the name {METADATA!r} is the format's own; choose another")
    header: dict[str, Any] = {METADATA: aliases} if aliases else {}
    for name, array in arrays.items():
        dtype = array.dtype.newbyteorder("<")
        header[name] = {"dtype": NAMES[dtype], "shape": list(array.shape), "data_offsets": None}
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)  # keeps every tensor aligned
    end = 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        header[name]["data_offsets"] = [begin, end]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        array = arrays[name]
        # A file holds C order. The buffer of a transposed or broadcast array is something else.
        flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        file.write(flat.view(np.uint8).data)


def read(file: IO[bytes]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays by name, in the header's order, and the aliases; anything that is not exact raises ValueError."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    header, start = _header(file, size)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"its {METADATA} is not a table of texts")
    entries = {name: _entry(name, about, size - start) for name, about in header.items()}
    _check_cover([(begin, end, name) for name, (_, _, begin, end) in entries.items()], size - start)
    arrays = {name: _tensor(file, start, *entry) for name, entry in entries.items()}
    return arrays, {alias: name for alias, name in metadata.items() if name in arrays and alias not in arrays}


def _header(file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and where the data starts."""
    first = file.read(8)
    if first[:1] == b"\x80" or first[:2] == b"PK":
        raise ValueError("it is a pickle or a zip archive (torch.save?), not safetensors; a pickle would run code")
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, MAX_HEADER):
        raise ValueError(f"it is no safetensors file, or cut off: {size} bytes, with a header of {length} announced")
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_repeats)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, not a table of tensors")
    return header, 8 + length


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice in a table")
    return table


def _entry(name: str, about: Any, size: int) -> tuple[str, tuple[int, ...], int, int]:
    """One tensor's dtype, shape and place, checked against each other and the size of the data."""
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > 64:
        raise ValueError(f"tensor {name!r} has no valid shape: {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise ValueError(f"tensor {name!r} lies at {offsets!r:.80}, outside the {size} bytes of data")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise ValueError(
            f"tensor {name!r} of shape {shape} and {dtype} needs {needed} bytes, its place has another size"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _check_cover(places: list[tuple[int, int, str]], size: int) -> None:
    """The tensors must fill the data without overlap and without a gap."""
    reached = 0
    for begin, end, name in sorted(places):
        if begin != reached:
            raise ValueError(f"tensor {name!r} {'overlaps another' if begin < reached else 'leaves a gap before it'}")
        reached = end
    if reached != size:
        raise ValueError(f"its tensors take {reached} bytes, and {size} bytes of data are there")


def _tensor(file: IO[bytes], start: int, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> np.ndarray:
    array = np.empty(math.prod(shape), DTYPES[dtype])
    file.seek(start + begin)
    raw = array.view(np.uint8)
    if array.size and file.readinto(raw.data) != end - begin:  # type: ignore[attr-defined]
        raise ValueError("it ended while it was read")
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "BOOL":
        array = raw != 0  # any other byte than 0 and 1 would be no bool to NumPy
    try:
        return array.astype(array.dtype.newbyteorder("="), copy=False).reshape(shape)
    except ValueError as error:  # such as (0, 2**62, 2**62)
        raise ValueError(f"a tensor has the impossible shape {shape}: {error}") from None
