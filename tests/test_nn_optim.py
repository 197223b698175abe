"""Optimisers: steps by hand, groups, what is skipped and refused, exact resuming, clipping."""

import math

import numpy as np
import pytest

from tinygrad_qkv import Tensor, nn
from tinygrad_qkv.nn import optim

KINDS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.2),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.2),
}


def leaf(value, dtype=np.float64):
    return nn.Parameter(np.atleast_1d(np.array(value, dtype)))


def stepped(opt, p, grads):
    for g in grads:
        p.grad = Tensor(np.broadcast_to(np.array(g, p.dtype), p.shape))
        opt.step()
    return p.data


def reference(kind, p, grads):
    """The textbook rules, one number at a time."""
    m = v = sum_ = 0.0
    for t, g in enumerate(grads, 1):
        if kind in ("momentum", "Adam"):
            g = g + 0.2 * p
        if kind == "AdamW":
            p = p * (1 - 0.1 * 0.2)
        if kind in ("Adam", "AdamW"):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            p = p - 0.1 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        else:
            sum_ = g if t == 1 else 0.9 * sum_ + g
            p = p - 0.1 * {"SGD": g, "momentum": sum_, "Nesterov": g + 0.9 * sum_}[kind]
    return p


GRADS = [0.3, -0.2, 0.5, 0.1, -0.7]


@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_by_the_textbook(kind):
    p = leaf([1.0, -2.0])
    stepped(KINDS[kind]([p]), p, GRADS)
    np.testing.assert_allclose(p, [reference(kind, x, GRADS) for x in (1.0, -2.0)], rtol=1e-13)


