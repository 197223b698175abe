"""Writing in place: what backward refuses afterwards, what flows, and what shared memory forbids."""

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, nn, no_grad, recording


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


# ---- every way to write, before backward and after


class Held(nn.Module):
    """One parameter."""

    def __init__(self):
        self.w = nn.Parameter(np.array([1.0, 2.0, 3.0]))


def stepped(optimiser):
    def write(p, model):
        p.grad = Tensor(np.ones(3))
        optimiser([p], lr=0.1).step()
        p.grad = None

    return write


def through(view):
    def write(p, model):
        with no_grad():
            t = view(p)
            t += 1.0

    return write


def under_no_grad(change):
    def write(p, model):
        with no_grad():
            change(p)

    return write


def moved_by_its_gradient(p, model):
    p.grad = Tensor(np.ones(3))
    p.data -= 0.1 * p.grad
    p.grad = None


WRITES = {
    "[...] =": under_no_grad(lambda p: p.__setitem__(..., 0.5)),
    "[i] =": under_no_grad(lambda p: p.__setitem__(1, 0.5)),
    "[mask] =": under_no_grad(lambda p: p.__setitem__(np.array([True, False, True]), 0.5)),
    "+=": under_no_grad(lambda p: p.__iadd__(1.0)),
    "-=": under_no_grad(lambda p: p.__isub__(1.0)),
    "*=": under_no_grad(lambda p: p.__imul__(2.0)),
    "/=": under_no_grad(lambda p: p.__itruediv__(2.0)),
    "data =": lambda p, model: setattr(p, "data", np.zeros(3)),
    "data = tensor": lambda p, model: setattr(p, "data", tq.zeros(3, dtype="float64")),
    "data -= lr * grad": moved_by_its_gradient,
    "write()": lambda p, model: p.write(np.zeros(3)),
    "init": lambda p, model: setattr(p, "data", nn.init.normal(p.shape, std=0.02, dtype="float64")),
    "load_state_dict": lambda p, model: model.load_state_dict({"w": np.zeros(3)}),
    "SGD": stepped(nn.optim.SGD),
    "Adam": stepped(nn.optim.Adam),
    "AdamW": stepped(nn.optim.AdamW),
    "reshape": through(lambda p: p.reshape(1, 3)),
    "slice": through(lambda p: p[1:]),
    "flip": through(lambda p: p.flip(0)),
    "detach": through(lambda p: p.detach()),
    "view of a detach": through(lambda p: p.detach().unsqueeze(0)[:, :2]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_every_way_to_write_is_refused_between_forward_and_backward_and_fine_afterwards(write):
    model = Held()
    p, x = model.w, leaf([1.0, 10.0, 100.0])
    with recording():
        loss = (p * x).sum()
    write(p, model)
    with pytest.raises(
        RuntimeError,
        match=r"op 'mul' with result shape \(3,\) \(recorded at .*test_ops_in_place\.py:\d+\) saved an operand",
    ):
        loss.backward()
    assert x.grad is None and p.grad is None
    (p * x).sum().backward()  # a new forward pass reads the new values
    np.testing.assert_array_equal(x.grad, p.numpy())
    write(p, model)  # after backward


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_what_no_rule_reads_is_fine(write):
    model = Held()
    p, x = model.w, leaf([1.0, 10.0, 100.0])
    loss = ((p + x).reshape(3, 1) * 2.0 - p.sum()).sum()
    write(p, model)
    loss.backward()
    np.testing.assert_array_equal(x.grad, [2.0, 2.0, 2.0])
    np.testing.assert_array_equal(p.grad, [-1.0, -1.0, -1.0])


def test_a_view_that_was_recorded_is_one_memory_with_its_base():
    x = leaf([1.0, 2.0, 3.0])
    h = x * 1.0
    tail = h[1:]
    loss = (tail * tail).sum()
    with no_grad():
        h[2] = 7.0
    with pytest.raises(RuntimeError, match=r"op 'mul'.*saved an operand"):
        loss.backward()


def test_a_write_to_a_detached_copy_or_clone_changes_nothing():
    x = leaf([1.0, 2.0])
    h = x * 3.0
    loss = (h * h).sum()
    copy = h.clone().detach()
    copy += 1.0
    other = Tensor(h)
    other[...] = 0.0
    loss.backward()
    assert x.grad.tolist() == [18.0, 36.0]


@pytest.mark.parametrize("rule", ["mask", "index", "targets"])
def test_masks_and_indices_are_copied_so_that_later_writes_do_not_reach_the_rules(rule):
    x = leaf(np.arange(12.0).reshape(4, 3))
    given = {"mask": np.eye(4, 3) > 0, "index": np.array([0, 2]), "targets": np.array([0, 1, 2, 0])}[rule]
    f = {
        "mask": lambda x, c: tq.where(c, x, 0.0),
        "index": lambda x, c: x[c],
        "targets": lambda x, c: tq.cross_entropy(x, c),
    }[rule]
    expected = tq.grad(f(x, Tensor(given)).sum(), x)[0].numpy()
    c = Tensor(given)
    loss = f(x, c).sum()
    c[...] = given[::-1].copy()
    np.testing.assert_array_equal(tq.grad(loss, x)[0], expected)


def test_a_second_backward_through_the_result_of_a_write():
    x = leaf([1.0, 2.0])
    h = x * 2.0
    h *= x
    (h * 1.0).sum().backward()
    assert x.grad.tolist() == [4.0, 8.0]
    h += 1.0  # the result is there, its history has been freed
    with pytest.raises(RuntimeError, match=r"op 'mul' already and freed what it had saved.*retain_graph=True"):
        h.sum().backward()
    assert x.grad.tolist() == [4.0, 8.0]


def test_higher_orders_refuse_too():
    x = leaf([1.0, 2.0])
    h = x * 1.0
    (dx,) = tq.grad((h**3).sum(), x, create_graph=True)
    with no_grad():
        h += 1.0
    with pytest.raises(RuntimeError, match="changed in place"):
        dx.sum().backward()


def test_the_gradient_itself_may_be_written_in_place():
    x = leaf([1.0, 2.0])
    (x * 3.0).sum().backward()
    x.grad *= 0.5
    x.grad[0] = 0.0
    assert x.grad.tolist() == [0.0, 1.5]
    (x * 3.0).sum().backward()
    assert x.grad.tolist() == [3.0, 4.5]
