"""Attention of few keys against the loops in float64 that test all of attention, and which calls go there."""

import importlib

import numpy as np
import pytest
from test_kernels_attention import DTYPES, TOLERANCE, inputs, reference

from tinygrad_qkv.kernels import attention, attention_pullback, set_num_threads, threads
from tinygrad_qkv.kernels.attention_rules import AttentionRules
from tinygrad_qkv.kernels.attention_short import QUERIES
from tinygrad_qkv.kernels.passes import SHORT

MOST = {dtype: SHORT // np.dtype(dtype).itemsize for dtype in DTYPES}  # keys


@pytest.fixture
def ran(monkeypatch):
    """The names of the short kernels, as they run."""
    caller, names = importlib.import_module("tinygrad_qkv.kernels.attention"), []

    def note(name, run):
        def noted(*arguments, **options):
            names.append(name)
            run(*arguments, **options)

        monkeypatch.setattr(caller, name, noted)

    note("short_forward", caller.short_forward)
    note("short_backward", caller.short_backward)
    return names


def computed(q, k, v, g, rules):
    out, lse = attention(q, k, v, rules)
    return out, lse, *attention_pullback(g, q, k, v, out, lse, rules)[:3]


def check(q, k, v, g, rules):
    T, S = q.shape[2], k.shape[2]
    written = rules._replace(positions=(np.arange(T)[None] + rules.offset, np.arange(S)[None]))
    names = "out", "lse", "dq", "dk", "dv"
    for name, got, want in zip(names, computed(q, k, v, g, rules), reference(q, k, v, g, written), strict=False):
        assert got.dtype == q.dtype and got.shape == want.shape
        largest = max(1, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[q.dtype.type] * largest, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 7, 12, 17, QUERIES])
def test_sizes_around_those_of_registers_and_blocks(T, dtype, ran):
    most = MOST[dtype]
    sizes = {1, 3, most // 2 - 1, most // 2, most // 2 + 1, most - 1, most}
    for S in sizes:
        near = {"offset": max(S - T, 0), "least": 0 if T <= S else -S}
        for rules in ({}, {**near, "most": max(S, T)}, {**near, "most": max(1, T - 1 + near["offset"] - S + 1)}):
            check(*inputs(2, 6, 2, T, S, 5, 3, dtype), AttentionRules(scale=0.7, **rules))
    assert ran == ["short_forward", "short_backward"] * 3 * len(sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_calls_go_to_the_tiles(dtype, ran):
    most, keep = MOST[dtype], np.ones((1, 1, 1, 1), bool)
    for T, S, rules in (
        (2, most + 1, {}),
        (QUERIES + 1, 2, {}),
        (4, 3, {"least": 0, "offset": -1}),  # the first query sees nothing
        (4, 3, {"least": -9, "most": 0}),  # nor does the last one here
        (3, 3, {"least": 1, "most": 0}),
        (3, 3, {"scale": -1.0}),
        (3, 3, {"keep": keep}),
        (3, 3, {"lengths": np.array([2])}),
        (3, 3, {"bias": np.zeros((3, 3), dtype)}),
        (3, 3, {"sink": np.zeros(1, dtype)}),
        (3, 3, {"softcap": 2.0}),
        (3, 3, {"dropout_p": 0.5}),
    ):
        computed(*inputs(1, 1, 1, T, S, 2, 3, dtype), AttentionRules(**rules))
    assert not ran


def test_bits_are_those_of_one_thread_and_views_are_read_in_place(ran):
    q, k, v, g = (x.swapaxes(1, 2) for x in inputs(31, 16, 16, 4, 4, 8, 8, np.float32))  # (31, 4, 16, 8)
    k, v = k[:, ::2], v[:, ::2]
    assert threads.PARALLEL_FROM["attention"] <= 31 * 4 * 16 * 16 * 16
    rules = AttentionRules(least=0)
    check(q, k, v, g, rules)
    before, several = threads.get_num_threads(), computed(q, k, v, g, rules)
    try:
        set_num_threads(1)
        for x, y in zip(several, computed(q, k, v, g, rules), strict=True):
            assert x.tobytes() == y.tobytes()
    finally:
        set_num_threads(before)
    for b in (0, 17, 30):  # alone an entry is too little for threads
        for x, y in zip(several, computed(*(x[b : b + 1] for x in (q, k, v, g)), rules), strict=True):
            np.testing.assert_array_equal(x[b : b + 1], y)
    assert len(ran) == 12


def test_scores_of_any_size():
    q, k, v, g = inputs(1, 1, 1, 5, 11, 4, 3, np.float32)
    for size in (1e-30, 1e4, 1e15):
        x = size * (q[0, 0].astype(np.float64) @ k[0, 0].astype(np.float64).T)
        results = computed(q, k, v, g, AttentionRules(scale=size))
        assert all(np.isfinite(result).all() for result in results)
        if size > 1e10:
            np.testing.assert_array_equal(results[0][0, 0], v[0, 0, x.argmax(1)])


def test_nan_and_inf_are_those_of_the_formula():
    q, k, v, g = inputs(1, 1, 1, 6, 13, 2, 3, np.float32)
    k[...] = np.abs(k)
    q[0, 0, 1], q[0, 0, 2], q[0, 0, 3] = np.nan, np.inf, -np.inf  # the last has no softmax
    v[0, 0, 5, 1] = np.inf
    out, lse, dq, *_ = computed(q, k, v, g, AttentionRules())
    assert np.isnan(out[0, 0, 1:4]).all() and np.isnan(lse[0, 0, 1:4]).all() and np.isnan(dq[0, 0, 1:4]).all()
    assert np.isposinf(out[0, 0, [0, 4, 5], 1]).all() and np.isfinite(out[0, 0, [0, 4, 5]][:, [0, 2]]).all()
    k[0, 0, 9] = -np.inf
    assert np.isfinite(computed(np.abs(q[:, :, 4:]), k, v, g[:, :, 4:], AttentionRules())[1]).all()