def test_first_steps_by_hand():
    p = leaf(1.0)
    np.testing.assert_allclose(stepped(optim.AdamW([p], lr=0.1, weight_decay=0.1), p, [0.5]), [0.89], rtol=1e-7)
    for g in (1e-3, -100.0):
        p = leaf(0.0)
        np.testing.assert_allclose(stepped(optim.Adam([p], lr=0.01), p, [g]), [-0.01 * np.sign(g)], rtol=1e-4)
    p = leaf(0.0)  # eps is added after the root and the correction: 1e-8 / (1e-8 + 1e-8)
    np.testing.assert_allclose(stepped(optim.Adam([p], lr=0.1), p, [1e-8]), [-0.05], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_float32_and_the_array_stays_the_same(kind):
    p = leaf([1.0, 2.0], np.float32)
    array = p.data
    opt = KINDS[kind]([p])
    stepped(opt, p, GRADS)
    assert p.data is array and p.dtype == np.float32
    assert all(v.dtype == np.float32 for v in opt._state[0].values() if isinstance(v, np.ndarray))


@pytest.mark.parametrize("kind", [*KINDS, "momentum alone"])
def test_a_gradient_is_left_as_it_is(kind):
    p = leaf([1.0, 2.0])
    p.grad = g = Tensor(np.array([0.5, -3.0]))
    opt = KINDS[kind]([p]) if kind in KINDS else optim.SGD([p], lr=0.1, momentum=0.9)
    for _ in range(3):
        opt.step()
    assert p.grad is g
    np.testing.assert_array_equal(g, [0.5, -3.0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_does_not_move_and_keeps_its_own_count(kind):
    p, q = leaf(1.0), leaf(3.0)
    opt = KINDS[kind]([p, q])
    stepped(opt, p, GRADS[:2])
    assert q.item() == 3
    p.zero_grad()
    np.testing.assert_allclose(stepped(opt, q, GRADS), [reference(kind, 3.0, GRADS)], rtol=1e-13)


def test_groups_have_settings_of_their_own():
    p, q, r = leaf(1.0), leaf(1.0), leaf(1.0)
    opt = optim.SGD(
        iter([{"params": [p]}, {"params": iter([q]), "lr": 0.5}, {"params": r, "weight_decay": 1.0}]), lr=0.1
    )
    for x in (p, q, r):
        x.grad = Tensor(np.ones(1))
    opt.step()
    np.testing.assert_allclose([p.item(), q.item(), r.item()], [0.9, 0.5, 0.8])
    opt.param_groups[0]["lr"] = 1.0
    opt.step()
    assert p.item() == pytest.approx(-0.1) and q.item() == 0
    assert "lr=1.0" in repr(opt)
    opt.zero_grad()
    assert p.grad is q.grad is r.grad is None


def test_a_generator_of_parameters():
    model = nn.Linear(2, 3)
    opt = optim.SGD(model.parameters(), lr=1.0)
    before = model.bias.data.copy()
    for _ in range(2):
        opt.zero_grad()
        model(np.ones((1, 2), np.float32)).sum().backward()
        opt.step()
    np.testing.assert_allclose(model.bias, before - 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p: optim.SGD([p, p]), ValueError, "twice"),
        (lambda p: optim.SGD([{"params": [p]}, {"params": [p]}]), ValueError, "twice"),
        (lambda p: optim.SGD([]), ValueError, "empty.*nn.Parameter"),
        (lambda p: optim.SGD([{"params": []}]), ValueError, "empty"),
        (lambda p: optim.SGD([p * 2]), ValueError, "made by an op"),
        (lambda p: optim.SGD([Tensor([1.0])]), ValueError, "does not require grad"),
        (lambda p: optim.SGD([np.ones(1)]), TypeError, "ndarray"),
        (lambda p: optim.SGD([("p", p)]), TypeError, "named_parameters"),
        (lambda p: optim.SGD(p), TypeError, r"pass \[tensor\]"),
        (lambda p: optim.SGD(nn.Linear(1, 1)), TypeError, "model.parameters()"),
        (lambda p: optim.SGD({"params": [p]}), TypeError, r"pass \[group\]"),
        (lambda p: optim.SGD([{"params": [p], "rate": 1}]), ValueError, "no setting 'rate'.*lr"),
        (lambda p: optim.SGD([{"lr": 1}]), ValueError, "without 'params'"),
        (lambda p: optim.SGD([p], lr=-1), ValueError, "lr is a finite number from 0 up, got -1"),
        (lambda p: optim.SGD([p], lr="fast"), ValueError, "lr is a finite number from 0 up, got 'fast'"),
        (lambda p: optim.Adam([p], lr=math.nan), ValueError, "Adam's lr"),
        (lambda p: optim.clip_grad_norm(nn.Linear(1, 1), 1.0), TypeError, r"a Linear; pass model.parameters\(\)"),
        (lambda p: optim.SGD([p], momentum=-0.1), ValueError, "momentum"),
        (lambda p: optim.SGD([p], nesterov=True), ValueError, "give momentum"),
        (lambda p: optim.AdamW([p], weight_decay=-0.1), ValueError, "weight_decay"),
        (lambda p: optim.SGD([p], momentum="some"), ValueError, "momentum is a finite number from 0 up, got 'some'"),
        (lambda p: optim.Adam([p], eps="small"), ValueError, "eps is a finite number from 0 up, got 'small'"),
        (lambda p: optim.Adam([p], betas=(0.9, 1.0)), ValueError, "betas"),
        (lambda p: optim.Adam([p], betas=0.9), ValueError, "betas are two numbers.*got 0.9"),
        (lambda p: optim.Adam([{"params": [p], "eps": -1.0}]), ValueError, "eps"),
    ],
)
def test_what_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make(leaf(1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_optimiser_goes_on_bit_for_bit(kind):
    p, late = leaf([1.0, -2.0], np.float32), leaf(1.0)
    opt = KINDS[kind]([p, late])
    stepped(opt, p, GRADS[:2])
    q = leaf(p.data, np.float32)
    state = opt.state_dict()
    twin = KINDS[kind]([q, leaf(1.0)])
    twin.param_groups[0]["lr"] = 7.0
    twin.load_state_dict(state)
    stepped(opt, p, GRADS[2:])  # must not reach into the state that was handed over
    stepped(twin, q, GRADS[2:])
    assert p.data.tobytes() == q.data.tobytes()
    third = KINDS[kind]([leaf([1.0, -2.0], np.float32), leaf(1.0)])
    third.load_state_dict(state)
    assert third.state_dict()["state"][0]["step"] == 2


def test_a_state_of_another_optimiser_is_refused_and_nothing_changes():
    p = leaf([1.0, 2.0])
    opt = optim.Adam([p], lr=0.1)
    stepped(opt, p, GRADS)
    before = opt.state_dict()
    others = {
        "shapes": optim.Adam([leaf(1.0)], lr=0.2),
        "the optimiser has": optim.Adam([leaf([1.0, 2.0]), leaf(1.0)], lr=0.2),
        "another kind": optim.SGD([leaf([1.0, 2.0])], lr=0.2),
    }
    single = leaf([1.0, 2.0], np.float32)
    others["float32"] = optim.Adam([single], lr=0.2)
    stepped(others["float32"], single, GRADS)
    for text, other in others.items():
        with pytest.raises(ValueError, match=text):
            opt.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="param_groups and state"):
        opt.load_state_dict({"x": Tensor([1.0])})
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"] and after["state"][0]["step"] == 5
    np.testing.assert_array_equal(after["state"][0]["m"], before["state"][0]["m"])


def test_backward_refuses_parameters_that_an_optimiser_changed():
    p = leaf(2.0)
    loss = (p * p).sum()
    stepped(optim.SGD([p], lr=0.1), p, [1.0])
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_read_only_array_is_replaced():
    p = leaf(1.0)
    p.data = Tensor(np.ones(1)).numpy()
    np.testing.assert_allclose(stepped(optim.SGD([p], lr=0.1), p, [1.0]), [0.9])


def test_clipping_scales_all_gradients_together():
    p, q, r = leaf([1.0, 1.0]), leaf([1.0], np.float32), leaf(1.0)
    p.grad, q.grad = Tensor(np.array([3.0, 0.0])), Tensor(np.array([4.0], np.float32))
    assert optim.clip_grad_norm([p, q, r], 10.0) == pytest.approx(5)
    np.testing.assert_array_equal(p.grad, [3, 0])
    assert optim.clip_grad_norm(iter([p, q, r]), 1.0) == pytest.approx(5)
    np.testing.assert_allclose([*p.grad.data, *q.grad.data], [0.6, 0, 0.8], rtol=1e-6)
    assert q.grad.dtype == np.float32 and r.grad is None
    p.grad = Tensor(np.array([3e200, 4e200]))
    assert optim.clip_grad_norm(p, 1.0) == pytest.approx(5e200)
    np.testing.assert_allclose(p.grad, [0.6, 0.8])
    assert optim.clip_grad_norm([r], 1.0) == 0


def test_numpy_scalars_as_settings_keep_float32():
    p, q = leaf([1.0, 2.0], np.float32), leaf([1.0, 2.0], np.float32)
    p.grad = Tensor(np.array([3.0, 4.0], np.float32))
    assert optim.clip_grad_norm([p], np.sqrt(4.0)) == pytest.approx(5)
    np.testing.assert_allclose(p.grad, [1.2, 1.6], rtol=1e-6)
    optimizer = optim.SGD([p], lr=np.float64(0.1), momentum=np.float64(0.9), weight_decay=np.float64(0.1))
    optimizer.step()
    assert p.dtype == np.float32
    optim.SGD([q], momentum=0.9).load_state_dict(optimizer.state_dict())


def test_clipping_refuses_what_is_not_finite_and_changes_nothing():
    p, q = leaf([1.0]), leaf([1.0])
    q.name = "head.bias"
    p.grad, q.grad = Tensor(np.array([30.0])), Tensor(np.array([math.inf]))
    with pytest.raises(ValueError, match=r"'head\.bias'.* NaN or inf"):
        optim.clip_grad_norm([p, q], 1.0)
    assert p.grad.item() == 30
    with pytest.raises(ValueError, match="positive"):
        optim.clip_grad_norm([p], 0)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
def test_numpy_scalars_as_settings_change_no_dtype(kind):
    """NumPy's float64 is strong beside a float32 array: as a decay it would make a float64 gradient."""
    steps = []
    for number in (float, np.float64):
        p = nn.Parameter(np.ones(3, np.float32))
        p.grad = np.full(3, 0.5, np.float32)
        optimiser = kind([p], lr=number(0.1), weight_decay=number(0.25))
        optimiser.step()
        optimiser.step()
        steps.append(p.numpy().copy())
    assert steps[0].dtype == np.float32
    np.testing.assert_allclose(steps[1], steps[0], rtol=1e-6)
