"""What kernels ask of the arrays that they are given."""

import numpy as np


def native(x: np.ndarray, name: str) -> np.ndarray:
    """x in the machine's byte order and alignment, copied only where it is not; `name` is the kernel, for the error.

    Errors: TypeError for a dtype other than float32 and float64.
    """
    if x.dtype.kind != "f" or x.dtype.itemsize not in (4, 8):
        raise TypeError(f"{name} works on float32 and float64, got {x.dtype}: convert with astype")
    if x.dtype.isnative and x.flags.aligned:
        return x
    return x.astype(x.dtype.newbyteorder("="))
