"""Hooks on modules: before and after forward, and on the gradients that a call lets through."""

import copy
import pickle

import numpy as np
import pytest

from tinygrad_qkv import Tensor, grad, nn, no_grad, recording
from tinygrad_qkv.observers import Observer, Watch


def leaf(*shape, seed=0):
    return Tensor(np.random.default_rng(seed).normal(size=shape), requires_grad=True)


def linear(n_in=3, n_out=5):
    return nn.Linear(n_in, n_out).astype("float64")


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner):
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


# ---- before and after forward


def test_a_pre_hook_sees_and_replaces_the_arguments():
    layer, x, seen = linear(), leaf(2, 3), []
    layer.register_forward_pre_hook(lambda module, args: seen.append((module, args)))
    with layer.register_forward_pre_hook(lambda module, args: args[0] * 2.0):  # the only argument
        twice = layer(x)
    with layer.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,)):  # as a tuple
        again = layer(x)
    assert seen == [(layer, (x,))] * 2
    np.testing.assert_array_equal(twice, layer(x * 2.0))
    np.testing.assert_array_equal(again, twice)


def test_a_forward_hook_sees_arguments_and_output_and_replaces_it():
    layer, x, seen = linear(), leaf(2, 3), []
    plain = layer(x)
    layer.register_forward_hook(lambda module, args, output: seen.append((module, args, output.shape)))
    handle = layer.register_forward_hook(lambda module, args, output: output * 0.5)
    np.testing.assert_array_equal(layer(x), plain * 0.5)
    handle.remove()
    handle.remove()
    np.testing.assert_array_equal(layer(x), plain)
    assert seen == [(layer, (x,), (2, 5))] * 2


def test_hooks_run_on_every_submodule_of_a_transformer_block():
    block, ran, passed = nn.TransformerBlock(8, 2), [], []
    for path, module in block.named_modules():
        module.register_forward_pre_hook(lambda m, args, path=path: ran.append(("before", path)))
        module.register_forward_hook(lambda m, args, out, path=path: ran.append(("after", path)))
        module.register_backward_hook(lambda m, g_in, g_out, path=path: passed.append(path))
    block(Tensor(np.ones((2, 3, 8), np.float32), requires_grad=True)).sum().backward()
    paths = {path for path, _ in block.named_modules()}
    assert {path for _, path in ran} == paths == set(passed) and "attn" in paths
    assert ran[0] == ("before", "") and ran[-1] == ("after", "")
    assert passed[-1] == ""  # the whole block is passed last


def test_hooks_that_remove_and_add_hooks():
    layer, ran = linear(), []

    def once(module, args):
        ran.append("once")
        handle.remove()
        late.remove()
        module.register_forward_pre_hook(lambda module, args: ran.append("new"))

    handle = layer.register_forward_pre_hook(once)
    late = layer.register_forward_pre_hook(lambda module, args: ran.append("late"))
    for _ in range(2):
        layer(leaf(2, 3))
    assert ran == ["once", "new"]


# ---- gradients


def test_a_backward_hook_sees_what_came_through_its_call_alone():
    inner, x, seen = linear(3, 3), leaf(2, 3), []
    model = Residual(inner)
    inner.register_backward_hook(lambda module, g_in, g_out: seen.append((module, g_in, g_out)))
    weights = np.random.default_rng(1).normal(size=(2, 3))
    (model(x) * weights).sum().backward()
    ((module, (through,), (arriving,)),) = seen
    assert module is inner
    np.testing.assert_array_equal(arriving, weights)
    np.testing.assert_allclose(through, weights @ inner.weight.numpy())
    np.testing.assert_allclose(x.grad, weights + weights @ inner.weight.numpy())  # the residual comes on top


@pytest.mark.parametrize("create_graph", [False, True])
def test_replaced_gradients_go_on_and_those_of_the_parameters_stay(create_graph):
    layer, x = linear(), leaf(2, 3)
    layer(x).sum().backward()
    plain, weight = x.grad.numpy(), layer.weight.grad.numpy()
    for replace in (lambda m, g_in, g_out: (g_in[0] * 7.0,), lambda m, g_in, g_out: np.asarray(g_in[0]) * 7.0):
        x.zero_grad()
        layer.zero_grad()
        with layer.register_backward_hook(replace):
            layer(x).sum().backward(create_graph=create_graph)
        np.testing.assert_allclose(x.grad, plain * 7.0)
        np.testing.assert_array_equal(layer.weight.grad, weight)


