"""Gather: the rows themselves, on both sides of the size rule, and tables of all kinds."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import gather
from tinygrad_qkv.kernels.gather import ROWS, WIDTH
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, WIDTH - 1, WIDTH, WIDTH + 3])
@pytest.mark.parametrize("n", [1, ROWS + 1, PARALLEL_FROM["gather"] // WIDTH + ROWS - 1])
def test_rows_are_copied(dtype, width, n):
    x, ids = RNG.normal(size=(53, width)).astype(dtype), RNG.integers(0, 53, n)
    ids[-1] = 52
    out = gather(x, ids)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, x[ids])


def test_ids_of_all_kinds():
    x = RNG.normal(size=(31, WIDTH)).astype(np.float32)
    ids = RNG.integers(0, 31, (2, 3, PARALLEL_FROM["gather"] // WIDTH // 6 + 1))
    for odd in (ids.astype(np.uint8), ids.astype(">i4"), ids[:, ::-1], ids.T):
        np.testing.assert_array_equal(gather(x, odd), x[odd])
    assert gather(x, ids[:0]).shape == (0, *ids.shape[1:], WIDTH) and gather(x, ids[0, 0, 0]).shape == (WIDTH,)


def test_tables_of_all_kinds():
    x, ids = RNG.normal(size=(2 * WIDTH, 2 * WIDTH)), RNG.integers(0, WIDTH, PARALLEL_FROM["gather"] // WIDTH)
    for odd in (x.T, x[::2], x[:, ::2], x.astype(">f8"), x.astype(np.float16), (x * 100).astype(np.int64)):
        np.testing.assert_array_equal(gather(odd, ids), odd[ids])


@pytest.mark.parametrize("n", [3, PARALLEL_FROM["gather"] // WIDTH])
def test_errors(n):
    x, ids = np.ones((5, WIDTH), np.float32), np.zeros(n, np.int64)
    with pytest.raises(ValueError, match=r"\(rows, D\)"):
        gather(x[None], ids)
    for odd in (ids.astype(np.float64), ids.astype(bool)):
        with pytest.raises(TypeError, match="integers"):
            gather(x, odd)
