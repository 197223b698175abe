"""Containers of modules: a list to loop over, and a chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tinygrad_qkv.nn.module import Module, Parameter


class ModuleList(Module):
    """Modules in a row, named 0, 1, 2, ...: a list to loop over, which itself computes nothing."""

    def __init__(self, modules: Iterable[Module] = ()):
        self._items: list[Any] = []
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Add a module at the end."""
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__} holds modules, got {type(module).__name__}")
        self._items.append(module)

    def named_members(self) -> Iterator[tuple[str, Parameter | Module]]:
        return ((str(i), item) for i, item in enumerate(self._items) if isinstance(item, Module))

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __getitem__(self, index: Any) -> Any:
        return type(self)(self._items[index]) if isinstance(index, slice) else self._items[index]


class Sequential(ModuleList):
    """Modules, or functions of one tensor, each fed with the result of the one before: Sequential(a, F.relu, b)."""

    def __init__(self, *steps: Module | Callable[[Any], Any]):
        self._items = []
        for step in steps:
            self.append(step)

    def append(self, module: Module | Callable[[Any], Any]) -> None:
        """Add a step at the end."""
        if isinstance(module, type) or not callable(module):
            raise TypeError(f"a step of Sequential is a module or a function, got {module!r}")
        self._items.append(module)

    def __getitem__(self, index: Any) -> Any:
        return Sequential(*self._items[index]) if isinstance(index, slice) else self._items[index]

    def forward(self, x: Any) -> Any:
        for step in self._items:
            x = step(x)
        return x
