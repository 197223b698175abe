"""Adam's step in one pass: against its formulas in extended precision, for every size, layout and number of threads."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import adam_step
from tinygrad_qkv.kernels.adam import END, G, Moving, P, _overlap, adam_settings
from tinygrad_qkv.kernels.elementwise import STRETCH
from tinygrad_qkv.kernels.threads import PARALLEL_FROM, get_num_threads, set_num_threads

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "step": 3}
NUMBERS = adam_settings(**SETTINGS)


def arrays(shape, dtype):
    random = np.random.default_rng(0)
    p, g, m, root = (np.array(random.normal(size=shape), dtype) for _ in range(4))
    return p, g, m, np.array(root * root)


def by_the_formulas(p, g, m, v, lr, betas, eps, step, shrink=1.0):
    p, g, m, v = (x.astype(np.longdouble) for x in (p, g, m, v))
    m, v = m + (1 - betas[0]) * (g - m), v + (1 - betas[1]) * (g * g - v)
    size = np.sqrt(v / (1 - np.longdouble(betas[1]) ** step)) + eps
    return shrink * p - lr / (1 - np.longdouble(betas[0]) ** step) * m / size, m, v


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3, 5), (STRETCH - 1,), (STRETCH + 1,), (PARALLEL_FROM["adam"] + 7,)]
)
def test_values(shape, dtype):
    p, g, m, v = arrays(shape, dtype)
    expected = by_the_formulas(p, g, m, v, shrink=0.999, **SETTINGS)
    adam_step([Moving(p, g, m, v, adam_settings(shrink=0.999, **SETTINGS))])
    for got, want in zip((p, m, v), expected, strict=True):
        np.testing.assert_allclose(got, want.astype(dtype), rtol=8 * np.finfo(dtype).eps, atol=8 * np.finfo(dtype).eps)


# Together more than threads are woken for; several lie in one stretch, one in many, and no end is that of a stretch.
SIZES = [(3,), (5, 7), (), (STRETCH + 1,), (0, 2), (1,), (PARALLEL_FROM["adam"] - 13,), (11,), (2, STRETCH - 1)]


def many(dtype):
    """Parameters of all sizes, every other one with settings of its own."""
    own = adam_settings(lr=0.3, betas=(0.5, 0.7), eps=1e-3, step=8, shrink=0.9)
    return [Moving(*arrays(shape, dtype), own if i % 2 else NUMBERS) for i, shape in enumerate(SIZES)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_many_parameters_move_as_each_does_alone(dtype):
    together, alone = many(dtype), many(dtype)
    adam_step(together)
    for moving in alone:
        adam_step([moving])
    for one, other in zip(together, alone, strict=True):
        assert [x.tobytes() for x in one[:4]] == [x.tobytes() for x in other[:4]]
    adam_step([])


def test_gradients_that_nothing_else_holds():
    """The 0-d gradient is a NumPy scalar, the others are copied into C order: the kernel reads memory of its own."""
    parameters = [arrays((n, 2), np.float32) for n in range(1, 40)]
    expected = [by_the_formulas(*x, **SETTINGS)[0] for x in parameters]
    p, g, m, v = arrays((), np.float32)
    single = by_the_formulas(p, g, m, v, **SETTINGS)[0]
    moving = [Moving(p, np.asfortranarray(g), m, v, NUMBERS) for p, g, m, v in parameters]
    adam_step([*moving, Moving(p, g + np.float32(0), m, v, NUMBERS)])
    for got, want in zip((*(x[0] for x in parameters), p), (*expected, single), strict=True):
        np.testing.assert_allclose(got, want.astype(np.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shared", ["parameters", "gradient"])
def test_parameters_that_share_memory_move_one_after_the_other(shared):
    n = PARALLEL_FROM["adam"]
    results = []
    for in_one_call in (False, True):
        p, g, m, v = arrays((2 * n,), np.float32)
        first = Moving(p[:n], g[:n], m[:n], v[:n], NUMBERS)
        second = Moving(p[n // 2 : n // 2 + n], g[n:], m[n:], v[n:], NUMBERS)
        if shared == "gradient":
            second = Moving(p[n:], p[n - 5 : -5], m[n:], v[n:], NUMBERS)
        for call in [[first, second]] if in_one_call else [[first], [second]]:
            adam_step(call)
        results.append(p.tobytes() + m.tobytes() + v.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("places", "gradients", "expected"),
    [
        ([40, 0, 12], [100, 100, 100], False),  # 3 elements each: 12 bytes; a gradient may serve several parameters
        ([40, 0, 11], [100, 120, 140], True),
        ([40, 0, 12], [88, 28, 100], False),
        ([40, 0, 12], [100, 100, 51], True),
        ([40, 0, 12], [100, 29, 140], True),
        ([40, 0, 12], [4, 60, 100], True),
    ],
)
def test_overlaps_are_found(places, gradients, expected):
    table = np.zeros((3, 6), np.int64)
    table[:, P], table[:, G], table[:, END] = places, gradients, (3, 6, 9)
    assert _overlap(table, itemsize=4) is expected


def test_any_layout_changes_in_place():
    p, g, m, v = arrays((5, 7), np.float64)
    expected = by_the_formulas(p, g, m, v, **SETTINGS)
    big = np.zeros((7, 11))
    strided, fortran, backwards = big[:, 1:6].T, np.asfortranarray(m), v[:, ::-1].copy()[:, ::-1]
    strided[...] = p
    adam_step([Moving(strided, np.asfortranarray(g), fortran, backwards, NUMBERS)])
    for got, want in zip((strided, fortran, backwards), expected, strict=True):
        np.testing.assert_allclose(got, want.astype(float), rtol=1e-14)
    assert not big[:, 6:].any() and not big[:, 0].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_betas_of_0_forget_the_past_whatever_its_size(dtype):
    """A small gradient after a large one: what rounding leaves of that would be all that there is of v, or 0."""
    p, g, m, v = np.zeros(7, dtype), np.full(7, 1e-6, dtype), np.full(7, 3e4, dtype), np.full(7, 9e8, dtype)
    adam_step([Moving(p, g, m, v, adam_settings(lr=1, betas=(0.0, 0.0), eps=0.0, step=2))])
    np.testing.assert_array_equal(m, g)
    np.testing.assert_array_equal(v, g * g)
    np.testing.assert_allclose(p, -1, rtol=4 * np.finfo(dtype).eps)


def test_nan_and_inf_stay_where_they_are():
    p, g, m, v = arrays((6,), np.float32)
    g[1], g[4] = np.nan, np.inf
    adam_step([Moving(p, g, m, v, NUMBERS)])
    assert np.isfinite(p).tolist() == [True, False, True, True, False, True]


def test_bits_do_not_depend_on_the_number_of_threads():
    results, before = [], get_num_threads()
    for threads in sorted({1, before}):
        set_num_threads(threads)
        parameters = many(np.float32)
        adam_step(parameters)
        results.append([x.tobytes() for moving in parameters for x in moving[:4]])
    set_num_threads(before)
    assert results[0] == results[-1]


def test_arrays_that_do_not_fit_are_refused():
    p, g, m, v = arrays((3,), np.float32)
    with pytest.raises(ValueError, match=r"g must have shape \(3,\), got \(2,\)"):
        adam_step([Moving(p, g[:2], m, v, NUMBERS)])
    with pytest.raises(TypeError, match="one dtype"):
        adam_step([Moving(p, g, m, v, NUMBERS), Moving(*arrays((2,), np.float64), NUMBERS)])
    with pytest.raises(TypeError, match="one dtype"):
        adam_step([Moving(p, g.astype(np.float64), m, v, NUMBERS)])
