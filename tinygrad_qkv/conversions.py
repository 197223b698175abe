"""A Tensor as Python and NumPy see it: its numbers, its text, its truth and length; a mixin of `Tensor`."""

from __future__ import annotations

from typing import Any

import numpy as np


class Conversions:
    """What a Tensor shows of its array, and what it turns into."""

    __slots__ = ()

    _data: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def dtype(self) -> np.dtype:
        return self._data.dtype

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        """The number of elements, as in NumPy."""
        return self._data.size

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def numpy(self) -> np.ndarray:
        """A read-only view of the values."""
        view = self._data.view()
        view.flags.writeable = False
        return view

    def item(self) -> bool | int | float:
        """The one value of a tensor of size 1, as a Python number."""
        if self.size != 1:
            raise ValueError(f"item() needs a tensor of one element, got shape {self.shape}; use tolist() or numpy()")
        return self._data.item()

    def tolist(self) -> Any:
        return self._data.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy or (dtype is not None and np.dtype(dtype) != self.dtype):
            if copy is False:
                raise ValueError(f"np.asarray(t, copy=False): {self.dtype} to {np.dtype(dtype)} needs a copy")
            return np.array(self._data, dtype=dtype)
        return self.numpy()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth of a tensor of shape {self.shape} is ambiguous; use .any() or .all()")
        return bool(self._data.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu" or self.size != 1:
            raise TypeError(
                f"only an integer tensor of one element is an index, got {self.dtype} of shape {self.shape}"
            )
        return int(self._data.item())

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __contains__(self, value: Any) -> bool:
        return bool(np.any(self._data == getattr(value, "_data", value)))
