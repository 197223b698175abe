"""matmul: against exact products, over the edges of every block, strides, broadcasting, and what must not be read."""

import itertools
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from tinygrad_qkv.kernels import matmul
from tinygrad_qkv.kernels.compile import host_features
from tinygrad_qkv.kernels.matmul import (
    NUMPY_BELOW,
    NUMPY_EACH_BELOW,
    NUMPY_VECTOR_BELOW,
    PARALLEL_FROM,
    _four_axes,
    _plan,
    _tiles,
)
from tinygrad_qkv.kernels.simd import BLOCK_ROWS, block_columns

DTYPES = [np.float32, np.float64]
RNG = np.random.default_rng(0)


SMALL_CACHES = 16 * block_columns(4) * 4, 4 * BLOCK_ROWS * 16 * 4 * 2  # stretches of 16 k, tiles of two blocks


def tiled(a, b, caches=SMALL_CACHES):
    """The product by our own kernel, at sizes that matmul would leave to NumPy, in the tiles of these cache sizes."""
    out = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), np.nan, a.dtype)
    _tiles(*_four_axes(a, b, out), *caches, parallel=True)
    return out


def assert_product(got, a, b):
    """Within the bound of a sum in any order: depth * eps * sum of |a| |b|."""
    depth = a.shape[-1]
    wide = np.longdouble if depth < 300 else np.float64
    exact = np.matmul(a.astype(wide), b.astype(wide))
    bound = (depth + 2) * np.finfo(a.dtype).eps * np.matmul(abs(a).astype(np.float64), abs(b).astype(np.float64))
    assert got.shape == exact.shape
    assert got.dtype == a.dtype
    assert (abs(got - exact) <= bound).all()


def layouts(x):
    """The same values in every kind of memory order."""
    yield x
    yield np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    yield np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    yield wide[..., ::2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_every_block(dtype):
    width = block_columns(np.dtype(dtype).itemsize)
    rows = (1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 31)
    columns = (1, width - 1, width, width + 1, 67)
    depths = (1, 3, 17, 64)
    for m, k, n in itertools.product(rows, depths, columns):
        a, b = RNG.standard_normal((m, k)).astype(dtype), RNG.standard_normal((k, n)).astype(dtype)
        assert_product(tiled(a, b), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [15, 16, 17, 24, 25, 33, 601])
def test_long_sums_are_added_up_over_stretches_of_k(dtype, depth):
    a, b = RNG.standard_normal((67, depth)).astype(dtype), RNG.standard_normal((depth, 131)).astype(dtype)
    for left, right in itertools.product(layouts(a), layouts(b)):
        assert_product(tiled(left, right), a, b)


@pytest.mark.parametrize("caches", [SMALL_CACHES, (32 * 2**10, 256 * 2**10), (48 * 2**10, 2**20), (2**20, 2**24)])
def test_the_tiles_cover_every_element_once_whatever_the_caches(caches):
    """Whole numbers whose products are exact; rows enough for packing."""
    for rows, depth, columns in ((1, 401, 601), (613, 401, 1), (401, 67, 613), (1031, 3, 71), (67, 613, 401)):
        a, b = RNG.integers(-9, 9, (rows, depth)), RNG.integers(-9, 9, (depth, columns))
        for right in (b.astype(np.float32), np.asfortranarray(b.astype(np.float32))):
            np.testing.assert_array_equal(tiled(a.astype(np.float32), right, caches), a @ b)


def test_what_is_packed():
    """The right operand, where its rows are none in memory, or where it is large and meets many rows of the left."""
    few, many = (np.broadcast_to(np.float32(1), (1, 1, 64, rows)) for rows in (300, 512))
    b, out = np.ones((1, 1, 64, 4096), np.float32), np.ones((1, 1, 512, 4096), np.float32)
    packs = [
        bool(_plan(a, right, out[:, :, : a.shape[3], : right.shape[3]], 2**15, 2**19)[-1])
        for a, right in ((few, b), (many, b), (many, b[..., :64]), (few, b.reshape(1, 1, 4096, 64).swapaxes(2, 3)))
    ]
    assert packs == [False, True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(dtype):
    a, b = RNG.standard_normal((2, 29, 41)).astype(dtype), RNG.standard_normal((2, 41, 71)).astype(dtype)
    for left, right in itertools.product(layouts(a), layouts(b)):
        assert_product(tiled(left, right), a, b)
    constant = np.broadcast_to(a[0, :1], (29, 41))  # every row the same memory
    assert_product(tiled(constant, b[0]), constant, b[0])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 5, 7), (7, 11)),
        ((5, 7), (3, 7, 11)),
        ((3, 1, 5, 7), (2, 7, 11)),
        ((1, 1, 5, 7), (3, 2, 7, 11)),
        ((3, 2, 5, 7), (1, 2, 7, 11)),
        ((2, 1, 3, 5, 7), (5, 1, 7, 11)),
        ((2, 3, 1, 2, 5, 7), (3, 2, 1, 7, 11)),
    ],
)
def test_leading_axes_broadcast(left, right):
    a, b = RNG.standard_normal(left).astype(np.float32), RNG.standard_normal(right).astype(np.float32)
    assert_product(tiled(a, b), a, b)