def test_the_first_layer_runs_its_hooks_although_no_argument_has_a_gradient():
    layer, seen = linear(), []
    layer.register_backward_hook(lambda m, g_in, g_out: seen.append((g_in, g_out[0].shape)))
    layer(np.ones((2, 3))).sum().backward()
    assert seen == [((None,), (2, 5))]


def test_several_arguments_and_outputs_give_one_call():
    class Two(nn.Module):
        def forward(self, a, n, *, b):
            return a * b, {"sum": a + b}, n

    module, a, b, seen = Two(), leaf(2, 3), leaf(2, 3, seed=1), []
    module.register_backward_hook(lambda m, g_in, g_out: seen.append((g_in, g_out)))
    y, more, n = module(a, 3, b=b)
    assert n == 3
    (2.0 * y + more["sum"]).sum().backward(retain_graph=True)
    y.sum().backward()
    (g_in, g_out), (_, partly) = seen
    assert len(g_in) == 3 and g_in[1] is None
    np.testing.assert_allclose(g_in[0], 2 * b.numpy() + 1)
    np.testing.assert_allclose(g_in[2], 2 * a.numpy() + 1)
    assert [g.numpy()[0, 0] for g in g_out] == [2.0, 1.0]
    assert partly[0].shape == (2, 3) and partly[1] is None


def test_the_named_results_of_attention_stay_named():
    attention, seen = nn.MultiHeadAttention(8, 2), []
    attention.register_backward_hook(lambda m, g_in, g_out: seen.append([g is not None for g in g_out]))
    y, record = attention(Tensor(np.ones((1, 3, 8), np.float32), requires_grad=True), need=("weights", "q"))
    (y.sum() + record.weights.max()).backward()
    ((output, *_),) = seen
    assert output and sum(seen[0]) == 2 and record.k is None


def test_one_module_called_twice_runs_its_hooks_for_each_call():
    layer, x, seen = linear(3, 3), leaf(2, 3), []
    layer.register_backward_hook(lambda m, g_in, g_out: seen.append(g_out[0].numpy().copy()))
    layer(layer(x)).sum().backward()
    np.testing.assert_array_equal(seen[0], np.ones((2, 3)))
    np.testing.assert_allclose(seen[1], np.ones((2, 3)) @ layer.weight.numpy())


def test_a_replaced_gradient_is_part_of_a_recorded_one():
    class Square(nn.Module):
        def forward(self, x):
            return x * x

    module, x = Square(), Tensor(3.0, dtype="float64", requires_grad=True)
    module.register_backward_hook(lambda m, g_in, g_out: (g_in[0] * x,))
    (dx,) = grad(module(x), x, create_graph=True)
    assert dx.item() == 2 * 3 * 3
    assert grad(dx, x)[0].item() == 2 * 2 * 3


def test_a_pass_inside_a_hook_does_not_mix_with_the_pass_around_it():
    layer, x, seen = linear(), leaf(2, 3), []

    def hook(module, g_in, g_out):
        seen.append(g_in[0].numpy().copy())
        if len(seen) == 1:
            y.backward(10.0 * np.ones((2, 5)), retain_graph=True)

    layer.register_backward_hook(hook)
    y = layer(x)
    y.sum().backward(retain_graph=True)
    np.testing.assert_allclose(seen[1], 10 * seen[0])
    np.testing.assert_allclose(x.grad, 11 * seen[0])


def test_hooks_do_not_change_the_bits():
    x = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
    found = []
    block = nn.TransformerBlock(8, 2)
    for hooked in (False, True):
        for module in block.modules() if hooked else ():
            module.register_backward_hook(lambda m, g_in, g_out: None)
        a = Tensor(x, requires_grad=True)
        block.zero_grad()
        (block(a) ** 2).sum().backward()
        found.append([a.grad.numpy(), *(p.grad.numpy() for p in block.parameters())])
    for plain, watched in zip(*found, strict=True):
        np.testing.assert_array_equal(plain, watched)


# ---- errors


