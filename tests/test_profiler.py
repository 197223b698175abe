"""profile(): every call is counted, every second has a row, every buffer is counted once."""

import asyncio
import threading
from time import perf_counter

import numpy as np
import pytest

from tinygrad_qkv import Tensor, checkpoint, grad, nn, no_grad, profile


def leaf(*shape):
    return Tensor(np.random.default_rng(0).normal(size=shape), requires_grad=True)


def row(p, name, by="op"):
    return next(row for row in p.rows(by=by) if row.name == name)


class Block(nn.Module):
    """Two layers in a list, and an op of its own."""

    def __init__(self):
        self.layers = [nn.Linear(3, 5).astype("float64"), nn.Linear(5, 7).astype("float64")]

    def forward(self, x):
        return self.layers[1](self.layers[0](x).tanh()) * 2.0


def test_calls_by_op_and_by_module():
    block, x = Block(), leaf(2, 3)
    with profile() as p:
        for _ in range(3):
            block(x).sum().backward()
        with no_grad():
            block(x)
    calls = {r.name: (r.calls, r.backward_calls) for r in p.rows()}
    assert {name: calls[name] for name in ("affine", "tanh", "mul", "sum")} == {
        "affine": (8, 6),
        "tanh": (4, 3),
        "mul": (4, 3),
        "sum": (3, 3),
    }
    calls = {r.name: (r.calls, r.backward_calls) for r in p.rows(by="module")}
    assert calls["layers.0"] == calls["layers.1"] == (8, 6)  # affine, and the transpose of its weight
    assert calls["Block"] == (8, 6)  # the outermost module goes by its class
    assert calls["(no module)"][1] == 3
    assert sum(n for n, _ in calls.values()) == sum(r.calls for r in p.rows())


def test_the_rows_add_up_to_the_time_in_the_block():
    block, x, p = Block(), leaf(2, 3), profile()
    started = perf_counter()
    with p:
        entered = perf_counter()
        for _ in range(20):
            block(x).sum().backward()
        about_to_leave = perf_counter()
    left = perf_counter()
    assert about_to_leave - entered <= p.seconds <= left - started
    for by in ("op", "module"):
        inside = sum(r.seconds + r.backward_seconds for r in p.rows(by=by))
        assert p.seconds == pytest.approx(inside + p.outside + p.looking_on)
    assert p.outside > 0 and p.looking_on > 0 and all(r.seconds >= 0 <= r.backward_seconds for r in p.rows())


def test_time_outside_of_ops_is_in_no_op():
    layer, x = nn.Linear(3, 5).astype("float64"), leaf(2, 3)

    def wait():
        end = perf_counter() + 0.02
        while perf_counter() < end:
            pass

    with profile() as p:
        wait()  # before the module begins
        y = layer(x).sum()
        wait()  # before backward begins
        y.backward()
        wait()  # before the block ends
    assert p.outside >= 0.06 and sum(r.seconds + r.backward_seconds for r in p.rows()) < p.seconds - 0.06


def test_saved_bytes_are_counted_once_a_buffer_and_parameters_not():
    x = leaf(3, 5)
    with profile() as p:
        h = x.exp()  # saves its result: 3 * 5 * 8 bytes
        y = h * h  # saves h, which is counted
        z = (h.T @ y).tanh()  # h again, y, and the result of tanh: 5 * 5 * 8
        z.sum()
        x * x  # a leaf, which lives anyway
        with no_grad():
            h * h
    saved = {r.name: r.saved_bytes for r in p.rows() if r.saved_bytes}
    assert saved == {"exp": 120, "matmul": 120, "tanh": 200}


def test_buffers_that_are_gone_are_forgotten():
    x = leaf(100)
    with profile() as p:
        kept = [x.exp() for _ in range(50)]
    assert row(p, "exp").saved_bytes == 50 * 800 and len(p._buffers.seen) == 50
    kept.clear()
    assert not p._buffers.seen


