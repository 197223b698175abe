"""How an op takes its operands: Tensors as they are, Python and NumPy scalars weak, anything else a copied constant."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinygrad_qkv.modes import grad_mode
from tinygrad_qkv.tensor import Tensor

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
Operand = Any  # a Tensor, a number, an array or a nested list


def is_numeric(value: Any) -> bool:
    """Whether an op takes `value` as an operand."""
    return isinstance(value, (Tensor, np.ndarray, np.generic, int, float, list, tuple))


def operand(value: Operand) -> Tensor | float:
    """A Tensor as it is, a Python or NumPy scalar as a Python number, anything else as a new constant."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.generic):  # before float, of which np.float64 is a subclass
        return value.item()
    if isinstance(value, (float, int)):
        return value
    if not is_numeric(value):
        raise TypeError(f"an op takes tensors, numbers and arrays, got {type(value).__name__}")
    return _constant(value)


def tensor(value: Operand) -> Tensor:
    """A Tensor as it is, anything else as a new constant."""
    return value if isinstance(value, Tensor) else _constant(value)


def _constant(value: Any) -> Tensor:
    """A copy without history; a list with a tensor that has one raises, since its gradient would silently be lost."""
    if isinstance(value, (list, tuple)) and grad_mode.get() and _holds_history(value):
        raise TypeError("this list holds tensors that require grad, and would cut them off; join them: stack([a, b])")
    return Tensor(value)


def _holds_history(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_history, value))
    return isinstance(value, Tensor) and value.requires_grad


def pair(a: Operand, b: Operand, to_float: bool = False) -> tuple[Any, Any, Any, Any]:
    """Two operands of an elementwise op and the values that NumPy computes with; see `promoted`.

    Shapes that do not broadcast raise ValueError.
    """
    if isinstance(a, Tensor):  # nearly always one of these two
        x = a._data
        dtype = x.dtype
        if dtype is FLOAT32 or dtype is FLOAT64:
            if type(b) is float:
                return a, b, x, np.array(b, dtype)  # NumPy takes longer with the number itself
            if isinstance(b, Tensor) and b._data.dtype is dtype and b._data.shape == x.shape:
                return a, b, x, b._data
    a, b, x, y = promoted(a, b, to_float)
    if type(x) is np.ndarray and type(y) is np.ndarray and x.shape != y.shape:
        broadcast_together(x.shape, y.shape)
    return a, b, x, y


def broadcast_together(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Raise ValueError, with the axis and a way out, unless two shapes broadcast."""
    for axis, (m, n) in enumerate(zip(a[::-1], b[::-1], strict=False), start=1):
        if 1 != m != n != 1:
            raise ValueError(
                f"shapes {a} and {b} do not broadcast: their axes -{axis} have sizes {m} and {n}, which must be equal, "
                "or one of them 1; reshape, transpose or unsqueeze an operand"
            )


def promoted(a: Operand, b: Operand, to_float: bool = False) -> tuple[Any, Any, Any, Any]:
    """Two operands and their values in dtypes whose common one is the result's.

    Tensors of one float dtype, and scalars beside them, pass as they are. Integers beside floats become those
    floats (NumPy would make float64 of int64 and float32), and so do they alone under `to_float`.  float16 raises.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        x, y = a._data, b._data
        if x.dtype is y.dtype and x.dtype.char in "fd":
            return a, b, x, y
    a, b = operand(a), operand(b)
    if isinstance(a, Tensor) and a._data.dtype.char in "fd" and not isinstance(b, Tensor):
        return a, b, a._data, b
    if isinstance(b, Tensor) and b._data.dtype.char in "fd" and not isinstance(a, Tensor):
        return a, b, a, b._data
    return _mixed(a, b, to_float)


def _mixed(a: Any, b: Any, to_float: bool) -> tuple[Any, Any, Any, Any]:
    """`promoted` for operands that do not pass as they are."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = Tensor(a)
    x = a._data if isinstance(a, Tensor) else a
    y = b._data if isinstance(b, Tensor) else b
    kinds = [refuse_float16(v).dtype for v in (x, y) if isinstance(v, np.ndarray)]
    floats = [kind for kind in kinds if kind.kind == "f"]
    if to_float or floats or isinstance(x, float) or isinstance(y, float):
        to = FLOAT64 if FLOAT64 in floats else FLOAT32
        x, y = (v.astype(to) if isinstance(v, np.ndarray) and v.dtype.kind != "f" else v for v in (x, y))
    return a, b, x, y


def floating(value: Operand) -> tuple[Tensor, np.ndarray]:
    """An operand and its values as floats: integers and bools become float32, float16 raises."""
    t = tensor(value)
    x = t._data
    if x.dtype.char in "fd":
        return t, x
    return t, refuse_float16(x).astype(FLOAT32)


def numeric(value: Operand) -> tuple[Tensor, np.ndarray]:
    """An operand and its values in their own dtype; float16 raises."""
    t = tensor(value)
    return t, refuse_float16(t._data)


def refuse_float16(array: np.ndarray) -> np.ndarray:
    """The array itself, if kernels and rules exist for its dtype."""
    if array.dtype.char == "e":
        raise TypeError("float16 is for storage only; convert first: t.astype('float32')")
    return array


def plain(value: Any) -> Any:
    """The array or number behind an operand that no gradient flows to, such as a mask."""
    return value._data if isinstance(value, Tensor) else value


def refuse_names(unknown: dict) -> None:
    """Explain PyTorch's keywords where NumPy's are used."""
    if unknown:
        name = next(iter(unknown))
        known = {"dim": "axis", "keepdim": "keepdims", "unbiased": "ddof", "correction": "ddof"}
        hint = f"; say {known[name]}= as in NumPy" if name in known else ""
        raise TypeError(f"unknown keyword {name!r}{hint}")
