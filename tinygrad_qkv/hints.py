"""What to say of a name that PyTorch or NumPy has and this library calls otherwise."""

from __future__ import annotations

from collections.abc import Mapping


def missing(owner: str, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that `owner` lacks, with what to write instead where `elsewhere` knows it."""
    hint = f"; write {elsewhere[name]}" if name in elsewhere else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")
