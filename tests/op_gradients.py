"""Values and gradients of a function of tensors as plain arrays, for tests that know the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tinygrad_qkv import Tensor, grad


def value_and_gradients(
    f: Callable[..., Tensor], *inputs: Any, weights: Any = 1.0, dtype: str = "float64"
) -> tuple[np.ndarray, ...]:
    """The value of f(*inputs), then the gradient of sum(weights * value) for each input."""
    leaves = [Tensor(np.array(x, dtype=dtype), requires_grad=True) for x in inputs]
    y = f(*leaves)
    gradients = grad(y, leaves, np.broadcast_to(np.asarray(weights, dtype), y.shape))
    assert all(g.shape == x.shape and g.dtype == x.dtype for g, x in zip(gradients, leaves, strict=True))
    return (y.numpy(), *(g.numpy() for g in gradients))


def gradient(f: Callable[..., Tensor], x: Any, weights: Any = 1.0, dtype: str = "float64") -> np.ndarray:
    """The gradient of sum(weights * f(x))."""
    return value_and_gradients(f, x, weights=weights, dtype=dtype)[1]


def second_gradient(f: Callable[..., Tensor], x: Any) -> np.ndarray:
    """The gradient of the sum of the gradient of sum(f(x))."""
    leaf = Tensor(np.array(x, dtype=np.float64), requires_grad=True)
    (first,) = grad(f(leaf).sum(), leaf, create_graph=True)
    return np.asarray(grad(first.sum(), leaf)[0])
