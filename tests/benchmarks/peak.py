"""The rate of fused multiply-adds, which bounds P1 and P6: the register block alone, on panels that stay in L1."""

import time

import numpy as np
from cases import numbers

DEPTH, REPEATS, CALLS = 128, 2000, 9


def peak_rate() -> float:
    """Operations a second in float32 of all threads together."""
    import numba

    from tinygrad_qkv.kernels import simd, threads
    from tinygrad_qkv.kernels.tile_product import tile_product

    threads.start()
    count = threads.get_num_threads()
    rows, columns = 2 * simd.BLOCK_ROWS, simd.block_columns(4)
    a, b = numbers(count, DEPTH, rows), numbers(count, DEPTH, columns, seed=1)
    c = np.empty((count, rows, columns), np.float32)

    @numba.njit(nogil=True)
    def one_thread(a, b, c):
        for _ in range(REPEATS):
            tile_product(a, b, c, False)

    @numba.njit(parallel=True, nogil=True)
    def all_threads(a, b, c):
        for thread in numba.prange(len(a)):
            one_thread(a[thread], b[thread], c[thread])

    all_threads(a, b, c)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        all_threads(a, b, c)
        times.append(time.perf_counter() - start)
    return 2.0 * count * REPEATS * DEPTH * rows * columns / float(np.median(times))