@pytest.mark.parametrize(
    ("kind", "hook", "error", "message"),
    [
        ("forward_pre", lambda m, args: [args[0]], TypeError, "forward pre-hook '<lambda>' on Linear returned list"),
        ("forward_pre", lambda m, args: 3, TypeError, "returned int; .*positional arguments as a tuple"),
        ("forward", lambda m, args, y: 3, TypeError, "forward hook '<lambda>' on Linear returned int"),
        ("forward", lambda m, args, y: y.sum(), ValueError, r"returned shape \(\); the output has shape \(2, 5\)"),
    ],
)
def test_a_wrong_forward_hook_is_named(kind, hook, error, message):
    layer = linear()
    getattr(layer, f"register_{kind}_hook")(hook)
    with pytest.raises(error, match=message):
        layer(leaf(2, 3))


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (lambda g: 3, TypeError, r"backward hook '<lambda>' on Linear returned int; .*tuple of grad_inputs"),
        (lambda g: (g, g), ValueError, "returned 2 gradients for 1 arguments"),
        (lambda g: (None,), ValueError, "returned for argument 0 None; give zeros"),
        (lambda g: (g.sum(),), ValueError, r"argument 0, returned float64 of shape \(\); .* has shape \(2, 3\)"),
        (lambda g: (1.5,), TypeError, "argument 0, returned float"),
        (lambda g: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_wrong_backward_hook_leaves_graph_and_gradients_as_they_were(hook, error, message):
    layer, x = linear(), leaf(2, 3)
    handle = layer.register_backward_hook(lambda m, g_in, g_out: hook(g_in[0]))
    y = layer(x).sum()
    with pytest.raises(error, match=message):
        y.backward()
    assert x.grad is None and layer.weight.grad is None
    handle.remove()
    y.backward()
    np.testing.assert_allclose(x.grad, np.ones((2, 5)) @ layer.weight.numpy())


def test_a_gradient_for_an_argument_that_has_none_is_refused():
    layer = linear()
    layer.register_backward_hook(lambda m, g_in, g_out: (g_out[0],))
    with pytest.raises(ValueError, match="argument 0 a gradient, but none arrives there"):
        layer(np.ones((2, 3))).sum().backward()


def test_what_is_no_function_is_refused():
    for kind in ("forward_pre", "forward", "backward"):
        with pytest.raises(TypeError, match="a hook is a function, got int"):
            getattr(linear(), f"register_{kind}_hook")(3)


def test_names_of_pytorch_lead_to_ours():
    for name, here in {
        "register_full_backward_hook": "register_backward_hook",
        "register_buffer": "plain attributes",
        "register_full_backward_pre_hook": "hook on the output",
    }.items():
        with pytest.raises(AttributeError, match=f"'Linear' object has no attribute '{name}'; write .*{here}"):
            getattr(linear(), name)
    assert "register_buffer" not in dir(linear()) and not hasattr(linear(), "register_buffer")


# ---- hooks are no state


def test_a_hooked_module_is_saved_copied_and_shown_as_one_without():
    layer = linear()
    plain = repr(layer), list(layer.state_dict()), [name for name, _ in layer.named_members()]
    layer.register_forward_hook(lambda m, args, y: y * 100.0)
    layer.register_backward_hook(lambda m, g_in, g_out: None)
    assert (repr(layer), list(layer.state_dict()), [name for name, _ in layer.named_members()]) == plain
    x = leaf(2, 3)
    for twin in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(twin(x) * 100.0, layer(x))
        assert "_hooks" not in vars(twin)


def test_backward_hooks_add_nothing_where_nothing_is_recorded():
    layer = linear()
    layer.register_backward_hook(lambda m, g_in, g_out: None)
    with no_grad():
        assert layer(leaf(2, 3)).requires_grad is False
    assert "identity" not in {node.op for node in [linear()(leaf(2, 3))._node]}
    assert layer(leaf(2, 3))._op == "identity"


# ---- observers of module calls


class Calls(Watch, Observer):
    """Notes module calls."""

    def __init__(self):
        self.events = []

    def module_entered(self, frame):
        self.events.append(("in", frame.path, frame.kind))

    def module_left(self, frame):
        self.events.append(("out", frame.path, frame.kind))


def test_observers_are_told_of_module_calls_also_when_one_raises():
    calls, model = Calls(), nn.Sequential(linear(), linear(7, 2))
    with calls, pytest.raises(ValueError):
        model(np.ones((2, 3)))
    assert calls.events == [
        ("in", "", "Sequential"),
        *[("in", "0", "Linear"), ("out", "0", "Linear")],
        *[("in", "1", "Linear"), ("out", "1", "Linear")],
        ("out", "", "Sequential"),
    ]


def test_an_observer_that_raises_does_not_leave_the_module_path_behind():
    class Stubborn(Calls):
        def module_entered(self, frame):
            raise KeyError("no")

    with pytest.raises(KeyError), Stubborn():
        linear()(leaf(2, 3))
    assert (leaf(2, 3) * 2.0)._node.frame is None


def test_recording_and_hooks_together():
    layer, x = linear(), leaf(2, 3)
    layer.register_backward_hook(lambda m, g_in, g_out: None)
    with recording():
        y = layer(x)
        y.sum().backward()
    np.testing.assert_array_equal(y.grad, np.ones((2, 5)))