@pytest.mark.parametrize("raises", [False, True])
def test_several_passes_create_graph_and_one_that_fails(raises):
    x = leaf(3)
    h = x.exp()
    if raises:
        h.register_hook(lambda g: 1 / 0)
    y = (h * x).sum()
    with profile() as p:
        if raises:
            with pytest.raises(ZeroDivisionError):
                y.backward()
        else:
            (dx,) = grad(y, x, create_graph=True)
            dx.sum().backward(retain_graph=True)
            y.backward()
        after = x - 1.0
    assert after.requires_grad and row(p, "sub").calls == 1
    if raises:
        assert row(p, "mul").backward_calls == 1
    else:
        assert row(p, "exp").backward_calls == 3
        assert row(p, "mul").calls == 0 and row(p, "mul").backward_calls > 3  # the rules' own products are backward too


def test_ops_of_a_rule_belong_to_the_module_of_the_rule():
    block, x = Block(), leaf(2, 3)
    y = block(x).sum()
    with profile() as p:
        grad(y, x, create_graph=True)
    modules = {r.name: r for r in p.rows(by="module")}
    assert modules["layers.0"].backward_calls > 1 and modules["layers.1"].backward_calls > 1
    assert modules["layers.0"].calls == 0


def test_a_checkpoint_is_one_op():
    block, x = Block(), leaf(2, 3)
    with profile() as p:
        checkpoint(block, x).sum().backward()
    assert row(p, "checkpoint").backward_calls == 1
    assert row(p, "affine").calls == 2 and row(p, "affine").backward_calls == 0


def test_each_thread_that_enters_is_seen_and_others_are_not():
    p, x = profile(), leaf(3)

    def work(inside):
        if inside:
            with p:
                x.exp()
        else:
            x.exp()

    threads = [threading.Thread(target=work, args=(i < 3,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert row(p, "exp").calls == 3


def test_tasks_of_one_thread_share_its_clock():
    p, x = profile(), leaf(3)

    async def work():
        with p:
            x.exp()
            await asyncio.sleep(0)
            x.exp()

    async def main():
        await asyncio.gather(work(), work())

    started = perf_counter()
    asyncio.run(main())
    assert row(p, "exp").calls == 4 and 0 < p.seconds <= perf_counter() - started


def test_one_object_adds_up_over_blocks_and_decorated_calls():
    p, x = profile(), leaf(3)

    @p
    def step():
        return x.exp()

    step()
    step()
    before = p.seconds
    started = perf_counter()
    with p:
        entered = perf_counter()
        with p:  # twice is seen once
            x.exp()
        about_to_leave = perf_counter()
    assert row(p, "exp").calls == 3
    assert about_to_leave - entered <= p.seconds - before <= perf_counter() - started
    x.exp()
    assert row(p, "exp").calls == 3


def test_the_table():
    block, x = Block(), leaf(2, 3)
    with profile() as p:
        block(x).sum().backward()
    lines = str(p).splitlines()
    assert lines[0].split() == ["op", "calls", "ms", "backward", "ms", "share", "saved"]
    assert [line.split("  ")[0] for line in lines[-3:]] == ["outside of ops", "the profiler", "total"]
    assert len({len(line) for line in lines}) == 1
    assert "100 %" in lines[-1]
    names = [line.split()[0] for line in p.table(by="module", sort="name").splitlines()[2:-4]]
    assert names == sorted(names) and "layers.1" in names
    assert p.rows(sort="calls")[-1].name in ("tanh", "mul", "sum")
    assert [r.saved_bytes for r in p.rows(sort="saved")] == sorted((r.saved_bytes for r in p.rows()), reverse=True)
    times = [r.seconds + r.backward_seconds for r in p.rows()]
    assert times == sorted(times, reverse=True)
    with pytest.raises(ValueError, match='by="op" or by="module", got \'ops\''):
        p.table(by="ops")
    with pytest.raises(ValueError, match="one of time, calls, saved, name, got 'size'"):
        p.table(sort="size")
    assert str(profile()).splitlines()[-1].split()[:2] == ["total", "0"]


def test_looking_on_does_not_change_the_bits():
    block, x = Block(), leaf(2, 3)
    block(x).sum().backward()
    plain = x.grad.numpy().copy()
    x.zero_grad()
    with profile():
        block(x).sum().backward()
    np.testing.assert_array_equal(plain, x.grad)
