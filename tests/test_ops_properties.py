"""Properties that hold for any shape: values as in NumPy, gradients as their linear maps demand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import (
    arrays,
    basic_indices,
    broadcastable_shapes,
    integer_array_indices,
    mutually_broadcastable_shapes,
)

from tinygrad_qkv import Tensor, check_grad, ops

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
SIDES = {"max_dims": 4, "max_side": 3}
NUMBERS = st.floats(-2, 2).map(lambda x: round(x, 3))


def sample(shape: tuple[int, ...]) -> np.ndarray:
    """Irregular numbers of both signs, no two alike."""
    n = np.arange(np.prod(shape, dtype=int))
    return np.asarray((0.2 + n * 0.618 % 1.7) * np.where(n % 2, -1, 1)).reshape(shape)


@st.composite
def array_and_axes(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    n = len(shape)
    axes = draw(st.none() | st.integers(-n, n - 1) | st.sets(st.integers(0, n - 1)).map(tuple))
    return sample(shape), axes, draw(st.booleans())


@quick
@given(
    mutually_broadcastable_shapes(num_shapes=2, min_side=0, **SIDES),
    st.sampled_from(["add", "mul", "sub", "div", "maximum"]),
)
def test_any_broadcast_is_numpys_and_undone(shapes, name):
    (left, right), result = shapes.input_shapes, shapes.result_shape
    a, b = sample(left), sample(right) + 0.1
    f = getattr(ops, name)
    y = f(Tensor(a), Tensor(b))
    expected = {"add": np.add, "mul": np.multiply, "sub": np.subtract, "div": np.divide, "maximum": np.maximum}[name](
        a, b
    )
    assert y.shape == result
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-14)
    if y.size:
        check_grad(f, a, b, directions=1)


@quick
@given(array_and_axes(), st.sampled_from(["sum", "mean", "max", "min", "prod", "var"]))
def test_any_reduction_is_numpys(given_array, name):
    x, axes, keepdims = given_array
    f = getattr(ops, name)
    y = f(Tensor(x), axes, keepdims=keepdims)
    expected = getattr(np, name)(x, axis=axes, keepdims=keepdims)
    assert y.shape == np.shape(expected)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-12, atol=1e-14)
    check_grad(lambda t: f(t, axes, keepdims=keepdims), x, directions=1)


@quick
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
def test_any_index_is_numpys_and_its_gradient_counts_the_mentions(data, shape):
    """For weights w, the gradient at an element is the sum of w over the places where it was put."""
    index = data.draw(basic_indices(shape, allow_newaxis=True) | integer_array_indices(shape))
    x = Tensor(sample(shape), requires_grad=True)
    y = x[index]
    np.testing.assert_array_equal(np.asarray(y), x.data[index])
    w = sample(y.shape) if y.shape else np.array(2.5)
    y.backward(w)
    number = np.arange(x.size).reshape(shape)[index]
    expected = np.bincount(np.ravel(number), weights=np.ravel(w), minlength=x.size).reshape(shape)
    np.testing.assert_allclose(np.asarray(x.grad), expected, rtol=1e-13, atol=1e-15)


@quick
@given(st.data(), st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple))
def test_any_assignment_is_numpys(data, shape):
    index = data.draw(basic_indices(shape, allow_ellipsis=True))
    value_shape = np.zeros(shape)[index].shape
    value = sample(
        data.draw(
            broadcastable_shapes(value_shape, max_dims=len(value_shape), min_side=1, max_side=3).filter(
                lambda s: np.broadcast_shapes(s, value_shape) == value_shape
            )
        )
    )
    expected = sample(shape)
    got = Tensor(expected)
    expected[index], got[index] = value, value
    np.testing.assert_array_equal(np.asarray(got), expected)


@quick
@given(arrays(np.float64, st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), elements=NUMBERS), st.data())
def test_softmax_is_a_distribution_that_a_shift_does_not_change(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    y = np.asarray(ops.softmax(x, axis))
    np.testing.assert_allclose(y.sum(axis), np.ones(y.sum(axis).shape), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(ops.softmax(x + 100, axis)), y, rtol=1e-10)
    np.testing.assert_allclose(np.exp(np.asarray(ops.log_softmax(x, axis))), y, rtol=1e-12)
    leaf = Tensor(x, requires_grad=True)
    ops.softmax(leaf, axis).backward(sample(x.shape))
    np.testing.assert_allclose(np.asarray(leaf.grad).sum(axis), np.zeros(y.sum(axis).shape), atol=1e-12)


@quick
@given(mutually_broadcastable_shapes(signature="(i,j),(j,k)->(i,k)", max_dims=2, max_side=3))
def test_any_matrix_product_is_numpys(shapes):
    a, b = (sample(shape) for shape in shapes.input_shapes)
    np.testing.assert_allclose(np.asarray(ops.matmul(a, b)), a @ b, rtol=1e-12, atol=1e-14)
    check_grad(ops.matmul, a, b, directions=1)


LABELS = st.text("abc", max_size=3)


@quick
@given(LABELS, LABELS, st.data())
def test_any_einsum_of_two_is_numpys(left, right, data):
    """Repeated labels are diagonals, labels of one operand alone are summed."""
    size = {"a": 2, "b": 3, "c": 1}
    result = data.draw(st.permutations(sorted(set(left + right))))
    text = f"{left},{right}->{''.join(result[: data.draw(st.integers(0, len(result)))])}"
    x, y = (sample(tuple(size[c] for c in labels)) for labels in (left, right))
    np.testing.assert_allclose(np.asarray(ops.einsum(text, x, y)), np.einsum(text, x, y), rtol=1e-12, atol=1e-13)
    check_grad(lambda x, y: ops.einsum(text, x, y), x, y, directions=1)
