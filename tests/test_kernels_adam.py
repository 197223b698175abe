"""Adam's step in one pass: against its formulas in extended precision, for every size, layout and number of threads."""

import numpy as np
import pytest

from tinygrad_qkv.kernels import adam_step
from tinygrad_qkv.kernels.adam import STRETCH
from tinygrad_qkv.kernels.threads import PARALLEL_FROM, get_num_threads, set_num_threads

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "step": 3}


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
    adam_step(p, g, m, v, shrink=0.999, **SETTINGS)
    for got, want in zip((p, m, v), expected, strict=True):
        np.testing.assert_allclose(got, want.astype(dtype), rtol=8 * np.finfo(dtype).eps, atol=8 * np.finfo(dtype).eps)


def test_any_layout_changes_in_place():
    p, g, m, v = arrays((5, 7), np.float64)
    expected = by_the_formulas(p, g, m, v, **SETTINGS)
    big = np.zeros((7, 11))
    strided, fortran, backwards = big[:, 1:6].T, np.asfortranarray(m), v[:, ::-1].copy()[:, ::-1]
    strided[...] = p
    adam_step(strided, np.asfortranarray(g), fortran, backwards, **SETTINGS)
    for got, want in zip((strided, fortran, backwards), expected, strict=True):
        np.testing.assert_allclose(got, want.astype(float), rtol=1e-14)
    assert not big[:, 6:].any() and not big[:, 0].any()


def test_nan_and_inf_stay_where_they_are():
    p, g, m, v = arrays((6,), np.float32)
    g[1], g[4] = np.nan, np.inf
    adam_step(p, g, m, v, **SETTINGS)
    assert np.isfinite(p).tolist() == [True, False, True, True, False, True]


def test_bits_do_not_depend_on_the_number_of_threads():
    results, before = [], get_num_threads()
    for threads in sorted({1, before}):
        set_num_threads(threads)
        p, g, m, v = arrays((PARALLEL_FROM["adam"] + 11,), np.float32)
        adam_step(p, g, m, v, **SETTINGS)
        results.append(p.tobytes() + m.tobytes() + v.tobytes())
    set_num_threads(before)
    assert len(set(results)) == 1


def test_arrays_that_do_not_fit_are_refused():
    p, g, m, v = arrays((3,), np.float32)
    with pytest.raises(ValueError, match=r"g must have shape \(3,\), got \(2,\)"):
        adam_step(p, g[:2], m, v, **SETTINGS)
    with pytest.raises(TypeError, match="one dtype"):
        adam_step(p, g.astype(np.float64), m, v, **SETTINGS)
