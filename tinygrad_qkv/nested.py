"""Tensors alone, or inside tuples, lists and dicts, as functions take and return them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tinygrad_qkv.tensor import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every Tensor of a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def with_each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same value with change(x) in place of every x of that kind; named tuples stay what they are."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        items = [with_each(item, kind, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [with_each(item, kind, change) for item in value]
    if isinstance(value, dict):
        return {key: with_each(item, kind, change) for key, item in value.items()}
    return value


def listed(values: Any) -> list:
    """What a function takes or returned, one value or a list or tuple of them, as a list."""
    return list(values) if isinstance(values, (list, tuple)) else [values]
