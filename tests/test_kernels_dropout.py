"""Dropout by number: the mask against the bits themselves, its place in an array, and what is selected away."""

import numpy as np
import pytest
from test_kernels_random_bits import filled

from tinygrad_qkv.kernels import dropout
from tinygrad_qkv.kernels.elementwise import STRETCH
from tinygrad_qkv.kernels.random_bits import keep_above

DTYPES = [np.float32, np.float64]
SEED = 2**64 - 59


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 31, STRETCH - 1, STRETCH, STRETCH + 1, 5 * STRETCH + 17, 100_003])
def test_elements_are_kept_by_their_number(dtype, n):
    x, p = np.linspace(-3, 5, n).astype(dtype), 0.3
    drawn = np.empty(n, np.uint32)
    filled(np.uint64(SEED), 0, drawn)
    expected = np.where(drawn > keep_above(p), x * dtype(1 / (1 - p)), dtype(0))
    y = dropout(x, p, SEED)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(p):
    """Within 5 standard deviations of p."""
    n = 200_000
    dropped = (dropout(np.ones(n, np.float32), p, 7) == 0).mean()
    assert abs(dropped - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_number_is_the_place_in_c_order():
    x = np.arange(1.0, 1 + 2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    y = dropout(x, 0.5, 11)
    np.testing.assert_array_equal(y.reshape(-1), dropout(x.reshape(-1), 0.5, 11))
    turned = x.transpose(3, 1, 0, 2)
    np.testing.assert_array_equal(dropout(turned, 0.5, 11), dropout(turned.copy(), 0.5, 11))
    np.testing.assert_array_equal(dropout(x[..., ::2], 0.5, 11), dropout(x[..., ::2].copy(), 0.5, 11))
    assert (dropout(x, 0.5, 12) != y).any()


def test_dropped_nan_and_inf_are_0():
    x = np.tile(np.array([np.nan, np.inf, -np.inf], np.float32), 500)
    keep = dropout(np.ones_like(x), 0.5, 3) != 0
    y = dropout(x, 0.5, 3)
    np.testing.assert_array_equal(y, np.where(keep, x, 0))
    assert not np.signbit(y[~keep]).any()
    np.testing.assert_array_equal(dropout(x, 1.0, 3), np.zeros_like(x))


def test_odd_arrays():
    assert dropout(np.ones((0, 3)), 0.5, 1).shape == (0, 3)
    assert dropout(np.array(2.0), 0.5, 1).shape == ()
    x = np.arange(60.0).reshape(3, 20)
    np.testing.assert_array_equal(dropout(x.astype(">f8"), 0.5, 1), dropout(x, 0.5, 1))
    x.flags.writeable = False
    spread = np.broadcast_to(x[:1], (3, 20))
    np.testing.assert_array_equal(dropout(spread, 0.5, 1), dropout(spread.copy(), 0.5, 1))
    with pytest.raises(TypeError, match="dropout works on float32 and float64, got int64"):
        dropout(np.ones(3, np.int64), 0.5, 1)


@pytest.mark.parametrize("p", [-0.5, 0, 1.5, np.nan])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(ValueError, match="probability"):
        dropout(np.ones(3, np.float32), p, 1)