def test_attention_heads_as_strided_views():
    x = RNG.standard_normal((2, 19, 3, 8)).astype(np.float32)
    heads = x.transpose(0, 2, 1, 3)
    assert_product(tiled(heads, heads.swapaxes(-1, -2)), heads, heads.swapaxes(-1, -2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("right", [lambda b: b, np.asfortranarray])
def test_public_function_on_both_sides_of_each_size_rule(dtype, right):
    for m, k, n in ((5, 7, 11), (63, 64, 65), (64, 64, 64), (64, 64, 67), (89, 97, 101), (257, 127, 131)):
        a, b = RNG.standard_normal((m, k)).astype(dtype), RNG.standard_normal((k, n)).astype(dtype)
        got = matmul(a, right(b))
        assert got.flags.c_contiguous and got.flags.writeable
        assert_product(got, a, b)
    assert 257 * 127 * 131 > PARALLEL_FROM["matmul"] > 89 * 97 * 101 > 64 * 64 * 67 >= NUMPY_BELOW > 64**3


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_on_either_side(dtype):
    for m, k, n in (
        (1, 95, 97),
        (97, 95, 1),
        (1, 9217, 1),
        (1, 1201, 907),
        (907, 1201, 1),
        (907, 1, 1201),
        (2, 907, 601),
    ):
        a, b = RNG.standard_normal((m, k)).astype(dtype), RNG.standard_normal((k, n)).astype(dtype)
        for left, right in ((a, b), (np.asfortranarray(a), np.asfortranarray(b)), (a[::-1, ::-1], b[::-1, ::-1])):
            assert_product(matmul(left, right), left, right)
    assert 1201 * 907 > NUMPY_VECTOR_BELOW > 95 * 97


@pytest.mark.parametrize("left", range(4))
@pytest.mark.parametrize("right", range(4))
def test_a_batch_of_small_products_in_every_layout(left, right):
    """NumPy computes the smallest of them, our kernel the others."""
    for m in (7, 31):
        a = list(layouts(RNG.standard_normal((3, 29, m, 17))))[left]
        b = list(layouts(RNG.standard_normal((29, 17, 37))))[right]
        assert_product(matmul(a, b), a, b)
    assert 31 * 17 * 37 > NUMPY_EACH_BELOW > 7 * 17 * 37


@pytest.mark.parametrize(
    ("left", "right"),
    [
        *(((0, 3), (3, 2)), ((4, 0), (0, 5)), ((4, 3), (3, 0)), ((0, 4, 3), (3, 2)), ((2, 4, 0), (0, 5))),
        *(((0, 71, 73), (73, 67)), ((0, 71, 73), (1, 73, 67)), ((2, 0, 71, 73), (0, 73, 1))),  # large ones
    ],
)
def test_empty_axes(left, right):
    got = matmul(np.ones(left, np.float32), np.ones(right, np.float32))
    expected = np.matmul(np.ones(left, np.float32), np.ones(right, np.float32))
    assert got.shape == expected.shape
    assert got.dtype == np.float32
    assert (got == 0).all()


def test_nan_and_inf_stay_in_their_row_and_column():
    a, b = RNG.standard_normal((30, 40)).astype(np.float32), RNG.standard_normal((40, 70)).astype(np.float32)
    a[3, 5], b[7, 65], a[29, 0], b[0, 0] = np.nan, np.inf, np.inf, 0
    with np.errstate(invalid="ignore"):
        expected = np.matmul(a, b)
    got = tiled(a, b)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))


