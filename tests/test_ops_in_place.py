"""Writing in place: what backward refuses afterwards, what flows, and what shared memory forbids."""

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, no_grad, recording


def leaf(values, dtype=np.float64):
    return Tensor(np.asarray(values, dtype), requires_grad=True)


def test_constants_are_copies_of_the_users_arrays():
    source = np.array([3.0, 5.0])
    x, c = Tensor(source, requires_grad=True), np.array([1.0, 10.0])
    y = (x * x * c).sum()
    source[:] = 0
    c[:] = 0
    y.backward()
    assert x.grad.tolist() == [6, 100]


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.__iadd__(10.0),
        lambda h: h.__isub__(1.0),
        lambda h: h.__imul__(2.0),
        lambda h: h.__itruediv__(2.0),
        lambda h: h.__setitem__(0, 7.0),
        lambda h: setattr(h, "data", np.zeros(2)),
    ],
    ids=["+=", "-=", "*=", "/=", "[]=", "data="],
)
def test_backward_refuses_a_saved_operand_that_was_written_to(write):
    x = leaf([1.0, 2.0])
    h = x * 2.0
    y = (h * h).sum()
    write(h)
    with pytest.raises(RuntimeError, match=r"op 'mul'.*saved an operand.*changed in place"):
        y.backward()
    assert x.grad is None


@pytest.mark.parametrize(
    ("write", "slope"), [(lambda h: h.__imul__(h), 4.0), (lambda h: h.__itruediv__(h), 0.0)], ids=["*=", "/="]
)
def test_a_tensor_may_be_written_with_itself(write, slope):
    """h *= h is h = h * h: what the rule reads is h before the write."""
    x = leaf([1.0, 2.0])
    h = x * 1.0
    write(h)
    (h * np.array([1.0, 10.0])).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [slope / 2, slope * 10])


def test_backward_refuses_a_saved_result_that_was_written_to():
    x = leaf([1.0, 2.0])
    y = x.exp()
    loss = y.sum()
    y += 1.0
    with pytest.raises(RuntimeError, match=r"op 'exp'.*saved its result"):
        loss.backward()


def test_the_refusal_names_the_line_when_recorded():
    x = leaf([1.0, 2.0])
    with recording():
        h = x * 2.0
        y = (h * h).sum()
    h += 1.0
    with pytest.raises(RuntimeError, match=r"recorded at .*test_ops_in_place\.py:\d+"):
        y.backward()


def test_writes_through_a_view_count_for_the_base_and_the_other_way_round():
    for through_view in (True, False):
        x = leaf([[1.0, 2.0], [3.0, 4.0]])
        base = x * 1.0
        with no_grad():
            view = base.reshape(4)
        loss = (base * base).sum()
        with no_grad():
            target = view if through_view else base
            target += 1.0
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_writes_after_backward_are_fine():
    w = leaf([1.0, 2.0])
    for _ in range(3):
        loss = (w * w).sum()
        loss.backward()
        w.data -= 0.1 * w.grad
        w.grad = None
    np.testing.assert_allclose(w, np.array([1.0, 2.0]) * 0.8**3)


def test_a_write_between_forward_and_backward_with_retained_graph_is_refused():
    w = leaf([1.0, 2.0])
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    w.data -= 0.1 * w.grad
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_gradients_flow_around_and_into_what_was_written():
    x, v = leaf([1.0, 2.0, 3.0]), leaf(5.0)
    y = x * 2.0
    y[0] = v * 3.0
    y[2] = y[1] * 10.0
    y += 1.0
    assert y.tolist() == [16, 5, 41]
    (y * Tensor(np.array([1.0, 10.0, 100.0]))).sum().backward()
    assert x.grad.tolist() == [0, 2 * (10 + 1000), 0]
    assert v.grad.item() == 3


def test_a_constant_becomes_part_of_the_graph_when_a_recorded_value_is_written_into_it():
    x = leaf([1.0, 2.0])
    y = tq.zeros(3, dtype=np.float64)
    y[1:] = x * x
    y.sum().backward()
    assert x.grad.tolist() == [2, 4]


def test_a_leaf_that_requires_grad_is_not_written_while_recording():
    w = leaf([1.0, 2.0])
    with pytest.raises(RuntimeError, match=r"leaf that requires grad.*no_grad"):
        w += 1.0
    with pytest.raises(RuntimeError, match="leaf that requires grad"):
        w[0] = 1.0
    with no_grad():
        w += 1.0
        w[0] = 7.0
    assert w.tolist() == [7, 3] and w.is_leaf and w.requires_grad


def test_a_recorded_write_through_shared_memory_is_refused():
    x = leaf([1.0, 2.0])
    y = x * 2.0
    first = y[:1]
    with pytest.raises(RuntimeError, match="shares its memory"):
        first += 1.0
    with pytest.raises(RuntimeError, match=r"t\[i\] = t\[i\] \+ 1"):
        y[0] += 1.0
    del first
    y[0] = y[0] + 1.0  # a view that is gone does not stand in the way
    assert y.tolist() == [3, 4]
    cut = y.detach()
    with pytest.raises(RuntimeError, match="shares its memory"):
        y += x
    assert cut.tolist() == [3, 4]


def test_a_write_keeps_shape_and_dtype():
    y = tq.ones(2)
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        y += tq.ones((3, 2))
    i = Tensor([1, 2])
    with pytest.raises(ValueError, match="int64"):
        i += 0.5
    with pytest.raises(ValueError, match="read-only view"):
        tq.broadcast_to(tq.ones(1), (3,))[0] = 2.0
    with pytest.raises(ValueError, match=r"t\.data = .* keeps shape \(2,\)"):
        y.data = np.zeros(3, np.float32)
