"""What kernels ask of the arrays that they are given."""

import numpy as np

_FLOAT32, _FLOAT64 = _NATIVE = np.dtype(np.float32), np.dtype(np.float64)
_INT64 = np.dtype(np.int64)
_LARGEST = np.iinfo(np.int64).max


def is_ready(x: np.ndarray) -> bool:
    """Whether kernels over rows read x as it is: native float32 or float64, aligned and C-contiguous."""
    flags = x.flags
    return flags.c_contiguous and flags.aligned and x.dtype in _NATIVE


def plain(x: np.ndarray, name: str) -> np.ndarray:
    """x as an ndarray and of no subclass, whose operators and shapes may mean other things; `name` is the kernel.

    Errors: TypeError for what is no array, and for a masked one, whose mask no kernel would see.
    """
    if type(x) is np.ndarray:
        return x
    if not isinstance(x, (np.ndarray, np.generic)):
        raise TypeError(f"{name} works on NumPy arrays, got {type(x).__name__}: convert with np.asarray")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} would not see the mask of a masked array: call its filled() first")
    return np.asarray(x)


def floats(x: np.ndarray, name: str) -> np.ndarray:
    """x as a plain array of float32 or float64, in any order of bytes and at any address, which NumPy can read.

    Errors: TypeError for what is no array, and for other dtypes.
    """
    if type(x) is np.ndarray and ((dtype := x.dtype) is _FLOAT32 or dtype is _FLOAT64):
        return x
    x = plain(x, name)
    if x.dtype.kind != "f" or x.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} works on float32 and float64, got {x.dtype}: convert with astype")
    return x


def native(x: np.ndarray, name: str) -> np.ndarray:
    """x as `floats`, and in the machine's byte order and alignment, copied only where it is not."""
    x = floats(x, name)
    if x.dtype.isnative and x.flags.aligned:
        return x
    return x.astype(x.dtype.newbyteorder("="))


def contiguous(x: np.ndarray, name: str) -> np.ndarray:
    """x as kernels over rows read it: plain, native and C-contiguous, copied only where it is not."""
    if type(x) is np.ndarray:
        flags = x.flags
        if flags.c_contiguous and flags.aligned and x.dtype in _NATIVE:  # `is_ready` without the call
            return x
    x = native(x, name)
    return x if x.flags.c_contiguous else x.copy(order="C")


def integers(x: np.ndarray, name: str, argument: str) -> np.ndarray:
    """The argument x, an array of integers, as a plain array of int64.

    Errors: TypeError for other dtypes, ValueError for a number that int64 does not hold.
    """
    if type(x) is np.ndarray and x.dtype is _INT64:
        flags = x.flags
        if flags.c_contiguous and flags.aligned:
            return x
    x = plain(x, name)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: {argument} must be integers, got {x.dtype}")
    if x.dtype.kind == "u" and x.dtype.itemsize == 8 and x.size and x.max() > _LARGEST:
        raise ValueError(f"{name}: {argument} must fit in int64, got {x.max()}")
    return np.ascontiguousarray(x, np.int64).reshape(x.shape)  # else a 0-d array would get an axis


def row_numbers(ids: np.ndarray, name: str, rows: int) -> np.ndarray:
    """ids as `integers`, each checked to be the number of one of so many rows: compiled code would not notice.

    Errors: TypeError for other dtypes, IndexError for an id outside 0 to rows - 1, negative ones too.
    """
    ids = plain(ids, name)
    if ids.size and ids.dtype.kind in "iu" and (ids.min() < 0 or ids.max() >= rows):
        raise IndexError(f"ids from 0 to {rows - 1} fit a table of {rows} rows, got {ids.min()} to {ids.max()}")
    return integers(ids, name, "ids")


def one_dtype(name: str, *arrays: np.ndarray) -> None:
    """Raise TypeError unless all arrays have the dtype of the first."""
    if any(x.dtype != arrays[0].dtype for x in arrays):
        given = ", ".join(str(x.dtype) for x in arrays)
        raise TypeError(f"{name} needs arrays of one dtype, got {given}: convert them with astype")


def two_axes(name: str, argument: str, x: np.ndarray, axes: str = "(N, D)") -> None:
    """Raise ValueError unless the argument x has two axes."""
    if x.ndim != 2:
        raise ValueError(f"{name}: {argument} must have shape {axes}, got {x.shape}")


def shapes_fit(name: str, **expected: tuple[np.ndarray, tuple[int, ...]]) -> None:
    """Raise ValueError unless each named array has the shape beside it."""
    for argument, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"{name}: {argument} must have shape {shape}, got {x.shape}")
