"""Backward and grad(): what is added where, on every order of derivative, and what is refused."""

import threading

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, check_grad, grad, no_grad
from tinygrad_qkv.autograd import ancestry, record
from tinygrad_qkv.observers import Watch


def leaf(values, dtype=np.float64):
    return Tensor(np.asarray(values, dtype), requires_grad=True)


# ---- where gradients add up


def test_a_tensor_used_twice_gets_both_contributions():
    a = leaf(3.0)
    b = a * a
    (b * b + b).backward()
    assert a.grad.item() == 4 * 27 + 2 * 3


def test_a_short_path_waits_for_a_long_one():
    x = leaf(2.0)
    h = x * x
    (h * 5.0 + ((h * 2.0) * 3.0) * h).backward()
    assert x.grad.item() == (5 + 12 * 4) * 4


def test_both_operands_may_be_the_same_tensor():
    m = np.array([[1.0, 2.0], [-1.0, 3.0]])
    x, g = leaf(m), np.array([[1.0, 0.0], [2.0, -1.0]])
    (x @ x).backward(Tensor(g))
    np.testing.assert_allclose(x.grad, g @ m.T + m.T @ g)


def test_leaves_accumulate_over_calls_and_inner_tensors_do_not():
    x = leaf([1.0, 2.0])
    h = x**3
    h.sum().backward(retain_graph=True)
    h.sum().backward()
    np.testing.assert_allclose(x.grad, 2 * 3 * np.array([1.0, 4.0]))
    assert h.grad is None
    x.zero_grad()
    assert x.grad is None


def test_doubling_thirty_times_takes_thirty_steps():
    x = leaf(1.0)
    y = x
    for _ in range(30):
        y = y + y
    assert len(ancestry([y._node])) == 31
    y.backward()
    assert x.grad.item() == 2.0**30


def test_no_two_gradients_share_memory():
    a, b, g = leaf([1.0, 2.0]), leaf([3.0, 4.0]), Tensor(np.array([1.0, -1.0]))
    (a + b).backward(g)
    arrays = [a.grad.data, b.grad.data, g.data]
    assert not any(np.shares_memory(p, q) for i, p in enumerate(arrays) for q in arrays[:i])
    (a * 2.0).backward(g)
    np.testing.assert_array_equal(b.grad, [1, -1])
    np.testing.assert_array_equal(g, [1, -1])


def test_a_gradient_does_not_alias_what_an_op_saved():
    mask = np.array([1.0, 0.0])
    x, y = leaf([1.0, 2.0]), leaf([5.0, 6.0])

    def gate(t):
        return record(t.data * mask, "gate", (t,), (mask,), (lambda g, m: m,), ("dx = m",))

    (gate(x) + gate(y)).sum().backward()
    x.grad.data[:] = 9
    assert mask.tolist() == [1, 0] and y.grad.tolist() == [1, 0]


# Large gradients are added into in place where nobody else sees them: in each case here somebody does.


def test_parts_of_one_rule_that_look_into_each_other_stay_apart():
    x, y = leaf(np.ones((61, 61))), leaf(np.ones((61, 61)))
    first = x * 3.0  # its gradient reaches x last

    def both(g):
        d = g * np.arange(61.0)
        return d, d.T

    z = record(x.data + y.data, "both", (x, y), (), both, ("dx = g", "dy = g"))
    (z.sum() + first.sum()).backward()
    np.testing.assert_array_equal(y.grad, np.broadcast_to(np.arange(61.0)[:, None], (61, 61)))
    np.testing.assert_array_equal(x.grad, y.grad.numpy().T + 3)


def test_a_turned_saved_array_is_not_added_into():
    mask = np.arange(61.0 * 67).reshape(67, 61)
    x = leaf(np.ones((61, 67)))
    first = x * 3.0
    y = record(x.data * mask.T, "gate", (x,), (mask,), (lambda g, m: m.T,), ("dx = m.T",))
    (y.sum() + first.sum()).backward()
    np.testing.assert_array_equal(mask.ravel(), np.arange(61.0 * 67))
    np.testing.assert_array_equal(x.grad, mask.T + 3)


