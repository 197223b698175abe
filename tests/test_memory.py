"""Shared buffers: what counts as one, and that viewers, graphs and gradients do not pile up."""

import gc
import sys
import threading
import weakref
from contextlib import nullcontext, suppress

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, checkpoint, grad, nn, no_grad, profile, recording
from tinygrad_qkv.autograd import ancestry
from tinygrad_qkv.memory import memory_of
from tinygrad_qkv.nn import functional as F

VIEWS = {
    "reshape": lambda t: t.reshape(6),
    "transpose": lambda t: t.T,
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "getitem": lambda t: t[1:],
    "broadcast": lambda t: t.unsqueeze(0).broadcast_to((5, 2, 3)),
    "squeeze": lambda t: t.unsqueeze(0).squeeze(0),
    "flip": lambda t: t.flip(0),
    "split": lambda t: t.split(1)[1],
    "detach": lambda t: t.detach(),
    "of a view": lambda t: t[1:].T.reshape(3),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_has_the_memory_of_its_base(view):
    base = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True) * 1.0
    seen = view(base)
    assert seen._memory is base._memory is not None
    assert base._memory.seen_by_others(base) and seen._memory.seen_by_others(seen)
    del seen
    assert not base._memory.seen_by_others(base)


def test_what_is_no_view_has_a_memory_of_its_own():
    base = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    for other in (base + 1.0, base.clone(), base.T.reshape(6), base @ base.T, base[[0, 1]], base.exp()):
        assert other._memory is None or other._memory is not base._memory


def test_only_shared_written_and_saved_results_have_a_memory():
    x = Tensor(np.ones(3), requires_grad=True)
    y = x * 2.0
    assert x._memory is None and y._memory is None
    with no_grad():
        y += 1.0
    assert y._memory is not None
    assert x.exp()._memory is not None  # its rule reads it


def test_a_result_rewrapped_for_a_higher_order_has_the_memory_of_the_result():
    """A write to the result is refused by the backward of the backward too."""
    x = Tensor(np.ones(3), requires_grad=True)
    y = x.exp()
    (g,) = tq.grad(y.sum(), x, create_graph=True)
    y += 1.0
    with pytest.raises(RuntimeError, match="changed in place"):
        g.sum().backward()


def test_the_list_of_viewers_stays_short():
    w = Tensor(np.ones((2, 3)), requires_grad=True)
    kept = [w.T for _ in range(5)]
    for _ in range(1000):
        w.reshape(6)
    assert len(memory_of(w).viewers) < 40
    assert memory_of(w).seen_by_others(w)
    assert memory_of(w).seen_by_others(kept[0])


def test_threads_that_make_the_first_view_at_once_share_one_memory():
    for _ in range(50):
        base = Tensor(np.ones((2, 3)))
        start, views = threading.Barrier(4), []

        def look(base=base, start=start, views=views):
            start.wait()
            views.append(base.T)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {id(view._memory) for view in views} == {id(base._memory)}
        assert len(base._memory.viewers) == 5


# ---- what a step of training leaves behind


class Small(nn.Module):
    """Two layers with dropout between."""

    def __init__(self):
        self.layers = [nn.Linear(2, 3), nn.Linear(3, 1)]

    def forward(self, x):
        return self.layers[1](F.dropout(self.layers[0](x).tanh(), 0.1))


def one_step(i, model, step, x):
    """A step of training; each kind of guest comes along now and then."""
    step.zero_grad()
    with recording() if i % 7 == 0 else nullcontext():
        y = checkpoint(model, x) if i % 5 == 0 else model(x)
        loss = (y * y).mean()
    if i % 3 == 0:
        y.retain_grad()
        y.register_hook(lambda g: g * 2.0)
    if i % 11 == 0:
        slopes = grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum((s * s).sum() for s in slopes)
    if i % 13 == 0:
        with pytest.raises(ZeroDivisionError), y.register_hook(lambda g: 1 / 0):
            loss.backward()
        if i % 2:
            return
    if i % 17 == 0:
        with profile(), model.layers[1].register_backward_hook(lambda m, g_in, g_out: (g_in[0] * 1.0,)):
            model(x + 1.0).sum().backward()
    loss.backward(create_graph=i % 19 == 0)
    with no_grad():
        for p in model.parameters():
            p.grad = p.grad.detach()
    step.step()


def test_ten_thousand_steps_run_in_constant_memory():
    model = Small()
    step = nn.optim.SGD(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.register_hook(lambda g: g.clip(-1.0, 1.0))
    model.register_forward_hook(lambda m, args, y: None)
    x = Tensor(np.ones((1, 2), np.float32))
    blocks = []
    for i in range(1, 10_001):
        one_step(i, model, step, x)
        if i in (1000, 10_000):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    assert blocks[1] - blocks[0] < 300, f"{blocks[1] - blocks[0]} blocks more after 9000 steps"


@pytest.mark.parametrize("kind", ["plain", "recording", "hooks", "retained", "failed", "profiled", "tied views"])
def test_reference_counting_alone_frees_the_graph(kind):
    """Without create_graph there is no cycle: all goes at once with the last reference to the result."""
    model, x = Small(), Tensor(np.ones((1, 2), np.float32))
    handles = []
    if kind == "hooks":
        handles = [m.register_backward_hook(lambda m, g_in, g_out: None) for m in model.modules()]
    gc.collect()
    gc.disable()
    try:
        with {"recording": recording, "profiled": profile}.get(kind, nullcontext)():
            y = model(x)
            if kind == "tied views":
                y = y.reshape(1) * y.detach().T + y[0]
            loss = (y * y).sum()
        if kind == "hooks":
            y.register_hook(lambda g: g * 2.0)
        if kind == "failed":
            # pytest.raises would keep the traceback, and so the graph
            with suppress(ZeroDivisionError), y.register_hook(lambda g: 1 / 0):
                loss.backward()
        loss.backward(retain_graph=kind == "retained")
        alive = [weakref.ref(node) for node in ancestry([loss._node]) if not node.is_leaf]
        arrays = [weakref.ref(y._data), weakref.ref(loss._data)]
        assert len(alive) > 5
        del loss, y
        assert [r() for r in alive + arrays if r() is not None] == []
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()


def test_what_the_ops_saved_is_freed_by_backward_itself():
    x = Tensor(np.ones(1000), requires_grad=True)
    h = x.exp()
    y = (h.sin() * 3.0).sum()
    saved = weakref.ref(h)
    del h
    assert saved() is not None
    y.backward()
    assert saved() is None


def test_garbage_collection_frees_what_create_graph_made():
    x = Tensor(np.ones(3), requires_grad=True)
    y = x.exp().sum()
    y.backward(create_graph=True)
    node = weakref.ref(y._node)
    del x, y
    gc.collect()
    assert node() is None
