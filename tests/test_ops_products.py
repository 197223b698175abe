"""Products: ranks of matmul, refusals, einsum beyond the table, dtypes and precision."""

import numpy as np
import pytest
from op_gradients import value_and_gradients

from tinygrad_qkv import Tensor, ops
from tinygrad_qkv.ops import products


def ones(*shape: int) -> Tensor:
    return Tensor(np.ones(shape))


# ---- matmul


def test_a_vector_is_a_row_on_the_left_and_a_column_on_the_right():
    v, m, w = np.array([1.0, -2.0]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), np.array([1.0, 10.0, 100.0])
    for f, right in ((ops.matmul, m), (lambda v, m: m @ v, m.T)):
        y, dv, dm = value_and_gradients(f, v, right, weights=w)
        np.testing.assert_array_equal(y, v @ m)
        np.testing.assert_array_equal(dv, m @ w)
        np.testing.assert_array_equal(dm if right is m else dm.T, np.outer(v, w))


def test_a_matrix_shared_by_a_batch_gets_the_sum_over_it():
    x, w, g = (np.random.default_rng(k).normal(size=s) for k, s in enumerate(((2, 3, 5), (5, 7), (2, 3, 7))))
    _, dx, dw = value_and_gradients(ops.matmul, x, w, weights=g)
    np.testing.assert_allclose(dw, np.einsum("bik,bij->kj", x, g), rtol=1e-13)
    np.testing.assert_allclose(dx, g @ w.T, rtol=1e-13)


def test_one_tensor_on_both_sides_gets_both_gradients():
    x, g = np.array([[1.0, 2.0], [-1.0, 3.0]]), np.array([[1.0, 0.0], [2.0, -1.0]])
    _, dx = value_and_gradients(lambda x: x @ x, x, weights=g)
    np.testing.assert_array_equal(dx, g @ x.T + x.T @ g)


def test_arrays_and_lists_stand_on_either_side():
    x = Tensor(np.eye(2), requires_grad=True)
    for y in (np.ones((2, 2)) @ x, x @ np.ones((2, 2)), [[1.0, 1.0], [1.0, 1.0]] @ x, x @ [[1.0, 1.0], [1.0, 1.0]]):
        assert isinstance(y, Tensor) and y.requires_grad and y.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ((2, 3), (2, 3), r"last axis of the left operand \(3\) and the second last .* \(2\) must agree; transpose"),
        ((2, 3), (5, 7), r"\(2, 3\) @ \(5, 7\).* must agree$"),
        ((3,), (2,), r"the only axis of the right one \(2\)"),
        ((3, 5), (3,), "only axis"),
        ((5,), (2, 3, 7), r"\(5,\) @ \(2, 3, 7\)"),
        ((2, 3, 5), (3, 5, 7), r"leading axes \(2,\) and \(3,\) do not broadcast"),
        ((), (2,), r"got \(\) @ \(2,\); use \*"),
        ((2, 2), (), r"use \* for scalars"),
    ],
)
def test_shapes_without_a_product_are_named_with_the_likely_fix(left, right, message):
    with pytest.raises(ValueError, match=message):
        ones(*left) @ ones(*right)


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        (np.float32, np.float32, np.float32),
        (np.float64, np.float64, np.float64),
        (np.float32, np.float64, np.float64),
        (np.int64, np.float32, np.float32),
        (np.int64, np.int64, np.int64),
        (np.int32, np.float64, np.float64),
    ],
)
def test_dtypes_of_products(left, right, result):
    a, b = np.arange(6).reshape(2, 3).astype(left), np.arange(6).reshape(3, 2).astype(right)
    y = Tensor(a) @ Tensor(b)
    assert y.dtype == result
    np.testing.assert_array_equal(np.asarray(y), a @ b)


def test_gradients_keep_the_dtype_of_each_operand():
    a, b = Tensor(np.ones((2, 3), "f4"), requires_grad=True), Tensor(np.ones((3, 2)), requires_grad=True)
    (a @ b).sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (np.float32, np.float64)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.float64])
def test_the_gradient_passes_a_constant_of_another_dtype(dtype):
    a, w = np.array([[1, 2, 4], [0, 1, 3]]).astype(dtype), Tensor(np.ones((3, 2), "f4"), requires_grad=True)
    for y, expected in ((Tensor(a) @ w, a.T @ np.ones((2, 2))), (w @ Tensor(a), np.ones((3, 3)) @ a.T)):
        w.grad = None
        y.sum().backward()
        assert w.grad.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(w.grad), expected)


def test_infinities_and_nan_pass_like_in_numpy():
    a, b = np.array([[np.inf, 1.0], [np.nan, 1.0], [0.0, 2.0]]), np.array([[1.0], [3.0]])
    np.testing.assert_array_equal(np.asarray(Tensor(a) @ Tensor(b)), [[np.inf], [np.nan], [6]])


