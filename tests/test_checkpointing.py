"""checkpoint(): the same bits from less memory, for dropout, closures, several outputs and higher orders."""

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, checkpoint, enable_grad, grad, manual_seed, nn, no_grad, recording
from tinygrad_qkv.modes import module_frame
from tinygrad_qkv.nn import functional as F


def leaf(*shape, seed=0, dtype=np.float64):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(dtype), requires_grad=True)


def plain(f, *args, **kwargs):
    return f(*args, **kwargs)


def bits(tensors):
    return [None if t is None else (t.shape, t.numpy().tobytes()) for t in tensors]


def test_a_block_with_dropout_gives_the_same_bits():
    results = []
    for run in (plain, checkpoint):
        manual_seed(3)
        blocks = [nn.TransformerBlock(8, 2, dropout=0.3) for _ in range(3)]
        x = leaf(2, 5, 8, dtype=np.float32)
        h = x
        for block in blocks:
            h = run(block, h, is_causal=True)
        (h * h).sum().backward()
        after = F.dropout(Tensor(np.ones(7, np.float32)), 0.5)  # the stream goes on where it would have been
        results.append(bits([h, after, x.grad, *(p.grad for block in blocks for p in block.parameters())]))
    assert results[0] == results[1]


def test_tensors_of_the_closure_get_their_gradients_also_by_grad():
    x, w, frozen = leaf(3, 5), leaf(5, 7, seed=1), Tensor(np.ones(7))
    found = []
    for run in (plain, checkpoint):
        inner = (x * 2.0).exp()
        y = run(lambda a, inner=inner: ((a + inner) @ w * frozen).tanh(), x * 3.0)
        found.append(bits(grad(y.sum(), [w, inner, x])))
    assert found[0] == found[1]


def test_what_feeds_f_directly_and_through_another_operand_is_counted_once():
    """h is made from x, and f reads both: what comes to x through h comes from h's own rule."""
    x = leaf(3)
    for run in (
        lambda h: checkpoint(lambda a, b: a * b, x, h),
        lambda h: checkpoint(lambda a: a * h, x),
        lambda h: checkpoint(lambda a: x * a, h),
    ):
        np.testing.assert_allclose(grad(run(x * x).sum(), x)[0], 3 * x.numpy() ** 2)


def test_several_outputs_in_any_container_of_which_some_are_used():
    x = leaf(3, 5)

    def f(a, times, *, more):
        h = (a * more).exp()
        return h * times, {"half": [h / 2.0, times]}, a, (h.sqrt(), (h > 1.0)), None

    for use in (
        lambda y: y[0].sum() + (y[1]["half"][0] ** 2).sum() + (y[3][0] * y[2]).sum(),
        lambda y: y[1]["half"][0].sum(),
        lambda y: y[2].sum() + y[3][0].max(),
    ):
        found = []
        for run in (plain, checkpoint):
            x.zero_grad()
            y = run(f, x, 3, more=x * 0.5)
            assert y[1]["half"][1] == 3 and y[4] is None and y[2] is x and y[3][1].dtype == bool
            use(y).backward()
            found.append(bits([y[0], y[1]["half"][0], y[3][0], x.grad]))
        assert found[0] == found[1]


def test_an_output_that_nobody_uses_cannot_spoil_the_others():
    """Its gradient is not 0, but none at all: 0 times the infinite slope of sqrt at 0 would be NaN."""
    x = Tensor([0.0, 4.0], requires_grad=True)
    y, _ = checkpoint(lambda a: (a * 2.0, a.sqrt()), x)
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_an_operand_that_the_used_output_does_not_read():
    x = leaf(3)
    h = x * x
    y, z = checkpoint(lambda a, b: (a.exp(), b * 3.0), h, x)
    np.testing.assert_allclose(grad(y.sum(), x, retain_graph=True)[0], np.exp(h.numpy()) * 2 * x.numpy())
    np.testing.assert_array_equal(grad(z.sum(), x)[0], np.full(3, 3.0))


