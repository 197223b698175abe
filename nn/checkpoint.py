"""Saving and loading of named tensors: `.npz` by suffix, any other name is a safetensors file.

A save is atomic, and loading runs no code. The two formats are in `safetensors.py` and `npz.py`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tinygrad_qkv.nn import npz, safetensors
from tinygrad_qkv.nn.module import Module
from tinygrad_qkv.tensor import Tensor


def save(obj: Module | Mapping[str, Any], path: str | os.PathLike) -> None:
    """Write a state dict (name -> Tensor or array), or a module's, to `path`, bit for bit.

    Entries that are one and the same Tensor (tied weights) are stored once, with the further names as aliases.
    The file under `path` is replaced in one step when all is written: killed before, the former file stays whole,
    and all that may be left is a hidden `.tmp` file beside it.
    """
    arrays, aliases = _collect(obj)
    write = npz.write if _is_npz(path) else safetensors.write
    _replace(Path(os.path.realpath(path)), lambda file: write(file, arrays, aliases))


def load(path: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a file by name, in the order in which they were saved; names stored as aliases share a Tensor.

    bfloat16 becomes float32, which holds it exactly. A damaged file, one with other contents, a pickle: ValueError.
    """
    with open(path, "rb") as file:
        try:
            arrays, aliases = (npz.read if _is_npz(path) else safetensors.read)(file)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r} was not loaded: {error}") from error
    tensors = {name: Tensor.wrap(array) for name, array in arrays.items()}
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def _is_npz(path: str | os.PathLike) -> bool:
    return Path(path).suffix.lower() == ".npz"


def _collect(obj: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays to store by name, and the further names of those that have several."""
    if isinstance(obj, Module):
        return {name: np.asarray(t) for name, t in obj.state_dict().items()}, obj.tied_names()
    if not isinstance(obj, Mapping):
        raise TypeError(f"save takes a module or a dict of names and tensors, got {type(obj).__name__}")
    arrays: dict[str, np.ndarray] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in obj.items():
        if not isinstance(name, str):
            raise TypeError(f"names are strings, got {name!r}")
        if any(isinstance(v, Mapping) for v in (value if isinstance(value, (list, tuple)) else [value])):
            raise TypeError(f"{name!r} holds a dict; save takes one level: name the inner tensors {name}.<key>")
        if isinstance(value, Tensor) and id(value) in first:
            aliases[name] = first[id(value)]
            continue
        first[id(value)] = name
        arrays[name] = np.asarray(value if isinstance(value, (np.ndarray, np.generic)) else Tensor(value))
        if arrays[name].dtype.kind not in "biuf" or arrays[name].dtype.itemsize > 8:
            raise TypeError(f"{name!r} has dtype {arrays[name].dtype}; files hold bools, integers and floats")
    return arrays, aliases


def _replace(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a new file beside `path`, bring it to the disk, and put it in the place of the old one in one step.

    The old file's permissions stay: what was private must not become readable by others.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(path)!r} does not exist; make it first: {str(path.parent)!r}")
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(new, "xb") as file:
            if path.exists():
                shutil.copymode(path, new)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name must reach the disk too; Windows has no such call
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
