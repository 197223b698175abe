"""Random bits by number: Threefry's published answers, any piece of the sequence alone, and what the bits look like."""

import numba
import numpy as np
import pytest

from tinygrad_qkv.kernels.random_bits import fill_bits, keep_above, threefry

SEED = np.uint64(0x9E3779B97F4A7C15)

# Python calls no building block that is compiled into kernels alone.
filled = numba.njit(lambda seed, first, out: fill_bits(seed, first, out))


def bits(first: int, n: int, seed: np.uint64 = SEED) -> np.ndarray:
    out = np.empty(n, np.uint32)
    filled(seed, first, out)
    return out


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_known_answers_of_threefry_2x32_with_13_rounds(key, counter, words):
    """The vectors that the authors published with their Random123 library."""
    with np.errstate(over="ignore"):
        assert threefry(*map(np.uint32, (*key, *counter))) == words


def test_counter_and_seed_are_64_bits_wide():
    low, high = bits(0, 8), bits(2**33, 8)  # pair 0 and pair 2^32
    assert (low != high).all()
    key = np.uint32(SEED & np.uint64(2**32 - 1)), np.uint32(SEED >> np.uint64(32))
    with np.errstate(over="ignore"):
        words = [threefry(*key, np.uint32(pair), np.uint32(1)) for pair in range(4)]
    np.testing.assert_array_equal(high, np.reshape(words, -1))
    for changed in (SEED ^ np.uint64(1), SEED ^ np.uint64(2**63)):
        assert (bits(0, 8, changed) != low).all()


@pytest.mark.parametrize("first", [0, 1, 2, 7, 2**33 - 3])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, 32, 33, 1021])
def test_a_piece_is_the_same_as_in_the_whole(first, n):
    start = max(first - 5, 0)
    whole = bits(start, first - start + n + 5)
    np.testing.assert_array_equal(bits(first, n), whole[first - start :][:n])


def test_bits_are_even_and_independent():
    """Each of the 32 bits is set half of the time, alone and against its neighbours: within 5 standard deviations."""
    n = 2**16
    drawn = bits(0, n)
    rows = (drawn[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.int64)
    spread = 5 * 0.5 * n**0.5
    assert (abs(rows.sum(0) - n / 2) < spread).all()
    for step in (1, 2, 3, 64, 1024):
        assert (abs((rows[step:] ^ rows[:-step]).sum(0) - (n - step) / 2) < spread).all()
    next_seed = (bits(0, n, SEED + np.uint64(1))[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.int64)
    assert (abs((rows ^ next_seed).sum(0) - n / 2) < spread).all()
    assert len(np.unique(drawn)) > n - 10  # 0.5 repeats are expected


@pytest.mark.parametrize(("p", "limit"), [(1.0, 2**32 - 1), (0.5, 2**31 - 1), (0.25, 2**30 - 1), (1e-12, 0)])
def test_keep_above(p, limit):
    assert keep_above(p) == limit and keep_above(p).dtype == np.uint32
