"""Selection against np.where, on both sides of the size rule: broadcasting, dtypes, and what must not get through."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import select
from tinygrad_qkv.kernels.elementwise import STRETCH
from tinygrad_qkv.kernels.threads import PARALLEL_FROM

RNG = np.random.default_rng(6)
SIZES = [0, 1, 17, PARALLEL_FROM["select"] - 1, 2 * STRETCH, 2 * STRETCH + 1, PARALLEL_FROM["elementwise"] + 7]


def same(keep, a, b):
    y, expected = select(keep, a, b), np.where(keep, a, b)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_arrays_and_numbers(n, dtype):
    a, b = RNG.normal(size=(2, n)).astype(dtype)
    keep = RNG.random(n) > 0.5
    a[~keep], b[keep] = np.nan, np.inf  # a product with the mask would let them through
    for x, y in ((a, b), (a, 0), (a, -np.inf), (0, b), (2.5, b), (1, 2)):
        same(keep, x, y)


@pytest.mark.parametrize("odd", ["float32 and float64", "integers", "an integer array", "float16", "byte order"])
def test_dtypes_that_numpy_selects_from(odd):
    keep = RNG.random(STRETCH * 3) > 0.5
    a, b = RNG.normal(size=(2, keep.size)).astype(np.float32)
    cases = {
        "float32 and float64": (a, b.astype(np.float64)),
        "integers": (np.arange(keep.size), 0),
        "an integer array": (a, np.arange(keep.size)),
        "float16": (a.astype(np.float16), b.astype(np.float16)),
        "byte order": (a.astype(">f4"), b),
    }
    same(keep, *cases[odd])


def test_broadcasting_and_strides():
    keep, a, b = RNG.random((97, 103)) > 0.5, RNG.normal(size=(97, 103)), RNG.normal(size=(103, 97))
    same(keep, a, b.T)
    same(keep[::-1, ::2], a[:, 1::2][:, :51][:, np.r_[0:51, 0]], b.T[:, :52])
    same(keep, a[:1], b[:, :1].reshape(1, 103))
    same(keep, np.float64(1.5) * np.ones(()), a)
    same(keep[:, :1].repeat(103, 1).T, 0, RNG.normal(size=(3, 103, 97)))
    same(np.broadcast_to(keep[:, None], (97, 5, 103)), np.broadcast_to(2.0, (97, 5, 103)), -1)
    with pytest.raises(ValueError, match="broadcast"):
        select(keep, a, b)


@pytest.mark.parametrize("n", [17, 2 * STRETCH])
def test_numbers_of_numpy_have_their_dtype_at_every_size(n):
    keep, a = RNG.random(n) > 0.5, RNG.normal(size=n).astype(np.float32)
    for x in (np.float64(0.1), np.float32(0.1), np.int64(3)):
        same(keep, a, x)


@pytest.mark.parametrize("n", [17, 2 * STRETCH])
def test_a_mask_of_numbers_is_refused(n):
    for keep in (np.ones(n, np.int64), np.full(n, 2, np.uint8), np.ones(n, np.float32)):
        with pytest.raises(TypeError, match="boolean"):
            select(keep, np.zeros(n, np.float32), 1)


@pytest.mark.filterwarnings("error")
def test_shapes_that_only_gain_axes_cause_no_warning():
    keep, a = RNG.random((1, 2 * STRETCH)) > 0.5, RNG.normal(size=2 * STRETCH).astype(np.float32)
    same(keep, a, a[None])
