"""The plain layers: Linear, Embedding, LayerNorm, Dropout, activations, and the containers of modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import init
from tinygrad_qkv.nn.module import Module, Parameter
from tinygrad_qkv.tensor import Tensor


class Linear(Module):
    """x (..., in_features) -> x @ weight.T + bias (..., out_features).

    weight (out_features, in_features) as in PyTorch, bias (out_features,) or None; both start uniform within
    1 / sqrt(in_features) of 0.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        self.in_features, self.out_features = sizes("Linear", in_features=in_features, out_features=out_features)
        bound = 1 / math.sqrt(max(in_features, 1))
        self.weight = Parameter(init.uniform((out_features, in_features), -bound, bound))
        self.bias = Parameter(init.uniform((out_features,), -bound, bound)) if bias else None

    def forward(self, x: Any) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Integer ids (...) -> rows of a table (..., width); weight (rows, width) starts normal with deviation 1.

    An id that is negative or not below `rows` raises IndexError.
    """

    def __init__(self, rows: int, width: int):
        self.rows, self.width = sizes("Embedding", rows=rows, width=width)
        self.weight = Parameter(init.normal((rows, width)))

    def forward(self, ids: Any) -> Tensor:
        return F.embedding(self.weight, ids)


class LayerNorm(Module):
    """Each row of x (..., width) with mean 0 and variance 1, times weight plus bias, both (width,).

    The variance is biased and `eps` stands inside the root.  Source: Ba, Kiros, Hinton 2016.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        (self.width,) = sizes("LayerNorm", width=width)
        self.eps = eps
        self.weight = Parameter(init.ones((width,)))
        self.bias = Parameter(init.zeros((width,)))

    def forward(self, x: Any) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class Dropout(Module):
    """In training, zero each element with probability p and scale the others by 1 / (1 - p); in eval x itself."""

    def __init__(self, p: float = 0.5, generator: np.random.Generator | None = None):
        self.p, self.generator = probability(p), generator

    def forward(self, x: Any) -> Tensor:
        return F.dropout(x, self.p, self.training, self.generator)

    def describe(self) -> str:
        return f"p={self.p}"


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Any) -> Tensor:
        return F.relu(x)


class GELU(Module):
    """x * Phi(x), exact by erf, or by tanh for approximate="tanh"."""

    def __init__(self, approximate: str = "none"):
        self.approximate = approximate

    def forward(self, x: Any) -> Tensor:
        return F.gelu(x, self.approximate)


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Any) -> Tensor:
        return F.silu(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Any) -> Tensor:
        return F.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Any) -> Tensor:
        return F.sigmoid(x)


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


class FeedForward(Module):
    """x (..., d_model) -> down(activation(up(x))): each position alone, through a wider layer of d_hidden.

    `d_hidden` defaults to 4 * d_model; `activation` is "relu" (the paper's), "gelu", "gelu_tanh" or "silu".
    Source: Vaswani et al. 2017, section 3.3.
    """

    ACTIVATIONS = {  # noqa: RUF012, a constant table
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, "tanh"),
        "silu": F.silu,
    }

    def __init__(
        self,
        d_model: int,
        d_hidden: int | None = None,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
    ):
        if activation not in self.ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(self.ACTIVATIONS)}, got {activation!r}")
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        self.activation, self.dropout = activation, probability(dropout)
        self.up = Linear(d_model, d_hidden, bias)
        self.down = Linear(d_hidden, d_model, bias)

    def forward(self, x: Any) -> Tensor:
        hidden = self.ACTIVATIONS[self.activation](self.up(x))
        return self.down(F.dropout(hidden, self.dropout, self.training))

    def describe(self) -> str:
        return self.activation + (f", dropout={self.dropout}" if self.dropout else "")


def sizes(kind: str, **named: int) -> tuple[int, ...]:
    """The sizes, if each is an integer that is not negative."""
    for name, n in named.items():
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 0:
            raise ValueError(f"{kind}'s {name} is a size, a non-negative integer; got {n!r}")
    return tuple(int(n) for n in named.values())


def probability(p: float) -> float:
    """p, if it is a probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout's p is a probability from 0 to 1, got {p}")
    return p
