"""Hooks on tensors, kept gradients, and what `t.gradient()` says when there is none."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from tinygrad_qkv import Tensor, grad, nn, no_grad, recording
from tinygrad_qkv.nn import functional as F


def leaf(values):
    return Tensor(np.asarray(values, np.float64), requires_grad=True)


# ---- hooks


def test_a_hook_sees_the_whole_gradient_once():
    x, seen = leaf([1.0, 2.0]), []
    h = x * 2.0
    h.register_hook(lambda g: seen.append(g.tolist()))
    (h * 3.0 + h * h).sum().backward()
    assert seen == [[3 + 2 * 2.0, 3 + 2 * 4.0]]
    assert x.grad.tolist() == [14.0, 22.0]


@pytest.mark.parametrize("create_graph", [False, True])
def test_what_a_hook_returns_goes_on_in_place_of_the_gradient(create_graph):
    x = leaf([1.0, -2.0])
    h = x * 2.0
    h.register_hook(lambda g: g * 10.0)
    h.register_hook(lambda g: np.asarray(g) + 1)  # sees what the first one left
    x.register_hook(lambda g: g / 2.0)
    h.sum().backward(create_graph=create_graph)
    assert x.grad.tolist() == [11.0, 11.0]


def test_a_hook_is_part_of_a_recorded_gradient():
    x = leaf(3.0)
    h = x * x
    h.register_hook(lambda g: g * x)
    (dx,) = grad(h, x, create_graph=True)
    assert dx.item() == 2 * 3 * 3
    (ddx,) = grad(dx, x)
    assert ddx.item() == 2 * 2 * 3


def test_a_hook_on_a_leaf_runs_before_its_gradient_is_added():
    x = leaf([1.0])
    x.register_hook(lambda g: g * 5.0)
    for expected in (10.0, 20.0):
        (x * 2.0).sum().backward()
        assert x.grad.item() == expected


def test_a_removed_hook_runs_no_more():
    x, seen = leaf([1.0]), []
    handle = x.register_hook(lambda g: seen.append("first"))
    with x.register_hook(lambda g: seen.append("second")):
        (x * 2.0).sum().backward()
    (x * 2.0).sum().backward()
    handle.remove()
    handle.remove()
    (x * 2.0).sum().backward()
    assert seen == ["first", "second", "first"]


def test_hooks_do_not_change_the_bits():
    x, w = np.random.default_rng(0).normal(size=(37, 41)), np.random.default_rng(1).normal(size=(41, 41))
    found = []
    for hooked in (False, True):
        a, b = leaf(x), leaf(w)
        h = (a @ b).tanh()
        h = h * h.sum(-1, keepdims=True) + h
        if hooked:
            h.register_hook(lambda g: None)
        (h @ b).sum().backward()
        found.append((a.grad.numpy(), b.grad.numpy()))
    for plain, watched in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, watched)


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_hooks_run_on_q_k_v_and_on_every_projection(path):
    attention, seen = nn.MultiHeadAttention(8, 2), set()
    x = Tensor(np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32))
    y, record = attention(x, path=path, need=("q", "k", "v"))
    for name in ("q", "k", "v"):
        t = getattr(record, name)
        t.register_hook(lambda g, name=name, shape=t.shape: seen.add(name) if g.shape == shape else None)
    for name, p in attention.named_parameters():
        p.register_hook(lambda g, name=name: seen.add(name))
    (y * y).sum().backward()
    assert seen == {"q", "k", "v", *(name for name, _ in attention.named_parameters())}


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (lambda g: g.sum(), ValueError, r"hook '<lambda>' on op 'mul' returned float64 of shape \(\); .*shape \(2,\)"),
        (lambda g: g.astype("int64"), ValueError, "returned int64 of shape .*floats"),
        (lambda g: 3, TypeError, "returned int; it returns None or the new gradient"),
        (lambda g: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_hook_that_fails_leaves_graph_and_gradients_as_they_were(hook, error, message):
    x = leaf([1.0, 2.0])
    (x * 1.0).sum().backward()
    h = x * 2.0
    y = (h * h).sum()
    handle = h.register_hook(hook)
    with pytest.raises(error, match=message):
        y.backward()
    assert x.grad.tolist() == [1.0, 1.0]
    handle.remove()
    y.backward()
    assert x.grad.tolist() == [1 + 8.0, 1 + 16.0]


def test_hooks_are_refused_where_no_gradient_will_come():
    with pytest.raises(RuntimeError, match=r"register_hook\(\): this tensor of shape \(2,\) has no graph"):
        Tensor([1.0, 2.0]).register_hook(print)
    with pytest.raises(RuntimeError, match=r"retain_grad\(\): this tensor"):
        Tensor([1.0, 2.0]).retain_grad()
    with pytest.raises(TypeError, match="a hook is a function, got int"):
        leaf([1.0]).register_hook(3)


# ---- kept gradients


def test_retain_grad_keeps_the_last_gradient_and_does_not_accumulate():
    x = leaf([1.0, 2.0])
    h = x * 2.0
    h.retain_grad()
    h.register_hook(lambda g: g * 7.0)
    y = (h * h).sum()
    for _ in range(2):
        y.backward(retain_graph=True)
        assert h.grad.tolist() == [28.0, 56.0]  # after the hook
    x.retain_grad()  # a leaf keeps its gradient anyway
    assert x.grad.tolist() == [112.0, 224.0]


def test_recording_keeps_all():
    x = leaf([1.0, 2.0])
    with recording():
        h = x * 2.0
        k = h * h
    k.sum().backward()
    assert h.grad.tolist() == [4.0, 8.0] and k.grad.tolist() == [1.0, 1.0]


# ---- why there is none


def here() -> str:
    """This file and the line of the caller, as a message names them."""
    import sys

    return re.escape(f"{Path(__file__).name}:{sys._getframe(1).f_lineno}")


def test_gradient_is_grad_where_there_is_one():
    x = leaf([1.0])
    (x * 2.0).sum().backward()
    assert x.gradient() is x.grad


def test_gradient_says_why_there_is_none():
    x = leaf([1.0, 2.0])
    x.name = "W_Q"
    h = x * 2.0
    with no_grad():
        quiet = x * 3.0
    cases = {
        "'W_Q' of shape \\(2,\\) is a leaf that no backward pass has reached": x,
        "made by op 'mul', and only leaves keep": h,
        "does not require grad.*no_grad\\(\\), on constants or on detach\\(\\)": quiet,
        "holds int64: only float tensors": Tensor([1]),
    }
    for message, tensor in cases.items():
        with pytest.raises(RuntimeError, match=message):
            tensor.gradient()


def test_gradient_names_the_line_that_cut_the_graph_under_recording():
    x = leaf([1.0, 2.0])
    with recording():
        h = x.exp()
        cut, line = h.detach(), here()
        with no_grad():
            quiet, second = h * 2.0, here()
    with pytest.raises(RuntimeError, match=rf"cut off from its graph by detach\(\) at .*{line}"):
        cut.gradient()
    with pytest.raises(RuntimeError, match=rf"by op 'mul' under no_grad\(\) at .*{second}"):
        quiet.gradient()
    cut.requires_grad = True  # a leaf of its own from now on
    (cut * 2.0).sum().backward()
    assert cut.gradient().tolist() == [2.0, 2.0]


def test_a_kept_gradient_that_never_arrived_is_not_told_to_be_kept():
    x = leaf([1.0, 2.0])
    unused = x * 2.0
    unused.retain_grad()
    with recording():
        recorded, d = x * 2.0, x.detach()
    d.requires_grad = True
    (x * 3.0).sum().backward()
    for tensor in (unused, recorded):
        with pytest.raises(RuntimeError, match=r"op 'mul' and keeps its gradient, but .* does not depend on it"):
            tensor.gradient()
    with pytest.raises(RuntimeError, match="is a leaf that no backward pass has reached"):
        d.gradient()


def test_a_hook_on_a_weight_stays_through_training_steps():
    linear, norms = nn.Linear(3, 2), []
    linear.weight.register_hook(lambda g: norms.append(float((g * g).sum())))
    step = nn.optim.SGD(linear.parameters(), lr=0.1)
    for _ in range(3):
        step.zero_grad()
        F.mse(linear(Tensor(np.ones((5, 3), np.float32))), Tensor(np.zeros((5, 2), np.float32))).backward()
        step.step()
    assert len(norms) == 3 and norms[0] > norms[2]


# ---- hooks that misbehave


def test_hooks_that_add_and_remove_hooks():
    x, ran = leaf([1.0, 2.0]), []
    h = x * 2.0

    def once(g):
        ran.append("once")
        handle.remove()
        late.remove()
        h.register_hook(lambda g: ran.append("new"))
        x.register_hook(lambda g: ran.append("below"))  # backward has not been there yet

    handle = h.register_hook(once)
    late = h.register_hook(lambda g: ran.append("late"))
    y = h.sum()
    for _ in range(2):
        y.backward(retain_graph=True)
    assert ran == ["once", "below", "new", "below"]


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_hook_cannot_write_into_the_gradient_that_it_shares_with_others(create_graph):
    x = leaf([1.0, 2.0])
    h, k = x * 2.0, x * 3.0

    def spoil(g):
        g *= 100.0

    handle = h.register_hook(spoil)
    y = ((h + k) * 1.0).sum()  # one array, which the product's rule made, is the gradient of h and of k
    with pytest.raises((ValueError, RuntimeError), match=r"read-only view|shares its memory"):
        y.backward(create_graph=create_graph)
    assert x.grad is None
    handle.remove()
    h.register_hook(lambda g: g)  # what it got goes on
    y.backward()
    assert x.grad.tolist() == [5.0, 5.0]


def test_a_hook_may_return_a_view_that_nobody_may_write():
    x = leaf(np.ones((3, 5)))
    h = x * 1.0
    h.register_hook(lambda g: g.sum(0, keepdims=True).broadcast_to((3, 5)))
    ((h @ leaf(np.ones((5, 2)))) ** 2).sum().backward()
    assert (x.grad.numpy() == 3 * 2 * 2 * 5).all()


@pytest.mark.parametrize("inner_retains", [True, False])
def test_a_pass_inside_a_hook(inner_retains):
    x = leaf([1.0, 2.0])
    h = x.exp()
    y, other = (h * h).sum(), h.sum()
    depth = []

    def again(g):
        if not depth:
            depth.append(1)
            other.backward(retain_graph=inner_retains)

    h.register_hook(again)
    e = np.exp([1.0, 2.0])
    if inner_retains:
        y.backward()
        np.testing.assert_allclose(x.grad, e + 2 * e * e)
    else:  # it freed what the pass around it had still to read
        with pytest.raises(RuntimeError, match="op 'exp' already and freed"):
            y.backward()
        np.testing.assert_allclose(x.grad, e)


def test_a_write_by_a_hook_into_what_the_pass_has_still_to_read_is_refused():
    x = leaf([1.0, 2.0])
    h = x * 2.0
    k = h * h

    def write(g):
        h[...] = 0.0

    k.register_hook(write)
    with pytest.raises(RuntimeError, match=r"op 'mul'.*saved an operand.*changed in place"):
        k.sum().backward()
    assert x.grad is None


def test_hooks_of_a_tied_weight_see_the_sum_of_its_uses():
    class Tied(nn.Module):
        def __init__(self):
            self.embed = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model, seen = Tied(), []
    model.embed.weight.register_hook(lambda g: seen.append(g.numpy().copy()))
    model(np.array([2, 5])).sum().backward()
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], model.head.weight.grad)


def test_hooks_from_several_threads_are_all_there_and_all_run():
    x, ran = leaf([1.0]), []
    h = x * 2.0
    y = h * 3.0
    start = threading.Barrier(4)

    def work(i):
        start.wait()
        for j in range(50):
            h.register_hook(lambda g, ij=(i, j): ran.append(ij))
        start.wait()
        y.backward(retain_graph=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran) == 4 * 200 and len(set(ran)) == 200
    assert x.grad.tolist() == [24.0]


def test_kept_gradients_stay_as_they_were_when_a_later_hook_fails_and_under_grad():
    x = leaf([1.0, 2.0])
    h = x * 2.0
    h.retain_grad()
    y = (h * h).sum()
    y.backward(retain_graph=True)
    handle = x.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (y * 5.0).backward(retain_graph=True)
    assert h.grad.tolist() == [4.0, 8.0]
    handle.remove()
    grad(y * 5.0, x, retain_graph=True)  # changes no .grad at all
    assert h.grad.tolist() == [4.0, 8.0] and x.grad.tolist() == [8.0, 16.0]


def test_a_kept_gradient_is_recorded_under_create_graph():
    x = leaf(3.0)
    h = x * 2.0
    h.retain_grad()
    (h * h * h).backward(create_graph=True)
    assert h.grad.item() == 3 * 36
    assert grad(h.grad, x)[0].item() == 6 * 6 * 2


def test_a_tensor_made_from_what_was_cut_off_tells_where_the_cut_was():
    x = leaf([1.0, 2.0])
    with recording():
        far = (x.detach() * 2.0) + 1.0
    with pytest.raises(
        RuntimeError, match=rf"cut off from its graph by detach\(\) at .*{re.escape(Path(__file__).name)}"
    ):
        far.gradient()
