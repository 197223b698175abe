"""Attention on every path and mask kind, and the layers around it, at every order of derivative."""

import numpy as np
import pytest

from tinygrad_qkv import (
    Tensor,
    check_grad,
    check_grad_grad,
    check_jvp,
    checkpoint,
    cross_entropy,
    embedding,
    hessian,
    hvp,
    jvp,
    layer_norm,
    manual_seed,
    nn,
    no_grad,
)
from tinygrad_qkv.nn import functional as F

CHECKS = (check_grad, check_grad_grad, check_jvp)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


B, H, T, S, D_K, D_V = 2, 2, 3, 5, 2, 3
KEEP = numbers(B, 1, T, S, seed=4) > -0.3
KEEP[0, 0, 1] = False  # a row that may look nowhere
MASKS = {
    "none": {},
    "attend": {"attend": KEEP},
    "ignore": {"ignore": ~KEEP},
    "bias": {"bias": np.where(KEEP, numbers(T, S, seed=5), -np.inf)},
    "lengths": {"lengths": np.array([0, 4])},
    "causal": {"is_causal": True},
    "window": {"window": 1},
    "positions": {"is_causal": True, "q_positions": np.array([4, 0, 2]), "k_positions": np.arange(S)[::-1].copy()},
    "softcap": {"softcap": 1.5, "is_causal": True},
    "sink": {"sink": numbers(H, seed=6), "is_causal": True},
    "dropout": {"dropout_p": 0.4},
}


def qkv(heads=H):
    return numbers(B, H, T, D_K, seed=1), numbers(B, heads, S, D_K, seed=2), numbers(B, heads, S, D_V, seed=3)


def assembled(blocks, inputs):
    """The Hessian of several arguments as one matrix."""
    sizes = [x.size for x in inputs]
    rows = zip(blocks, sizes, strict=True)
    return np.block([[np.asarray(b).reshape(m, n) for b, n in zip(row, sizes, strict=True)] for row, m in rows])


def attention(path, masks):
    def f(q, k, v):
        manual_seed(3)  # the same weights are dropped in every call
        return F.scaled_dot_product_attention(q, k, v, path=path, **masks)

    return f


@pytest.mark.parametrize("heads", [H, 1])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_attention_on_every_path_and_mask(path, masks, heads):
    f = attention(path, MASKS[masks])
    for check in CHECKS:
        check(f, *qkv(heads))


@pytest.mark.parametrize("masks", ["none", "attend", "bias", "lengths", "causal", "positions"])
def test_attention_as_a_scalar_graph(masks):
    for check in CHECKS:
        check(attention("scalar", MASKS[masks]), *qkv())


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_learned_bias_and_sink(path):
    def f(q, k, v, bias, sink):
        words = {"bias": bias, "sink": sink, "softcap": 2.0, "attend": KEEP}
        return F.scaled_dot_product_attention(q, k, v, path=path, **words)

    for check in CHECKS:
        check(f, *qkv(), numbers(H, 1, S, seed=7), numbers(H, seed=8))


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_nan_behind_a_mask_reaches_no_order(path):
    q, k, v = qkv()
    f = attention(path, {"lengths": np.array([3, 0])})
    dirty = k.copy(), v.copy()
    for x in dirty:
        x[0, :, 3:], x[1] = np.nan, np.inf
    for check in CHECKS:
        check(f, q, *dirty)

    def loss(q, k, v):
        return f(q, k, v).square().sum()

    for clean, got in zip(hvp(loss, (q, k, v), (q, k, v)), hvp(loss, (q, *dirty), (q, k, v)), strict=True):
        np.testing.assert_allclose(got, clean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_the_hessian_of_attention_is_symmetric_and_zero_in_rows_without_a_key(path):
    q, k, v = (x[:1, :1] for x in qkv())
    f = attention(path, {"attend": KEEP[:1]})
    blocks = hessian(lambda q, k, v: (f(q, k, v) * numbers(T, D_V, seed=9)).square().sum(), q, k, v)
    whole = assembled(blocks, [q, k, v])
    np.testing.assert_allclose(whole, whole.T, atol=1e-10)
    assert np.isfinite(whole).all() and not whole[D_K : 2 * D_K].any() and whole[:D_K].any()


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, b: (layer_norm(x, w, b) ** 3).sum(),
        lambda x, w, b: cross_entropy(x * w + b, np.array([4, 0, -100]), label_smoothing=0.1),
        lambda x, w, b: (embedding(x, np.array([[2, 0], [2, 1]])).exp() * w).sum() + b.sum() ** 2,
    ],
    ids=["layer norm", "cross-entropy", "embedding"],
)
def test_hessians_of_layers_are_symmetric_and_right(f):
    inputs = numbers(3, 5, seed=1), numbers(5, seed=2), numbers(5, seed=3)
    for check in CHECKS:
        check(f, *inputs)
    blocks = hessian(f, *inputs)
    whole = assembled(blocks, inputs)
    np.testing.assert_allclose(whole, whole.T, atol=1e-10)
    parts = [numbers(*x.shape, seed=4 + i) for i, x in enumerate(inputs)]
    product, v = hvp(f, inputs, parts), np.concatenate([p.ravel() for p in parts])
    np.testing.assert_allclose(np.concatenate([np.ravel(p) for p in product]), whole @ v, atol=1e-10)


def test_derivatives_of_a_whole_block_in_float32():
    block = nn.TransformerBlock(6, 2, 5)
    x, v = numbers(1, 3, 6).astype(np.float32), numbers(1, 3, 6, seed=1).astype(np.float32)
    _, tangent = jvp(block, x, v)
    up, down = (np.asarray(block(Tensor(x + s * 1e-2 * v)), np.float64) for s in (1, -1))
    assert tangent.dtype == np.float32 and tangent.requires_grad  # the block's weights do
    np.testing.assert_allclose(tangent, (up - down) / 2e-2, atol=2e-3)
    with no_grad():
        assert not jvp(block, x, v)[1].requires_grad


def test_jvp_through_a_checkpoint():
    for check in CHECKS:
        check(lambda x: checkpoint(lambda x: (x * x).sin(), x), numbers(5))