def test_the_gradient_of_an_inner_tensor_is_not_added_into_further_down():
    x = leaf(np.ones((61, 67)))
    first = x * 3.0
    h = x.T
    gh, gx = grad((h * 2.0).sum() + first.sum(), [h, x])
    assert set(gh.numpy().ravel()) == {2} and set(gx.numpy().ravel()) == {5}


def test_a_gradient_that_goes_to_two_operands_is_not_added_into():
    x, y = leaf(np.ones((61, 67))), leaf(np.ones((61, 67)))
    first = x * 3.0
    (((x + y) * 5.0).sum() + first.sum()).backward()
    assert set(x.grad.numpy().ravel()) == {8} and set(y.grad.numpy().ravel()) == {5}


def test_a_leafs_gradient_lies_in_c_order_and_nobody_else_sees_it():
    w, x = leaf(np.ones((61, 67))), leaf(np.ones((71, 67)))
    (x @ w.mT).sum().backward()
    for grad_of in (w.grad, x.grad):
        assert grad_of.data.flags.c_contiguous and grad_of.data.flags.writeable
    assert not np.shares_memory(w.grad.data, x.grad.data)


# ---- higher orders: the same rules, run on Tensors


def test_every_derivative_of_exp_is_exp():
    x = leaf(0.7)
    y = x.exp()
    for _ in range(4):
        (y,) = grad(y, x, create_graph=True)
        assert y.item() == pytest.approx(np.exp(0.7), rel=1e-14)


def test_hessian_of_a_softmax_cross_entropy_is_symmetric_and_right():
    w = np.random.default_rng(0).normal(size=(3, 4))
    x = leaf([0.3, -1.0, 2.0, 0.1])

    def loss(x):
        return tq.cross_entropy((Tensor(w) @ x).tanh().unsqueeze(0), np.array([1]))

    (g,) = grad(loss(x), x, create_graph=True)
    hessian = np.stack([np.asarray(grad(g[i], x, retain_graph=True)[0]) for i in range(4)])
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)
    check_grad(lambda t: grad(loss(t), t, create_graph=True)[0], x)
    assert x.grad is None


def test_create_graph_gradients_are_tensors_with_history():
    x = leaf([1.0, 2.0])
    (x**3).sum().backward(create_graph=True)
    first = x.grad
    assert first.requires_grad
    x.grad = None
    (first**2).sum().backward()  # d/dx (3 x^2)^2 = 36 x^3
    np.testing.assert_allclose(x.grad, 36 * np.array([1.0, 8.0]))


# ---- grad()


def test_grad_returns_a_tuple_and_leaves_grad_alone():
    x, y = leaf([1.0, 2.0]), leaf([3.0, 5.0])
    gx, gy = grad((x * y).sum(), [x, y])
    assert gx.tolist() == [3, 5] and gy.tolist() == [1, 2]
    assert x.grad is None and y.grad is None


def test_grad_takes_tensors_as_inputs():
    x = leaf([1.0, 2.0])
    with pytest.raises(TypeError, match=r"input 0 is a str; inputs are one Tensor, or a list"):
        grad(x.sum(), {"x": x})
    with pytest.raises(TypeError, match="input 1 is a float"):
        grad(x.sum(), [x, 1.0])


def test_grad_of_an_inner_tensor_and_of_several_outputs():
    x = leaf([1.0, 2.0])
    h = x * 3.0
    (gh,) = grad([h.sum(), (h * h).sum()], h, grad_outputs=[2.0, 1.0])
    np.testing.assert_allclose(gh, 2 + 2 * np.array([3.0, 6.0]))
    (twice,) = grad([h, h], x, grad_outputs=[np.array([1.0, 0.0]), np.array([10.0, 10.0])])
    np.testing.assert_allclose(twice, [33.0, 30.0])


def test_grad_of_an_inner_tensor_leaves_what_made_it_for_later():
    x = leaf([1.0, 2.0])
    h = x * x
    (gh,) = grad((h * 3.0).sum(), h)
    h.backward(gh)  # the way on from h, which the call above had no need of
    np.testing.assert_allclose(x.grad, 3 * 2 * np.array([1.0, 2.0]))
    np.testing.assert_allclose(grad((h * 5.0).sum(), h)[0], 5)  # nor does it need what is freed by now


