"""The Tensor: an array with its gradient, its name, and its place on the tape; what it does stands in methods.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from tinygrad_qkv import autograd, ops
from tinygrad_qkv.conversions import Conversions
from tinygrad_qkv.memory import Memory, memory_of
from tinygrad_qkv.methods import Methods
from tinygrad_qkv.observers import observers

if TYPE_CHECKING:
    from tinygrad_qkv.hooks import HookHandle
    from tinygrad_qkv.ledger.ledger import Ledger

DTYPES = frozenset("?bBhHiIlLqQefd")  # bool, the integers, float16 (storage only), float32, float64


def as_array(data: Any, dtype: Any = None) -> np.ndarray:
    """A new array of a supported dtype: Python floats become float32, ints int64, bools bool; arrays keep theirs."""
    if isinstance(data, Tensor):
        data = data._data
    if isinstance(data, (np.ndarray, np.generic)):
        array = np.array(data, dtype=dtype)
    else:
        typed: set[np.dtype] = set()
        try:
            array = np.array(_without_tensors(data, typed), dtype=dtype)
        except ValueError as error:
            raise ValueError(f"a Tensor is made of numbers, in nested lists of one length each: {error}") from None
        if dtype is None:
            array = array.astype(_list_dtype(array.dtype, typed), copy=False)
    if array.dtype.char not in DTYPES:
        raise TypeError(
            f"a Tensor holds bools, integers or floats (float16, float32, float64), got {array.dtype}; "
            "pass numbers of one shape, or convert with dtype="
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _without_tensors(data: Any, typed: set[np.dtype]) -> Any:
    """Nested lists with the tensors in them replaced by their arrays; `typed` collects the dtypes found inside."""
    if isinstance(data, (list, tuple)):
        return [_without_tensors(item, typed) for item in data]
    if hasattr(data, "dtype"):
        typed.add(data.dtype)
    return data._data if isinstance(data, Tensor) else data


def _list_dtype(found: np.dtype, typed: set[np.dtype]) -> np.dtype:
    """The dtype for a list that NumPy makes `found` of: Python's numbers are weak, integers follow the floats."""
    if found.kind == "f":
        return np.result_type(*[t for t in typed if t.kind == "f"] or [np.dtype(np.float32)])
    return np.dtype(np.int64) if found.kind == "i" and not typed else found


