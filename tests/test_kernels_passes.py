"""Passes over rows at every register width: each length, what lies behind a row's end, folds and stored values."""

import numba
import numpy as np
import pytest

from tinygrad_qkv.kernels.buffers import empty_lines
from tinygrad_qkv.kernels.passes import end_of_stream, row_pass, short_blocks, short_rows

RNG = np.random.default_rng(6)
DTYPES = [np.float32, np.float64]
WIDTHS = [16, 32, 64]  # bytes; LLVM splits a register that is wider than the host's
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 131, 257]


def compiled(function):
    return function if numba.config.DISABLE_JIT else numba.njit(function, error_model="numpy")


def make_pass(width):
    @row_pass(into=2, folds=(np.maximum, np.add), vector_bytes=width)
    def formula(x, y, scale):
        product = x * y
        return product, (y - x) / scale, product, np.maximum(x, y)

    @compiled
    def run(x, y, scale, first, second):
        return formula(x, y, scale, first, second)

    return run


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stores_and_folds_of_every_length(width, dtype):
    run, eps = make_pass(width), np.finfo(dtype).eps
    for n in LENGTHS:
        x, y = RNG.standard_normal((2, n)).astype(dtype)
        first, second = np.full((2, n + 5), 7, dtype)
        top, total = run(x, y, 3, first[:n], second[:n])
        np.testing.assert_array_equal(first[:n], x * y)
        np.testing.assert_array_equal(second[:n], (y - x) / dtype(3))
        assert (first[n:] == 7).all() and (second[n:] == 7).all()
        assert top == (x * y).max()
        exact = np.maximum(x, y).astype(np.longdouble)
        assert abs(total - exact.sum()) <= 4 * eps * abs(exact).sum()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_streamed_has_the_same_bits(width, dtype):
    @row_pass(into=2, vector_bytes=width, streams=True)
    def formula(x, y):
        return x * y, y - x

    @compiled
    def run(x, y, first, second, stream):
        formula(x, y, first, second, stream)
        end_of_stream(stream)

    for n in LENGTHS:
        x, y = RNG.standard_normal((2, n)).astype(dtype)
        for stream in (False, True):
            first, second = empty_lines((n + 5,), np.dtype(dtype)), np.full(n + 5, 7, dtype)
            first[:] = 7
            run(x, y, first[:n], second[:n], stream)
            np.testing.assert_array_equal(first, np.append(x * y, np.full(5, 7)).astype(dtype))
            np.testing.assert_array_equal(second, np.append(y - x, np.full(5, 7)).astype(dtype))


def test_an_input_may_be_written_and_nothing_folds_to_nothing():
    @row_pass(into=1, folds=(np.add,))
    def formula(x, y):
        return x + y, x

    @compiled
    def run(x, y):
        return formula(x, y, y)

    x, y = np.arange(131.0), np.ones(131)
    assert run(x, y) == x.sum()
    np.testing.assert_array_equal(y, x + 1)
    assert run(x[:0], y[:0]) == 0


def test_a_sum_keeps_nan_and_inf_and_a_maximum_passes_over_nan():
    @row_pass(folds=(np.add, np.maximum))
    def formula(x):
        return x, x

    run = compiled(lambda x: formula(x))
    for n in (1, 5, 64, 100, 131):
        for value, top in ((np.nan, 0.0), (np.inf, np.inf), (-np.inf, 0.0)):
            x = np.zeros(n + 1)
            x[n // 2] = value
            total, most = run(x)
            np.testing.assert_equal(total, value)
            if not (numba.config.DISABLE_JIT and np.isnan(value)):
                assert most == top


def make_short(width):
    @short_rows(into=2, vector_bytes=width)
    def formula(x, y):
        total = np.add.reduce(x * y, -1, keepdims=True)
        below = x - np.maximum.reduce(x, -1, keepdims=True)
        return below / (2 + total * total), y * np.log(1 + total * total)

    @compiled
    def run(x, y, blocks, first, second):
        for block in range(blocks):
            formula(x, y, first, second, block)

    return run


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_rows_of_every_length_and_number(width, dtype):
    run, eps = make_short(width), np.finfo(dtype).eps
    lanes = width // np.dtype(dtype).itemsize
    for n in {1, 2, lanes - 1, lanes, lanes + 1, 2 * lanes - 1, 2 * lanes}:
        for rows in (1, 3, 4, 5, 7, 8, 9, 17):
            x, y = RNG.standard_normal((2, rows, n)).astype(dtype)
            first, second = np.full((2, rows + 1, n), 7, dtype)
            blocks = 1 if numba.config.DISABLE_JIT else -(-rows // (8 if n <= lanes else 4))
            run(x, y, blocks, first[:rows], second[:rows])
            total = (x.astype(np.longdouble) * y).sum(1, keepdims=True)
            below = x - x.max(1, keepdims=True).astype(np.longdouble)
            bound = 20 * eps * (1 + abs(x * y).sum(1, keepdims=True)) ** 2
            assert (abs(first[:rows] - below / (2 + total**2)) <= bound * abs(below) + eps).all()
            assert (abs(second[:rows] - y * np.log1p(total**2)) <= bound * abs(y) + eps).all()
            assert (first[rows:] == 7).all() and (second[rows:] == 7).all()


def test_short_blocks_hold_all_rows():
    x = np.ones((17, 1), np.float32)
    assert short_blocks(x) == (1 if numba.config.DISABLE_JIT else 3)
