"""The gradient that a backward pass starts with, and a tangent, brought to the shape and dtype of its tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv.autograd import Node, recorded_node
from tinygrad_qkv.observers import observers
from tinygrad_qkv.tensor import Tensor


def seeded(tensor: Tensor, gradient: Any, caller: str) -> tuple[Node, Tensor]:
    """The node of `tensor` and the gradient that a pass starts with there, checked."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{caller} needs a Tensor, got {type(tensor).__name__}")
    node, g = recorded_node(tensor, caller), as_gradient(tensor, gradient, caller)
    for observer in observers.get():
        observer.root_given(tensor, g)
    return node, g


def as_gradient(tensor: Tensor, value: Any, caller: str, what: str = "gradient") -> Tensor:
    """`value` as a Tensor of floats with the shape and dtype of `tensor`; None means 1, for scalars.

    Python numbers, and lists of them, may be integers. An array or Tensor of integers, bools or complex numbers is a
    TypeError, another shape a ValueError.
    """
    made_by = "" if tensor.is_leaf else f" (op '{tensor._op}')"
    if value is None:
        if tensor.size != 1:
            raise ValueError(
                f"{caller} without a {what} needs a scalar, got shape {tensor.shape}{made_by}; "
                f"reduce it first, e.g. .sum(), or pass a {what} of that shape"
            )
        return Tensor.wrap(np.ones_like(tensor.data))
    given = value if isinstance(value, (Tensor, np.ndarray)) else np.asarray(value)
    weak = given is not value and given.dtype.kind in "iu"
    if given.dtype.kind != "f" and not weak:
        raise TypeError(
            f"{caller}: a {what} is made of floats, got {given.dtype} of shape {given.shape} for a tensor of "
            f"{tensor.dtype} and shape {tensor.shape}{made_by}"
        )
    if given.shape != tensor.shape:
        raise ValueError(
            f"{caller}: {what} of shape {given.shape} for a tensor of shape {tensor.shape}{made_by}; they must agree"
        )
    g = given if isinstance(given, Tensor) else Tensor(given)
    return g if g.dtype == tensor.dtype else g.astype(tensor.dtype)