class Tensor(Methods, Conversions):
    """An n-dimensional array that can remember how it was made.

    `data` is copied: a number, a nested list, an array or a Tensor. `dtype` wins over the data's own. With
    `requires_grad=True` (float32 and float64 only) every op on it is recorded, and `backward()` of a result adds the
    gradient to `.grad`. `Tensor.from_numpy(array)` shares memory instead of copying.
    """

    __array_priority__ = 1000
    __slots__ = ("__weakref__", "_data", "_memory", "_node")

    _data: np.ndarray
    _memory: Memory | None  # see memory_of
    _node: autograd.Node | None

    def __init__(self, data: Any, dtype: Any = None, requires_grad: bool = False):
        self._data = as_array(data, dtype)
        self._memory = None
        self._node = None
        if requires_grad:
            self.requires_grad = True

    @classmethod
    def wrap(cls, array: np.ndarray, memory: Memory | None = None, node: autograd.Node | None = None) -> Tensor:
        """A Tensor around `array` itself, without a copy; the engine's own way to make one."""
        tensor = object.__new__(Tensor)
        tensor._data, tensor._memory, tensor._node = array, memory, node
        return tensor

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> Tensor:
        """A Tensor that shares memory with `array`. NOTE: the library cannot see writes into the source array."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"from_numpy needs a NumPy array, got {type(array).__name__}; use Tensor(data)")
        if array.dtype.char not in DTYPES or not array.dtype.isnative:
            raise TypeError(f"from_numpy cannot share an array of dtype {array.dtype}; use Tensor(array, dtype=...)")
        return cls.wrap(array)

    # ---- state

    @property
    def data(self) -> np.ndarray:
        """The raw array. NOTE: backward cannot see writes into it; assign `t.data = ...` instead."""
        return self._data

    @data.setter
    def data(self, array: Any) -> None:
        array = array._data if isinstance(array, Tensor) else np.asarray(array)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(
                f"t.data = ... keeps shape {self.shape} and dtype {self.dtype}, got {array.shape} and {array.dtype}; "
                "make a new Tensor for another shape or dtype"
            )
        self._data = array if array is self._data else array.copy()
        memory_of(self).write()

    @property
    def grad(self) -> Tensor | None:
        """What backward accumulated (leaves), or what last passed through (inner tensors, where it is kept).

        Inner tensors keep it after `t.retain_grad()` and under `recording()`. See `t.gradient()` for why it is None.
        """
        return None if self._node is None else self._node.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            value = value if isinstance(value, Tensor) else Tensor(value, dtype=self.dtype)
            if value.shape != self.shape or value.dtype != self.dtype:
                raise ValueError(
                    f"a gradient has its tensor's shape and dtype: expected {self.shape} {self.dtype}, "
                    f"got {value.shape} {value.dtype}"
                )
        elif self._node is None:
            return
        autograd.leaf_node(self).grad = value

    @property
    def requires_grad(self) -> bool:
        """Whether ops on this tensor are recorded."""
        return self._node is not None and self._node.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if not self.is_leaf:
            raise RuntimeError("requires_grad is set on leaves; an op made this tensor: use t.detach() to cut it off")
        if value and self.dtype.char not in "fd":
            raise TypeError(
                f"only float32 and float64 tensors can require grad, got {self.dtype}; use t.astype('float32') first"
            )
        if value or self._node is not None:
            autograd.leaf_node(self).requires_grad = bool(value)

    @property
    def is_leaf(self) -> bool:
        """True for a tensor that no recorded op made."""
        return self._node is None or self._node.is_leaf

    @property
    def _op(self) -> str | None:
        return None if self._node is None else self._node.op

    @property
    def name(self) -> str | None:
        """A label for drawings and messages; a model's parameters get their path when the model is called."""
        return None if self._node is None else self._node.name

    @name.setter
    def name(self, value: str | None) -> None:
        autograd.leaf_node(self).name = value

    # ---- the tape

    @overload
    def backward(
        self, gradient: Any = ..., *, retain_graph: bool | None = ..., create_graph: bool = ..., trace: Literal[True]
    ) -> Ledger: ...

    @overload
    def backward(
        self, gradient: Any = ..., *, retain_graph: bool | None = ..., create_graph: bool = ..., trace: bool = ...
    ) -> Ledger | None: ...

    def backward(
        self,
        gradient: Any = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        trace: bool = False,
    ) -> Ledger | None:
        """Add the gradient of this tensor with respect to every leaf to that leaf's `.grad`.

        `gradient` is d loss / d self, of this tensor's shape; None means 1 and is for scalars. What the ops saved is
        freed on the way, so that a second call raises, unless `retain_graph`. With `create_graph` the gradients are
        recorded too (for higher orders), and the graph is retained; NOTE: `.grad` then refers to the graph, and
        garbage collection, not reference counting, frees the two. With `trace` it returns the `Ledger` of the pass:
        every contribution to every gradient, with the formula and the numbers that it was made of.
        """
        from tinygrad_qkv.backward import backward  # here, because backward.py needs this file to be complete

        if not trace:
            backward(self, gradient, retain_graph=retain_graph, create_graph=create_graph)
            return None
        from tinygrad_qkv.ledger.keeper import LedgerKeeper

        keeper = LedgerKeeper()
        backward(self, gradient, retain_graph=retain_graph, create_graph=create_graph, watch=keeper)
        return keeper.ledger()

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> HookHandle:
        """Call `hook(g)` with the whole gradient of this tensor, in every backward pass that reaches it.

        It returns None, or the gradient that goes on in place of g. Several hooks run in the order in which they came.
        The handle takes the hook away: `handle.remove()`, or as a `with` block.
        """
        from tinygrad_qkv.hooks import HookHandle, hooks_of

        node = autograd.recorded_node(self, "register_hook()")
        return HookHandle(hooks_of(node).functions, hook)

    def retain_grad(self) -> None:
        """Keep the gradient of this inner tensor in `.grad`: that of the last backward pass, after its hooks."""
        from tinygrad_qkv.hooks import hooks_of

        node = autograd.recorded_node(self, "retain_grad()")
        if not node.is_leaf:  # leaves keep theirs anyway
            hooks_of(node).keep = True

    def gradient(self) -> Tensor:
        """`.grad`, or RuntimeError that says why it is None."""
        if self.grad is None:
            from tinygrad_qkv.missing_gradient import why_no_gradient

            raise RuntimeError(why_no_gradient(self))
        return self.grad

    def detach(self) -> Tensor:
        """The same values without history; memory is shared."""
        view = Tensor.wrap(self._data)
        memory_of(self).share(view)
        for observer in observers.get():
            observer.op_ran(view, "detach", (self,))
        return view

    def clone(self) -> Tensor:
        """A copy that gradients flow through."""
        return ops.clone(self)

    def zero_grad(self) -> None:
        """Forget the gradient: `.grad` is None again."""
        self.grad = None

    # ---- to and from NumPy; see also conversions.py

    def astype(self, dtype: Any) -> Tensor:
        """A copy of another dtype; gradients flow between float32 and float64."""
        return ops.astype(self, dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return ops.protocol.call_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        return ops.protocol.call_function(function, args, kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.requires_grad:
            raise RuntimeError(
                "DLPack shares memory without history: export t.detach(), not a tensor that requires grad"
            )
        return self._data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._data.__dlpack_device__()

    def __repr__(self) -> str:
        values = np.array2string(self._data, prefix="Tensor(", separator=", ", threshold=40, edgeitems=3, precision=4)
        parts = [values]
        if self.dtype not in (np.float32, np.int64, np.bool_) or self.size == 0:
            parts.append(f"dtype={self.dtype}")
        if self.size == 0:
            parts.append(f"shape={self.shape}")
        if self.name:
            parts.append(f"name={self.name!r}")
        if self.requires_grad:
            parts.append("requires_grad=True" if self.is_leaf else f"op={self._op}")
        if self.grad is not None:
            parts.append(
                f"grad={np.array2string(self.grad._data, separator=', ', threshold=6, edgeitems=2, precision=4)}"
            )
        return f"Tensor({', '.join(parts)})"

    def __iter__(self) -> Any:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d tensor; use .item()")
        return (self[i] for i in range(self.shape[0]))

    __hash__ = object.__hash__  # by identity: == compares element by element

    def __copy__(self) -> Tensor:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict) -> Tensor:
        rebuild, state = self.__reduce__()
        memo[id(self)] = copied = rebuild(*state)
        return copied

    def __reduce__(self) -> tuple:
        if not self.is_leaf:
            raise RuntimeError(
                f"only leaves are copied and pickled; op '{self._op}' made this tensor, and its graph would be "
                "lost: use t.detach() or t.numpy()"
            )
        grad = None if self.grad is None else self.grad._data
        return _rebuild, (type(self), self._data.copy(), self.requires_grad, self.name, grad)


def _rebuild(cls: type, data: np.ndarray, requires_grad: bool, name: str | None, grad: np.ndarray | None) -> Tensor:
    """A leaf as `copy.deepcopy` and `pickle` make it again."""
    tensor: Tensor = object.__new__(cls)
    tensor._data, tensor._memory, tensor._node = data, None, None
    if requires_grad:
        tensor.requires_grad = True
    if name is not None:
        tensor.name = name
    tensor.grad = None if grad is None else Tensor(grad)
    return tensor
