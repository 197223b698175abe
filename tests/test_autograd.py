"""The tape: the order of nodes, depth, what is freed when, and what recording keeps."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import GradientError, Tensor, check_grad, grad, recording
from tinygrad_qkv.autograd import OUTPUT, ancestry, record


def leaf(values, dtype=np.float64):
    return Tensor(np.asarray(values, dtype), requires_grad=True)


def test_order_of_nodes_is_reverse_topological():
    x = leaf([1.0, 2.0])
    y = ((x * 2.0).exp() + x).sum()
    order = ancestry([y._node])
    place = {node: i for i, node in enumerate(order)}
    assert all(place[p] > place[n] for n in order for p in n.parents if p in place)
    assert [n.op for n in order] == ["sum", "add", "exp", "mul", "leaf"]


# ---- depth and memory


def test_a_chain_of_100_000_ops_neither_recurses_nor_leaks():
    x = leaf([1.0, 2.0])
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.sum().backward()
    node = weakref.ref(y._node)
    del y
    assert node() is None
    assert x.grad.tolist() == [1, 1]


def test_saved_values_go_with_backward_and_the_rest_by_reference_counting():
    x = leaf(np.ones(10))
    h = x * 2.0
    y = (h * h).sum()
    hidden = weakref.ref(h)
    gc.collect()
    gc.disable()
    try:
        del h
        assert hidden() is not None  # saved by the product
        y.backward()
        assert hidden() is None
    finally:
        gc.enable()
    assert [n.op for n in ancestry([y._node])] == ["sum", "mul", "mul", "leaf"]  # names and edges stay


def test_a_graph_without_backward_is_freed_by_reference_counting_too():
    x = leaf(np.ones(10))
    y = tq.softmax(x * 2.0, -1).exp()
    node = weakref.ref(y._node)
    gc.collect()
    gc.disable()
    try:
        del y
        assert node() is None
    finally:
        gc.enable()


def test_memory_is_constant_over_training_steps():
    w = leaf(np.ones((20, 20)))
    x = Tensor(np.ones((20, 20)))

    def steps(n):
        for _ in range(n):
            w.grad = None
            (x @ w).tanh().sum().backward()
            w.data -= 1e-3 * w.grad

    tracemalloc.start()
    steps(1500)  # Python's own free lists fill up first
    before = tracemalloc.get_traced_memory()[0]
    steps(500)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 5_000  # one leaked (20, 20) array a step would be 1,600,000


# ---- the record


def test_recording_keeps_values_gradients_and_lines_and_nothing_otherwise():
    x = leaf([1.0, 2.0])
    with recording():
        h = x * 3.0
        loss = (h * h).sum()
    loss.backward()
    assert h._node.value.tolist() == [3, 6] and h.grad.tolist() == [6, 12]
    assert x._node.value.tolist() == [1, 2]
    assert str(h._node.line).endswith(f"test_autograd.py:{h._node.line.number}")
    plain = x * 3.0
    assert plain._node.value is None and plain._node.line is None


def test_the_record_is_not_changed_by_a_later_step():
    w = leaf([1.0, 2.0])
    with recording():
        loss = (w * w).sum()
    loss.backward()
    w.data -= w.grad.data
    assert w._node.value.tolist() == [1, 2]


def test_the_record_of_an_inner_tensor_is_not_changed_by_a_write():
    with recording():
        h = leaf([1.0, 2.0]) * 3.0
        tripled = h._node
        h += 1.0
    assert tripled.value.tolist() == [3, 6] and h._node.value.tolist() == [4, 7]


def test_a_rule_may_give_a_constant_on_every_order():
    x = leaf([1.0, 2.0])
    y = record(3 * x.data, "triple", (x,), (np.full(2, 3.0),), (lambda g, c: c,), ("dx = c",))
    (first,) = grad(y.sum(), x, create_graph=True)
    assert isinstance(first, Tensor) and first.tolist() == [3, 3]


def test_a_saved_output_is_the_result_itself_on_every_order():
    seen = []

    def rule(g, y):
        seen.append(type(y).__name__)
        return g * y

    x = leaf(0.5)
    y = record(np.exp(x.data), "own_exp", (x,), (OUTPUT,), (rule,), ("dx = g * y",))
    (first,) = grad(y, x, create_graph=True)
    (second,) = grad(first, x)
    assert second.item() == pytest.approx(np.exp(0.5)) and seen == ["Tensor", "ndarray"]


# ---- check_grad


def test_check_grad_wants_tensors_from_its_function():
    for f in (lambda x: x.numpy(), lambda x: [x, 1.0]):
        with pytest.raises(TypeError, match="returns a Tensor or a list of them, got"):
            check_grad(f, np.ones(2))


def test_check_grad_finds_a_wrong_rule_and_says_where():
    def cube(x):
        return record(x.data**3, "cube", (x,), (x,), (lambda g, x: g * 2 * x * x,), ("dx = g * 2 * x * x",))

    with pytest.raises(GradientError, match=r"argument 0 of shape \(2,\), index \(1,\): expected .* got"):
        check_grad(cube, np.array([1.0, 2.0]))
    with pytest.raises(GradientError, match="drops the gradient"):
        check_grad(lambda x: x.detach() * 2.0, np.array([1.0]))
    with pytest.raises(ValueError, match="at least one float input"):
        check_grad(lambda i: i, np.array([1]))