def test_grad_prunes_what_does_not_lead_to_the_inputs():
    x, y = leaf(2.0), leaf(3.0)
    ran = []

    def spy(t):
        return record(t.data * 1.0, "spy", (t,), (), (lambda g: ran.append(1) or g,), ("dx = g",))

    grad(x * spy(y), x)
    assert not ran


def test_grad_of_an_unused_input():
    x, y = leaf(2.0), leaf(3.0)
    with pytest.raises(RuntimeError, match=r"no output depends on input 0.*allow_unused"):
        grad(x * 2.0, y)
    assert grad(x * 2.0, [x, y], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="input 0 does not require grad"):
        grad(x * 2.0, Tensor(1.0))
    with pytest.raises(ValueError, match="1 outputs and 2 grad_outputs"):
        grad(x * 2.0, x, grad_outputs=[1.0, 2.0])


# ---- misuse is refused, and changes nothing


def test_second_backward_explains_itself():
    x = leaf([1.0, 2.0])
    for y in ((x * x).sum(), (x + 1.0).sum()):  # with and without saved values
        y.backward()
        before = x.grad.tolist()
        with pytest.raises(RuntimeError, match=r"already and freed.*retain_graph=True"):
            y.backward()
        assert x.grad.tolist() == before


def test_a_shared_trunk_is_freed_by_the_first_loss():
    x = leaf([1.0, 2.0])
    trunk = x * 3.0
    first, second = trunk.sum(), (trunk * 2.0).sum()
    first.backward()
    with pytest.raises(RuntimeError, match="op 'mul'"):
        second.backward()
    assert x.grad.tolist() == [3, 3]


def test_backward_needs_a_gradient_of_the_right_shape():
    x = leaf([1.0, 2.0])
    with pytest.raises(ValueError, match=r"scalar, got shape \(2,\)"):
        (x * 2.0).backward()
    with pytest.raises(ValueError, match=r"gradient of shape \(3,\) for a tensor of shape \(2,\)"):
        (x * 2.0).backward(Tensor([1.0, 1.0, 1.0]))
    assert x.grad is None
    (x * 2.0).backward([1.0, 10.0])
    assert x.grad.tolist() == [2, 20]
    assert x.grad.dtype == np.float64


def test_backward_outside_any_graph():
    with pytest.raises(RuntimeError, match=r"backward.*no graph: nothing that it was made from requires grad"):
        Tensor([1.0]).sum().backward()
    x = leaf([1.0])
    with no_grad():
        y = (x * 2.0).sum()
    with pytest.raises(RuntimeError, match="under no_grad"):
        y.backward()


def test_a_rule_of_the_wrong_shape_names_the_op():
    x = leaf(np.ones((2, 3)))
    y = record(x.data * 1.0, "bad", (x,), (), (lambda g: g[:, :2],), ("dx = g",))
    with pytest.raises(ValueError, match=r"op 'bad' for its operand 0 returned shape \(2, 2\).*\(2, 3\)"):
        y.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_rule_that_returns_no_floats_names_the_op(dtype, create_graph):
    x = leaf(np.ones((2, 3)))
    y = record(x.data * 1.0, "bad", (x,), (), (lambda g: np.ones(g.shape, dtype),), ("dx = g",))
    with pytest.raises(TypeError, match=f"op 'bad' for its operand 0 returned {dtype}.*floats.*float"):
        y.sum().backward(create_graph=create_graph)
    assert x.grad is None


# ---- threads


def test_two_threads_add_to_one_leaf():
    w = leaf(np.ones(1000))

    def work():
        for _ in range(200):
            (w * 1.0).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(w.grad.tolist()) == {800.0}


def test_adding_to_a_gradient_is_no_op_to_observers():
    class Listener(Watch):
        def op_ran(self, out, op, parents):
            heard.append(op)

    x, heard = leaf([1.0, 2.0]), []
    with Listener():
        for _ in range(2):
            (x * 3.0).sum().backward()
    assert heard == ["mul", "sum"] * 2 and x.grad.tolist() == [6.0, 6.0]
