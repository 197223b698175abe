"""New tensors: dtypes, leaves, and random numbers from a generator or a default stream."""

import numpy as np
import pytest

from tinygrad_qkv import Tensor, manual_seed, ops


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: ops.zeros(3), np.float32),
        (lambda: ops.ones((2, 3), np.int64), np.int64),
        (lambda: ops.full(3, 7), np.int64),
        (lambda: ops.full(3, 0.5), np.float32),
        (lambda: ops.full(3, True), np.bool_),
        (lambda: ops.full((), np.float64(2)), np.float64),
        (lambda: ops.arange(3), np.int64),
        (lambda: ops.arange(0.0, 1.0, 0.25), np.float32),
        (lambda: ops.arange(3, dtype="float64"), np.float64),
        (lambda: ops.linspace(0, 1, 3), np.float32),
        (lambda: ops.eye(2), np.float32),
        (lambda: ops.one_hot([0], 2), np.float32),
        (lambda: ops.zeros_like(Tensor([1])), np.int64),
        (lambda: ops.ones_like(np.ones(2)), np.float64),
        (lambda: ops.full_like(Tensor([1.0]), 2, dtype=bool), np.bool_),
        (lambda: ops.uniform(3), np.float32),
        (lambda: ops.normal(3, dtype="float64"), np.float64),
        (lambda: ops.integers(0, 3, 5), np.int64),
    ],
)
def test_floats_are_float32_unless_said_otherwise(make, dtype):
    assert make().dtype == dtype


def test_new_tensors_can_be_leaves():
    for make in (ops.zeros, ops.ones, lambda n, requires_grad: ops.full(n, 0.5, requires_grad=requires_grad)):
        x = make(2, requires_grad=True)
        (x * 3).sum().backward()
        assert x.is_leaf and x.grad.tolist() == [3, 3]
    with pytest.raises(TypeError, match="float32 and float64"):
        ops.zeros(2, np.int64, requires_grad=True)


def test_random_numbers_repeat_with_a_generator_and_with_the_seed():
    draws = (
        lambda g: ops.normal((3, 5), 1.0, 2.0, generator=g),
        lambda g: ops.uniform((3, 5), -1.0, 1.0, generator=g),
        lambda g: ops.integers(0, 100, (3, 5), generator=g),
    )
    for draw in draws:
        a, b = (np.asarray(draw(np.random.default_rng(3))) for _ in range(2))
        np.testing.assert_array_equal(a, b)
        manual_seed(3)
        c, d = np.asarray(draw(None)), np.asarray(draw(None))
        manual_seed(3)
        np.testing.assert_array_equal(c, np.asarray(draw(None)))
        assert (c != d).any()


def test_random_numbers_have_the_range_that_was_asked_for():
    u = np.asarray(ops.uniform(10_000, -2.0, 5.0, generator=np.random.default_rng(0)))
    n = np.asarray(ops.normal(10_000, 3.0, 0.5, generator=np.random.default_rng(0)))
    k = np.asarray(ops.integers(-1, 2, 1000, generator=np.random.default_rng(0)))
    assert u.min() >= -2 and u.max() < 5 and abs(u.mean() - 1.5) < 0.1
    assert abs(n.mean() - 3) < 0.05 and abs(n.std() - 0.5) < 0.05
    assert set(k) == {-1, 0, 1}


@pytest.mark.parametrize(
    "draw", [ops.uniform, ops.normal, lambda shape, generator: ops.integers(0, 2, shape, generator=generator)]
)
def test_a_generator_is_numpys(draw):
    with pytest.raises(TypeError, match=r"np\.random\.default_rng"):
        draw(3, generator=5)


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.5, ValueError), ("a", ValueError)])
def test_a_seed_is_a_non_negative_integer(seed, error):
    with pytest.raises(error, match="non-negative integer"):
        manual_seed(seed)


def test_dropout_draws_from_a_stream_of_its_own():
    manual_seed(5)
    weights = ops.normal((7,)).tolist()
    manual_seed(5)
    ops.dropout(ops.ones(7), 0.5)
    assert ops.normal((7,)).tolist() == weights


def test_grids():
    rows, columns = ops.meshgrid(Tensor([1, 2]), Tensor([3, 4, 5]))
    assert rows.tolist() == [[1, 1, 1], [2, 2, 2]] and columns.tolist() == [[3, 4, 5], [3, 4, 5]]
    assert [g.shape for g in ops.meshgrid(Tensor([1, 2]), Tensor([3, 4, 5]), indexing="xy")] == [(3, 2), (3, 2)]
