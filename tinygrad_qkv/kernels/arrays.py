"""What kernels ask of the arrays that they are given."""

import numpy as np

_NATIVE = (np.dtype(np.float32), np.dtype(np.float64))


def is_ready(x: np.ndarray) -> bool:
    """Whether kernels over rows read x as it is: native float32 or float64, aligned and C-contiguous."""
    flags = x.flags
    return flags.c_contiguous and flags.aligned and x.dtype in _NATIVE


def native(x: np.ndarray, name: str) -> np.ndarray:
    """x in the machine's byte order and alignment, copied only where it is not; `name` is the kernel, for the error.

    Errors: TypeError for a dtype other than float32 and float64.
    """
    if x.dtype.kind != "f" or x.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} works on float32 and float64, got {x.dtype}: convert with astype")
    if x.dtype.isnative and x.flags.aligned:
        return x
    return x.astype(x.dtype.newbyteorder("="))


def contiguous(x: np.ndarray, name: str) -> np.ndarray:
    """x as kernels over rows read it: native and C-contiguous, copied only where it is not."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned and x.dtype in _NATIVE:  # `is_ready` without the call
        return x
    x = native(x, name)
    return x if x.flags.c_contiguous else x.copy(order="C")


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
