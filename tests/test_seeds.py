"""The gradient that backward starts with: what is taken, and what is refused, with nothing changed."""

import numpy as np
import pytest

from tinygrad_qkv import Tensor, grad, no_grad


def leaf(values):
    return Tensor(np.asarray(values, np.float64), requires_grad=True)


@pytest.mark.parametrize("gradient", [[1, 10], (1.0, 10), np.float32([1, 10]), Tensor([1.0, 10.0]), [Tensor(1.0), 10]])
def test_a_gradient_is_floats_or_python_numbers_of_the_same_shape(gradient):
    x = leaf([1.0, 2.0])
    (x * 2.0).backward(gradient)
    assert x.grad.tolist() == [2, 20] and x.grad.dtype == np.float64
    assert grad(x * 2.0, x, [gradient])[0].tolist() == [2, 20]


def test_numbers_are_gradients_of_scalars():
    x = leaf([1.0, 2.0])
    for one in (3, 3.0, np.int64(3), np.float32(3)):
        x.grad = None
        x.sum().backward(one)
        assert x.grad.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("gradient", "kind", "message"),
    [
        (np.ones(3), ValueError, r"gradient of shape \(3,\) for a tensor of shape \(2,\) \(op 'mul'\)"),
        (np.ones((2, 1)), ValueError, r"gradient of shape \(2, 1\)"),
        (1.0, ValueError, r"gradient of shape \(\) for a tensor of shape \(2,\)"),
        (
            np.ones(2, int),
            TypeError,
            r"got int64 of shape \(2,\) for a tensor of float64 and shape \(2,\) \(op 'mul'\)",
        ),
        (Tensor([1, 1]), TypeError, "a gradient is made of floats, got int64"),
        (np.ones(2, bool), TypeError, "got bool"),
        (np.ones(2) + 1j, TypeError, "got complex128"),
        ([1j, 2], TypeError, "got complex128"),
        (["a", "b"], TypeError, "a gradient is made of floats, got <U1"),
        (None, ValueError, r"without a gradient needs a scalar, got shape \(2,\) \(op 'mul'\)"),
    ],
)
def test_another_shape_or_dtype_is_refused_and_nothing_is_lost(gradient, kind, message):
    x = leaf([1.0, 2.0])
    y = x * x
    with pytest.raises(kind, match=rf"backward\(\).*{message}"):
        y.backward(gradient)
    with pytest.raises(kind, match=rf"grad\(\).*{message}"):
        grad(y, x, None if gradient is None else [gradient])
    assert x.grad is None
    y.backward([1.0, 1.0])  # the graph is still there
    assert x.grad.tolist() == [2, 4]


def test_an_unused_input_is_noticed_before_anything_is_freed():
    x, y = leaf([1.0, 2.0]), leaf([3.0])
    z = (x * x).sum()
    with pytest.raises(RuntimeError, match=r"no output depends on input 1 of shape \(1,\)"):
        grad(z, [x, y])
    assert grad(z, [x, y], allow_unused=True)[0].tolist() == [2, 4]


def test_no_tensor_and_no_graph():
    x = leaf([1.0, 2.0])
    with no_grad():
        cut = (x * x).sum()
    with pytest.raises(RuntimeError, match=r"backward\(\): this tensor of shape \(\) has no graph"):
        cut.backward()
    with pytest.raises(RuntimeError, match=r"grad\(\): this tensor of shape \(\) has no graph"):
        grad([x.sum(), cut], x)
    with pytest.raises(TypeError, match="needs a Tensor, got float"):
        grad(1.0, x)


def test_in_place_after_the_graph_is_freed():
    x = leaf([1.0, 2.0])
    h = x * 2.0
    y = (h * h).sum()
    y.backward()
    with no_grad():
        h += 1.0  # nobody needs the old values any more
    with pytest.raises(RuntimeError, match=r"op 'sum' already and freed.*retain_graph=True"):
        y.backward()
    with pytest.raises(RuntimeError, match="freed"):
        grad(y, x)
    assert x.grad.tolist() == [8, 16]
