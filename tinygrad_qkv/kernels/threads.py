"""Threads of the kernels."""

import numba


def set_num_threads(n: int) -> None:
    """Let the kernels use `n` threads."""
    numba.set_num_threads(n)


def get_num_threads() -> int:
    """Number of threads that the kernels use."""
    return numba.get_num_threads()