def test_outputs_of_two_dtypes_and_the_same_output_twice():
    x = leaf(3, dtype=np.float32)

    def f(a):
        h = a * 2.0
        return h, h.astype("float64") ** 2, h

    found = []
    for run in (plain, checkpoint):
        a, b, c = run(f, x)
        found.append(bits([*grad(a.sum() + b.sum().astype("float32") + c.max(), x), a, b, c]))
    assert found[0] == found[1]


def test_higher_orders_pass_through():
    x, w = leaf(3, 5), leaf(5, 5, seed=1)

    def f(a):
        return (a @ w).tanh().softmax(-1)

    found = []
    for run in (plain, checkpoint):
        (dx,) = grad((run(f, x) ** 2).sum(), x, create_graph=True)
        (ddx,) = grad((dx**2).sum(), x, create_graph=True)
        found.append([dx, ddx, *grad((ddx * x).sum(), [x, w])])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_higher_orders_through_several_outputs():
    x = leaf(3)
    found = []
    for run in (plain, checkpoint):
        y, z = run(lambda a: (a**3, a.exp()), x)
        (dx,) = grad((y * z).sum(), x, create_graph=True)
        found.append([dx, *grad(dx.sum(), x)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_checkpoints_nest():
    x, w = leaf(3, 5), leaf(5, 5, seed=1)
    results = []
    for run in (plain, checkpoint):
        manual_seed(5)

        def inner(a, run=run):
            return F.dropout((a @ w).tanh(), 0.5)

        def outer(a, run=run, inner=inner):
            return run(inner, run(inner, F.dropout(a, 0.2)) * 2.0)

        y = run(outer, x)
        results.append(bits([y, *grad((y * y).sum(), [x, w])]))
    assert results[0] == results[1]


def test_a_gradient_inside_f():
    x = leaf(3)

    def f(a):
        (slope,) = grad((a**3).sum(), a, create_graph=True)
        return slope * a

    found = []
    for run in (plain, checkpoint):
        found.append(bits(grad(run(f, x * 1.0).sum(), x)))
    assert found[0] == found[1]


def test_a_generator_that_the_caller_hands_over_draws_the_same_again():
    x, results = leaf(50), []
    for run in (plain, checkpoint):
        random = np.random.default_rng(7)
        y = run(lambda a, random=random: F.dropout(a, 0.5, generator=random) * a, x)
        following = random.integers(1000)
        results.append((bits([y, *grad(y.sum(), x)]), following, random.integers(1000)))
    assert results[0] == results[1]


def test_the_second_run_disturbs_nobody_elses_draws():
    manual_seed(11)
    x = leaf(50, dtype=np.float32)
    y = checkpoint(lambda a: F.dropout(a, 0.5), x)
    expected = []
    manual_seed(12)
    expected.append(F.dropout(Tensor(np.ones(50, np.float32)), 0.5).tolist())
    manual_seed(12)
    y.sum().backward()
    assert F.dropout(Tensor(np.ones(50, np.float32)), 0.5).tolist() == expected[0]
    np.testing.assert_array_equal(x.grad.numpy() != 0, y.numpy() != 0)


def test_a_seed_inside_f():
    x, results = leaf(50), []
    for run in (plain, checkpoint):
        manual_seed(1)

        def f(a):
            manual_seed(2)
            return F.dropout(a, 0.5) + tq.normal((50,))

        y = run(f, x)
        results.append((bits([y, *grad(y.sum(), x)]), tq.normal((3,)).tolist()))
    assert results[0] == results[1]


def test_the_second_run_sees_the_modes_and_the_module_of_the_first():
    x, seen = leaf(3), []

    class Inner(nn.Module):
        def forward(self, x):
            frame = module_frame.get()
            seen.append((frame.path, frame.kind, (x * 2.0).requires_grad))
            return x * x

    class Outer(nn.Module):
        def __init__(self):
            self.inner = Inner()
            self.inner.w = nn.Parameter([1.0])

        def forward(self, x):
            return checkpoint(self.inner, x)

    model = Outer()
    y = model(x)
    loss = y.sum()
    with no_grad():
        loss.backward()
    assert seen == [("inner", "Inner", True)] * 2
    assert model.inner.w.name == "inner.w"
    assert y._op == "checkpoint" and y._node.frame.path == ""


def test_nothing_happens_twice_where_nothing_is_recorded():
    runs = []

    def f(a):
        runs.append(1)
        return a * 2.0

    with no_grad():
        assert not checkpoint(f, leaf(3)).requires_grad
        with enable_grad():
            checkpoint(f, leaf(3)).sum().backward()
    assert checkpoint(f, Tensor([1.0])).requires_grad is False
    assert len(runs) == 4
    with pytest.raises(TypeError, match=r"checkpoint\(\) takes a function and its arguments, got Tensor"):
        checkpoint(f(leaf(3)))


def test_backward_twice():
    x = leaf(3)
    y = checkpoint(lambda a: a**3, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_array_equal(x.grad, 2 * (3 * x.detach() ** 2))
    with pytest.raises(RuntimeError, match=r"op '(sum|checkpoint)' already"):
        y.backward()


@pytest.mark.parametrize("which", ["argument", "closure", "constant", "in a list"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_write_between_forward_and_backward_is_refused(which, outputs):
    x, w, c, item = leaf(3), leaf(3), Tensor(np.ones(3)), Tensor(np.ones(3))

    def f(a, items):
        y = (a + w + c) + items[0]  # no rule reads them, but the second run does
        return (y, y.exp())[:outputs]

    loss = sum(y.sum() for y in checkpoint(f, x, [item]))
    target = {"argument": x, "closure": w, "constant": c, "in a list": item}[which]
    target.data = target.data * 2.0
    with pytest.raises(RuntimeError, match=r"op 'checkpoint' .*saved an operand.*changed in place"):
        loss.backward()
    assert x.grad is None and w.grad is None


def test_writes_elsewhere_and_afterwards_are_fine():
    x, w = leaf(3), leaf(3)

    def f(a):
        h = a * w
        h[0] = 5.0  # its own
        return h.exp()

    y = checkpoint(f, x)
    y += 1.0  # no rule reads the result
    other = Tensor(np.ones(3))
    other += 1.0
    y.sum().backward()
    expected = np.exp(x.numpy() * w.numpy()) * w.numpy()
    expected[0] = 0.0
    np.testing.assert_allclose(x.grad, expected)
    w.data -= 0.1 * w.grad


def test_a_function_that_writes_to_what_it_did_not_make_is_refused():
    x, count = leaf(3), Tensor([0.0])

    def f(a):
        count.data = count.data + 1.0
        return a * count

    with pytest.raises(RuntimeError, match=r"wrote to a tensor of shape \(1,\) that it did not make"):
        checkpoint(f, x)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda a, n: a * float(len(n)), "the function '<lambda>' gave another result"),
        (lambda a, n: [a * 2.0 for _ in n], "gave another result"),
        (lambda a, n: a * a if len(n) == 1 else a * n[0], "read other tensors|gave another result"),
    ],
)
def test_a_function_that_does_not_do_the_same_again_is_refused(f, message):
    x, n = leaf(3), []

    def changing(a):
        n.append(x)
        return f(a, n)

    changing.__name__ = "<lambda>"
    y = checkpoint(changing, x * 1.0)
    with pytest.raises(RuntimeError, match=message):
        (y if isinstance(y, Tensor) else y[0]).sum().backward()
    assert x.grad is None


def test_hooks_inside_run_in_backward():
    x, seen = leaf(3), []

    def f(a):
        h = a * 2.0
        h.register_hook(lambda g: seen.append(g.tolist()))
        return h * 3.0

    checkpoint(f, x).sum().backward()
    assert seen == [[3.0, 3.0, 3.0]]


@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_on_what_f_reads_run_once_on_the_whole_gradient(create_graph):
    found = []
    for run in (plain, checkpoint):
        x, w, seen = leaf(3), leaf(3, seed=1), []
        h = x * 1.0
        for t in (x, w, h):
            t.register_hook(lambda g, seen=seen: seen.append(g.tolist()))
            t.register_hook(lambda g: g * 2.0)
        h.retain_grad()
        y = run(lambda a, h=h, w=w: (a * h * w).exp(), x)
        (y * w).sum().backward(create_graph=create_graph)
        found.append((seen, bits([x.grad, w.grad, h.grad])))
    assert found[0][1] == found[1][1] and sorted(found[0][0]) == sorted(found[1][0]) and len(found[0][0]) == 3


def test_an_inner_tensor_keeps_its_gradient_in_the_second_run():
    x, inner = leaf(3), []

    def f(a):
        inner.append(a * 2.0)
        inner[-1].retain_grad()
        return inner[-1] * 3.0

    checkpoint(f, x).sum().backward()
    assert inner[1].grad.tolist() == [3.0] * 3 and inner[0].grad is None


def test_a_module_with_hooks_inside_and_its_neighbour_outside():
    found = []
    for run in (plain, checkpoint):
        manual_seed(0)
        outer, inner = nn.Linear(3, 3).astype("float64"), nn.Linear(3, 3).astype("float64")
        seen, x = [], leaf(2, 3)
        for module in (outer, inner):
            module.register_backward_hook(lambda m, g_in, g_out: (g_in[0] * 3.0,))
            module.register_backward_hook(lambda m, g_in, g_out, seen=seen: seen.append(g_in[0].tolist()))
        run(inner, outer(x)).sum().backward()
        found.append((seen, bits([x.grad, outer.weight.grad, inner.weight.grad])))
    assert found[0] == found[1]


def test_threads_may_pass_through_one_graph_at_once():
    x = leaf(30)
    y = checkpoint(lambda a: F.dropout(a, 0.5).exp(), x).sum()
    start, found = threading.Barrier(4), []

    def work():
        start.wait()
        found.append(grad(y, x, retain_graph=True)[0].numpy().tobytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


def test_under_recording_the_op_is_there_with_its_gradient():
    x = leaf(3)
    with recording():
        y = checkpoint(lambda a: a.exp(), x)
        y.sum().backward()
    assert y.grad.tolist() == [1.0] * 3 and y._node.value is not None and y._node.line is not None


# ---- memory


def step(run, blocks, x):
    """One forward and backward pass."""
    h = x
    for block in blocks:
        h = run(block, h)
    h.sum().backward()
    for block in blocks:
        block.zero_grad()


def peak(run, blocks, x):
    """Bytes at the peak of one step."""
    gc.collect()
    tracemalloc.start()
    step(run, blocks, x)
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top


def test_twelve_blocks_need_a_third_of_the_memory():
    blocks = [nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(12)]
    x = leaf(512, 32, dtype=np.float32)
    for run in (plain, checkpoint):
        step(run, blocks, x)  # once, so that kernels are there: under tracemalloc they would compile for ten seconds
    whole, less = peak(plain, blocks, x), peak(checkpoint, blocks, x)
    assert less < whole / 3, f"{less} bytes of {whole}"


def test_what_f_made_is_freed_at_once_and_what_it_was_given_after_backward():
    x, inside = leaf(1000), []
    argument = x * 1.0

    def f(a):
        h = a.exp()
        constant = Tensor(np.ones(1000))
        inside.extend([weakref.ref(h), weakref.ref(constant)])
        return h * constant

    gc.collect()
    gc.disable()
    try:
        y = checkpoint(f, argument).sum()
        assert [r() for r in inside] == [None, None]
        given = weakref.ref(argument)
        del argument
        assert given() is not None
        y.backward()
        assert given() is None and all(r() is None for r in inside)
    finally:
        gc.enable()


def test_a_constant_of_its_own_may_be_written_to_and_one_from_outside_may_not():
    def f(x, y):
        y[0] = x[0] ** 2
        y[1] = x[1]
        return y.exp()

    x = Tensor(np.random.default_rng(0).normal(size=(3, 5)), requires_grad=True)
    (plain,) = grad(f(x, Tensor(np.zeros((3, 5)))).sum(), x)
    (again,) = grad(checkpoint(lambda x: f(x, Tensor(np.zeros((3, 5)))), x).sum(), x)
    np.testing.assert_array_equal(plain, again)
    for outside in (Tensor(np.zeros((3, 5))), x * 1.0):
        with pytest.raises(RuntimeError, match=r"wrote to a tensor of shape \(3, 5\) that it did not make"):
            checkpoint(lambda x, outside=outside: f(x, outside), x)
