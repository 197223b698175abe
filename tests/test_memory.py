"""Shared buffers: what counts as one, when a tensor is asked for it, and that the list of viewers stays short."""

import threading

import numpy as np
import pytest

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, no_grad
from tinygrad_qkv.memory import memory_of

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
