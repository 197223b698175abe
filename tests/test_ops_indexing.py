"""Indexing, lookup and assignment: repeated indices add up, wrong ones raise, later changes move nothing."""

import re

import numpy as np
import pytest
from op_gradients import gradient, value_and_gradients

from tinygrad_qkv import Tensor, ops

X = np.arange(12.0).reshape(3, 4)


# ---- repeated indices


@pytest.mark.parametrize(
    ("f", "weights", "dx"),
    [
        (lambda x: x[[0, 0, 2]], [1.0, 10.0, 100.0], [11, 0, 100]),
        (lambda x: x[np.array([[0, 0], [2, 0]])], [[1.0, 10.0], [100.0, 1000.0]], [1011, 0, 100]),
        (lambda x: x[Tensor([-1, 2, -3])], [1.0, 10.0, 100.0], [100, 0, 11]),
        (lambda x: x[[0, 0]][0], 1.0, [1, 0, 0]),
        (lambda x: x[[0, 0]][1], 1.0, [1, 0, 0]),
        (lambda x: x[None, [1, 1]], [[1.0, 10.0]], [0, 11, 0]),
        (lambda x: x[x > 1.5], 7.0, [0, 7, 7]),
        (lambda x: x.take_along_axis([1, 1, 0], 0), [1.0, 10.0, 100.0], [100, 11, 0]),
        (lambda x: np.take(x, [2, 2]), [1.0, 10.0], [0, 0, 11]),
        (
            lambda x: ops.embedding(x.reshape(3, 1), [[0, 2], [0, 0]])[..., 0],
            [[1.0, 10.0], [100.0, 1000.0]],
            [1101, 0, 10],
        ),
        (lambda x: x[1:100], [1.0, 10.0], [0, 1, 10]),
        (lambda x: x[::-2], [1.0, 10.0], [10, 0, 1]),
        (lambda x: x[True], [[1.0, 10.0, 100.0]], [1, 10, 100]),
        (lambda x: x[False], 1.0, [0, 0, 0]),
    ],
)
def test_each_mention_of_an_element_counts(f, weights, dx):
    np.testing.assert_array_equal(gradient(f, [1.0, 2.0, 3.0], weights), dx)


def test_rows_columns_and_pairs_of_a_matrix():
    rows = gradient(lambda x: x[:, [1, 1]], X, [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    np.testing.assert_array_equal(rows, [[0, 11, 0, 0], [0, 22, 0, 0], [0, 33, 0, 0]])
    pairs = gradient(lambda x: x[[0, 0, 1], [1, 1, 1]], X, [1.0, 10.0, 100.0])
    np.testing.assert_array_equal(pairs, [[0, 11, 0, 0], [0, 100, 0, 0], [0, 0, 0, 0]])


def test_many_lookups_of_few_rows_are_counted_exactly():
    ids = np.arange(20_000) % 3
    w = Tensor(np.zeros((3, 8), np.float32), requires_grad=True)
    ops.embedding(w, ids).sum().backward()
    np.testing.assert_array_equal(np.asarray(w.grad), np.bincount(ids)[:, None] * np.ones((1, 8)))


def test_a_row_of_infinities_leaves_the_others_alone():
    table = [[np.inf, np.nan], [1.0, 2.0], [3.0, 4.0]]
    y, dw = value_and_gradients(lambda w: ops.embedding(w, [1, 2, 1]), table)
    np.testing.assert_array_equal(y, [[1, 2], [3, 4], [1, 2]])
    np.testing.assert_array_equal(dw, [[0, 0], [2, 2], [1, 1]])


# ---- forms


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (Tensor(1), X[1]),
        (np.int64(1), X[1]),
        ([Tensor(0), Tensor(2)], X[[0, 2]]),
        ([True, False, True], X[[0, 2]]),
        (Tensor(X > 5), X[X > 5]),
        (range(2), X[:2]),
        (slice(Tensor(0), Tensor(2)), X[:2]),
        (np.array([0, 2], np.uint8), X[[0, 2]]),
        ((..., None), X[..., None]),
        ([], X[[]]),
        (np.zeros((3, 4), bool), X[:0, 0]),
        (((0, 1), (1, 2)), X[[0, 1], [1, 2]]),
    ],
)
def test_indices_are_numpys_and_tensors_too(index, expected):
    y = Tensor(X)[index]
    assert y.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(y), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_an_empty_slice_keeps_the_dtype(dtype):
    y = Tensor(np.arange(4), dtype=dtype)[5:]
    assert y.shape == (0,) and y.dtype == dtype


@pytest.mark.parametrize(
    "index",
    [3, -4, [0, 3], (0, 4), (0, 0, 0), 1.0, [1.0], np.array([1.0]), "a", np.ones(4, bool), np.ones((3, 3), bool)],
    ids=str,
)
def test_a_wrong_index_raises(index):
    with pytest.raises(IndexError):
        Tensor(X)[index]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: ops.embedding(w, [0, 3]), IndexError, "ids from 0 to 2"),
        (lambda w: ops.embedding(w, [-1]), IndexError, "got -1 to -1"),
        (lambda w: ops.embedding(w, [0.5]), TypeError, "integers"),
        (lambda w: ops.embedding(w, [True]), TypeError, "integers"),
        (lambda w: ops.embedding(w[0], [0]), ValueError, r"\(rows, width\)"),
        (lambda w: w.take_along_axis(np.full((3, 1), 4), 1), IndexError, "out of bounds"),
        (lambda w: w.take_along_axis(np.full((3, 1), 1.0), 1), IndexError, "integers"),
        (lambda w: w.take_along_axis([0, 1, 2], 1), ValueError, "2 axes"),
        (lambda w: w.take_along_axis(np.zeros((3, 1), int), 2), ValueError, "out of bounds"),
        (lambda w: np.take(w, [0], axis=5), ValueError, "out of bounds"),
    ],
)
def test_a_wrong_lookup_says_why(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor(X))