@pytest.mark.parametrize("size", [1, 2, 17, 64, 130])
def test_sizes_around_the_kernels_tiles(size):
    a, b = (np.random.default_rng(k).normal(size=(size, size + k)) for k in (0, 1))
    y, da, db = value_and_gradients(lambda a, b: a @ b, a, b, weights=1.0)
    np.testing.assert_allclose(y, a @ b, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(da, np.ones(y.shape) @ b.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(db, a.T @ np.ones(y.shape), rtol=1e-12, atol=1e-12)


# ---- dot, tensordot, outer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.dot(ones(2, 3), ones(2, 3)), "must agree"),
        (lambda: ops.tensordot(ones(2, 3), ones(2, 3), 1), r"sizes \[3\], \[2\]"),
        (lambda: ops.tensordot(ones(2, 3), ones(2, 3), ([0, 1], [0])), "sizes"),
        (lambda: ops.tensordot(ones(2, 3), ones(2, 3), ([2], [0])), "out of bounds"),
    ],
)
def test_products_over_axes_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- einsum


def test_a_label_of_size_1_is_broadcast_in_value_and_gradient():
    a, b = np.array([[0.0, 1.0, 2.0]]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    y, da, db = value_and_gradients(lambda a, b: ops.einsum("ij,ij->j", a, b), a, b)
    np.testing.assert_array_equal(y, [0, 7, 18])
    np.testing.assert_array_equal(da, [[5, 7, 9]])
    np.testing.assert_array_equal(db, [[0, 1, 2], [0, 1, 2]])


def test_a_label_that_only_one_operand_has_is_summed_in_value_and_gradient():
    a, b = np.arange(6.0).reshape(2, 3), np.array([1.0, 10.0])
    y, da, db = value_and_gradients(lambda a, b: ops.einsum("ij,i->i", a, b), a, b)
    np.testing.assert_array_equal(y, [3, 120])
    np.testing.assert_array_equal(da, [[1, 1, 1], [10, 10, 10]])
    np.testing.assert_array_equal(db, [3, 12])


def test_a_label_stretched_by_another_operand_and_summed_alone():
    _, da, db = value_and_gradients(lambda a, b: ops.einsum("ij,i->j", a, b), [[0.0, 1.0, 2.0]], [3.0, 4.0])
    np.testing.assert_array_equal(da, [[7, 7, 7]])
    np.testing.assert_array_equal(db, [3, 3])


def test_one_tensor_as_several_operands():
    x = np.array([1.0, 2.0, 3.0])
    _, dx = value_and_gradients(lambda x: ops.einsum("i,i,i->", x, x, x), x)
    np.testing.assert_array_equal(dx, 3 * x**2)


def test_the_diagonal_gets_the_gradient_of_a_trace():
    _, dx = value_and_gradients(lambda x: ops.einsum("ii", x), np.ones((3, 3)))
    np.testing.assert_array_equal(dx, np.eye(3))


def test_capital_letters_come_before_small_ones_in_the_implied_result():
    a, b = np.ones((2, 3)), np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(np.asarray(ops.einsum("bA,Ac", Tensor(a), Tensor(b))), np.einsum("bA,Ac", a, b))
    y = ops.einsum("aB,cD", Tensor(a), Tensor(b))
    np.testing.assert_array_equal(np.asarray(y), np.einsum("aB,cD", a, b))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("ij,jk", ((2, 3),), "names 2 operands, got 1"),
        ("ij,jk->ik", ((2, 3), (4, 5)), "'j' stands for sizes"),
        ("ijk->i", ((2, 3),), "does not fit the shapes"),
        ("i->i", ((2, 3),), "does not fit the shapes"),
        ("ij->k", ((2, 3),), "one that no operand has"),
        ("ij->ii", ((2, 3),), "twice"),
        ("ii->i", ((2, 3),), "of one operand"),
        ("i1->i", ((2, 3),), "of the form"),
        ("..i->i", ((2, 3),), "of the form"),
        ("....i->i", ((2, 3),), "of the form"),
        ("i->j->k", ((2,),), "of the form"),
        ("i-i", ((2,),), "of the form"),
    ],
)
def test_subscripts_that_make_no_sense_are_refused(text, shapes, message):
    with pytest.raises(ValueError, match=message):
        ops.einsum(text, *(ones(*shape) for shape in shapes))


def test_einsum_wants_a_text_first():
    with pytest.raises(TypeError, match="'ij,jk->ik'"):
        ops.einsum(ones(2), [0])


def test_the_gradient_of_transposed_matrices_lies_as_they_do():
    """Keys in q @ k.mT, one matrix or a batch: what comes after, back to the weights, reads rows in one piece."""
    for lead in ((), (2,), (2, 3)):
        q, b = np.ones((*lead, 5, 7), np.float32), np.ones((*lead, 11, 7), np.float32).swapaxes(-1, -2)
        g = np.arange(5 * 11 * int(np.prod(lead)), dtype=np.float32).reshape(*lead, 5, 11)
        db = products.MATMUL_RULES[1](g, q, b)
        np.testing.assert_array_equal(db, q.swapaxes(-1, -2) @ g)
        assert db.swapaxes(-1, -2).flags.c_contiguous