def test_foreign_byte_order_and_alignment_are_computed_all_the_same():
    a, b = RNG.standard_normal((70, 80)).astype(np.float32), RNG.standard_normal((80, 90)).astype(np.float32)
    crooked = np.zeros(a.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(a.shape)
    crooked[...] = a
    assert not crooked.flags.aligned
    for left in (crooked, a.astype(">f4"), a.astype("<f4")):
        got = matmul(left, b)
        assert got.dtype == np.float32 and got.dtype.isnative
        assert_product(got, a, b)


def test_read_only_operands():
    a = RNG.standard_normal((90, 91)).astype(np.float32)
    a.flags.writeable = False
    assert_product(matmul(a, a.T), a, a.T)


def test_integers_and_bools_as_numpy_has_them():
    a = RNG.integers(-5, 5, (4, 3))
    np.testing.assert_array_equal(matmul(a, a.T), a @ a.T)
    flags = a > 0
    assert matmul(flags, flags.T).dtype == bool


def test_errors_name_both_sides():
    a = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 3\)"):
        matmul(a, a)
    with pytest.raises(ValueError, match="two axes"):
        matmul(a, a[0])
    with pytest.raises(TypeError, match="float32 and float64"):
        matmul(a, a.T.astype(np.float64))
    with pytest.raises(TypeError, match="float16"):
        matmul(a.astype(np.float16), a.T.astype(np.float16))
    with pytest.raises(TypeError, match="int64"):
        matmul(a, np.ones((3, 2), np.int64))


GUARDED = """
import ctypes, itertools, mmap
import numpy as np
from tinygrad_qkv.kernels.matmul import _four_axes, _tiles

libc = ctypes.CDLL(None, use_errno=True)

def guarded(shape, at_end):
    "An array whose neighbouring pages may not be touched, flush against the one behind it or the one before it."
    size = int(np.prod(shape)) * 4
    page = mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    whole = np.frombuffer(memory, np.uint8)
    for start in (whole.ctypes.data, whole.ctypes.data + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0) == 0
    first = (pages + 1) * page - size if at_end else page
    return whole[first : first + size].view(np.float32).reshape(shape)

for (m, k, n), at_end in itertools.product([(14, 16, 32), (13, 17, 31), (1, 1, 1), (29, 40, 67)], (True, False)):
    for transposed in (False, True):
        a = guarded((k, m), at_end).T if transposed else guarded((m, k), at_end)
        b = guarded((n, k), at_end).T if transposed else guarded((k, n), at_end)
        out = guarded((m, n), at_end)
        a[...], b[...] = 1, 2
        _tiles(*_four_axes(a, b, out), 2**15, 2**19, parallel=False)
        assert (out == 2 * k).all()
print("untouched")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages with Linux's mprotect")
def test_nothing_past_the_ends_of_the_arrays_is_touched():
    run = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True)
    assert run.stdout == "untouched\n", (run.returncode, run.stderr)


WIDTHS = """
import itertools
import numpy as np
from tinygrad_qkv.kernels.matmul import _four_axes, _tiles
from tinygrad_qkv.kernels.simd import BLOCK_ROWS, VECTOR_BYTES, block_columns

rng = np.random.default_rng(0)
width = block_columns(4)
for m, k, n in itertools.product((1, BLOCK_ROWS, BLOCK_ROWS + 1), (1, 33), (1, width, width + 1)):
    a, b = rng.integers(-9, 9, (m, k)).astype(np.float32), rng.integers(-9, 9, (k, n)).astype(np.float32)
    for left, right in ((a, b), (np.asfortranarray(a), np.asfortranarray(b))):
        out = np.empty((m, n), np.float32)
        _tiles(*_four_axes(left, right, out), 2**15, 2**19, parallel=False)
        assert (out == a @ b).all(), (m, k, n)
print(VECTOR_BYTES)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names CPU features of x86-64")
@pytest.mark.parametrize(("features", "vector_bytes"), [("+sse2", 16), ("+avx,+avx2,+fma", 32)])
def test_register_blocks_of_lesser_hosts(features, vector_bytes):
    if not {word[1:] for word in features.split(",")} <= host_features():
        pytest.skip(f"this host cannot run {features}")
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_DISABLE_JIT"}
    env |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    run = subprocess.run([sys.executable, "-c", WIDTHS], env=env, capture_output=True, text=True)
    assert run.stdout == f"{vector_bytes}\n", (run.returncode, run.stderr)
