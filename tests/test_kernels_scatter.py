"""scatter_add: repeats counted exactly, in the order of the ids."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import scatter_add

RNG = np.random.default_rng(4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (7, 127), (13, 128), (11, 129), (1013, 257)])
def test_equals_adding_one_row_after_the_other(dtype, count, width):
    g = RNG.standard_normal((count, width)).astype(dtype)
    ids = RNG.integers(0, 5, count)
    expected = np.zeros((9, width), dtype)
    for n in range(count):
        expected[ids[n]] += g[n]
    np.testing.assert_array_equal(scatter_add(g, ids, 9), expected)


def test_ten_thousand_repeats_of_one_id():
    out = scatter_add(np.ones((10_000, 3), np.float32), np.full(10_000, 1), 3)
    np.testing.assert_array_equal(out, [[0] * 3, [10_000] * 3, [0] * 3])


def test_empty_axes_and_strides():
    assert (scatter_add(np.ones((0, 4), np.float32), np.ones(0, np.int64), 3) == np.zeros((3, 4))).all()
    assert scatter_add(np.ones((5, 0)), np.zeros(5, np.int64), 2).shape == (2, 0)
    g, ids = RNG.standard_normal((6, 8)), np.array([0, 3, 0, 1, 3, 3])
    expected = scatter_add(g, ids, 4)
    np.testing.assert_array_equal(scatter_add(np.asfortranarray(g), ids.astype(np.int32), 4), expected)
    np.testing.assert_array_equal(scatter_add(g[::-1], ids[::-1], 4), scatter_add(g[::-1].copy(), ids[::-1].copy(), 4))
    row = np.broadcast_to(g[0], g.shape)
    np.testing.assert_allclose(scatter_add(row, ids, 4), np.bincount(ids)[:, None] * g[0], rtol=1e-15)


def test_errors():
    with pytest.raises(ValueError, match=r"\(N, D\)"):
        scatter_add(np.ones((2, 3)), np.zeros(3, np.int64), 4)
    with pytest.raises(TypeError, match="integers"):
        scatter_add(np.ones((2, 3)), np.zeros(2), 4)
    with pytest.raises(TypeError, match="int64"):
        scatter_add(np.ones((2, 3), np.int64), np.zeros(2, np.int64), 4)