@pytest.mark.parametrize("make", [np.array, Tensor, list])
def test_an_index_changed_after_the_forward_moves_no_gradient(make):
    index, x = make([0, 0]), Tensor([1.0, 2.0], requires_grad=True)
    y = x[index]
    index[0] = 1
    y.sum().backward()
    assert x.grad.tolist() == [2, 0]


def test_iteration_ends_and_each_element_carries_its_gradient():
    x = Tensor([1.0, 2.0, 3.0], requires_grad=True)
    a, b, c = x
    (a + 10 * b + 100 * c).backward()
    assert x.grad.tolist() == [1, 10, 100] and len(list(x)) == 3
    with pytest.raises(TypeError, match="0-d"):
        list(Tensor(1.0))


# ---- assignment


@pytest.mark.parametrize(
    ("index", "value", "y", "dx", "dvalue"),
    [
        (1, 7.0, [2, 7, 6], [8, 0, 24], 14),
        (slice(1, None), [7.0, 8.0], [2, 7, 8], [8, 0, 0], [14, 16]),
        (slice(None), 7.0, [7, 7, 7], [0, 0, 0], 42),
        (..., [[7.0]], [7, 7, 7], [0, 0, 0], [[42]]),
        ([True, False, True], [7.0, 8.0], [7, 4, 8], [0, 16, 0], [14, 16]),
        ([True, False, True], 7.0, [7, 4, 7], [0, 16, 0], 28),
        ([False, False, False], 7.0, [2, 4, 6], [8, 16, 24], 0),
        ([0, 2], [7.0, 8.0], [7, 4, 8], [0, 16, 0], [14, 16]),
        ([0, 0], [7.0, 8.0], [8, 4, 6], [0, 16, 24], [0, 16]),
        ([0, -3, 0], [7.0, 8.0, 9.0], [9, 4, 6], [0, 16, 24], [0, 0, 18]),
        ([0, 0], 7.0, [7, 4, 6], [0, 16, 24], 14),
    ],
)
def test_assignment_cuts_what_it_overwrites_and_of_several_writers_the_last_counts(index, value, y, dx, dvalue):
    x, v = (Tensor(np.array(a), requires_grad=True) for a in ([1.0, 2.0, 3.0], value))
    z = x * 2
    z[index] = v
    (z * z).sum().backward()
    for got, expected in ((z, y), (x.grad, dx), (v.grad, dvalue)):
        np.testing.assert_array_equal(np.asarray(got), expected)


def test_a_constant_takes_over_the_history_of_what_is_written_into_it():
    a, z = Tensor(3.0, requires_grad=True), Tensor([0.0, 0.0])
    z[0] = a * 2
    z.sum().backward()
    assert a.grad.item() == 2 and z.tolist() == [6, 0]


def test_assignment_converts_within_floats_only():
    x = Tensor([1.0, 2.0])
    x[0], x[1:] = 3, np.array([0.5])
    assert x.dtype == np.float32 and x.tolist() == [3, 0.5]
    with pytest.raises(TypeError, match="cannot write float32 into a tensor of int64"):
        Tensor([1, 2])[0] = 0.5


@pytest.mark.parametrize(
    ("index", "shape", "place"), [(0, (3,), r"\(2,\)"), ((0, 0), (2,), r"\(\)"), ([0, 0, 1], (2, 2), "3, 2")]
)
def test_a_value_that_does_not_fit_is_named_with_both_shapes(index, shape, place):
    with pytest.raises(ValueError, match=f"value of shape {re.escape(str(shape))} does not broadcast .*{place}"):
        Tensor(np.ones((3, 2)))[index] = np.ones(shape)


@pytest.mark.parametrize(("index", "value"), [(5, 1.0), (slice(None), [1.0, 2.0]), (np.ones(4, bool), 1.0)])
def test_a_wrong_assignment_raises_and_changes_nothing(index, value):
    x = Tensor([1.0, 2.0, 3.0])
    with pytest.raises((IndexError, ValueError)):
        x[index] = value
    assert x.tolist() == [1, 2, 3]


def test_elements_swap_and_shift_within_one_tensor():
    x = Tensor([1.0, 2.0, 3.0])
    x[[0, 1]] = x[[1, 0]]
    assert x.tolist() == [2, 1, 3]
    x[1:] = x[:-1]
    assert x.tolist() == [2, 2, 1]
    x[0] += 5
    assert x.tolist() == [7, 2, 1]


# ---- one_hot


def test_one_hot():
    assert ops.one_hot([0, 2]).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert ops.one_hot(Tensor(1), 3, dtype=bool).tolist() == [False, True, False]
    assert ops.one_hot(np.zeros((2, 0), int), 3).shape == (2, 0, 3)
    for wrong, error in (([3], IndexError), ([-1], IndexError), ([0.5], TypeError)):
        with pytest.raises(error):
            ops.one_hot(wrong, 3)
    with pytest.raises(ValueError, match="or None for the largest id"):
        ops.one_hot([0, 2], -1)


def test_no_ids_at_all():
    assert ops.embedding(np.ones((3, 5)), []).shape == (0, 5)
    with pytest.raises(TypeError, match="ids are integers"):
        ops.embedding(np.ones((3, 5)), np.empty(0))
