"""The layers, losses and optimisers beside PyTorch's, where it is installed: outputs and all gradients, in float64."""

import numpy as np
import pytest

from tinygrad_qkv import Tensor, hvp, jvp, nn
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import optim

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
TF = torch.nn.functional

B, H, T, S, D = 2, 3, 5, 7, 6


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def compare(ours, theirs, *inputs, tolerance=1e-10):
    """Both functions on the same arrays: the outputs, and the gradients of every float input."""
    a = [Tensor(x, requires_grad=True) for x in inputs]
    b = [torch.tensor(x, requires_grad=True) for x in inputs]
    y, z = ours(*a), theirs(*b)
    np.testing.assert_allclose(y, z.detach().numpy(), rtol=tolerance, atol=tolerance)
    weights = numbers(*y.shape, seed=99)
    (y * weights).sum().backward()
    (z * torch.tensor(weights)).sum().backward()
    for x, w in zip(a, b, strict=True):
        np.testing.assert_allclose(x.grad, w.grad.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masks", ["none", "attend", "bias", "causal", "scale"])
def test_scaled_dot_product_attention(masks):
    keep = numbers(B, 1, T, S, seed=4) > -1
    keep[..., 0] = True
    bias = numbers(T, S, seed=5)
    ours, theirs, s = {
        "none": ({}, {}, S),
        "attend": ({"attend": keep}, {"attn_mask": torch.tensor(keep)}, S),
        "bias": ({"bias": bias}, {"attn_mask": torch.tensor(bias)}, S),
        "causal": ({"is_causal": True}, {"is_causal": True}, T),
        "scale": ({"scale": 0.3}, {"scale": 0.3}, S),
    }[masks]
    compare(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **ours),
        lambda q, k, v: TF.scaled_dot_product_attention(q, k, v, **theirs),
        *(numbers(B, H, n, width, seed=n) for n, width in ((T, 4), (s, 4), (s, 11))),
    )


@pytest.mark.parametrize("path", ["tensor", "fused"])
@pytest.mark.parametrize("masks", ["none", "attend", "causal"])
def test_jvp_and_hvp_of_attention(masks, path):
    """PyTorch's own path on a CPU refuses both; the one that keeps all scores does not."""
    keep = numbers(B, 1, T, S, seed=4) > -1
    keep[..., 0] = True
    ours, theirs, s = {
        "none": ({}, {}, S),
        "attend": ({"attend": keep}, {"attn_mask": torch.tensor(keep)}, S),
        "causal": ({"is_causal": True}, {"is_causal": True}, T),
    }[masks]
    shapes = [(B, H, n, width) for n, width in ((T, 4), (s, 4), (s, 11))]
    points, directions = ([numbers(*shape, seed=i) for i, shape in enumerate(shapes, start)] for start in (1, 4))
    w = numbers(B, H, T, 11, seed=9)
    p, v = (tuple(map(torch.tensor, xs)) for xs in (points, directions))

    def mine(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, path=path, **ours)

    def other(q, k, v):
        return TF.scaled_dot_product_attention(q, k, v, **theirs)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, tangent = torch.autograd.functional.jvp(other, p, v)
        _, product = torch.autograd.functional.hvp(lambda *xs: (other(*xs).square() * torch.tensor(w)).sum(), p, v)
    np.testing.assert_allclose(jvp(mine, points, directions)[1], tangent, rtol=1e-10, atol=1e-10)
    found = hvp(lambda *xs: (mine(*xs).square() * w).sum(), points, directions)
    for got, expected in zip(found, product, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("widths", [(D, D), (5, 11)])
def test_multi_head_attention(widths):
    kdim, vdim = widths
    mine = nn.MultiHeadAttention(D, H, kdim=kdim, vdim=vdim).astype("float64")
    for i, p in enumerate(mine.parameters()):
        p.data = numbers(*p.shape, seed=i)
    other = torch.nn.MultiheadAttention(D, H, kdim=kdim, vdim=vdim, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        matrices = [torch.tensor(W.data.T) for W in (mine.W_Q, mine.W_K, mine.W_V)]
        if kdim == D:
            other.in_proj_weight.copy_(torch.cat(matrices))
        else:
            for name, W in zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), matrices, strict=True):
                getattr(other, name).copy_(W)
        other.in_proj_bias.copy_(torch.cat([torch.tensor(b.data) for b in (mine.b_Q, mine.b_K, mine.b_V)]))
        other.out_proj.weight.copy_(torch.tensor(mine.W_O.data.T))
        other.out_proj.bias.copy_(torch.tensor(mine.b_O.data))
    ignore = np.arange(S) >= np.array([[4], [7]])
    query, key, value = numbers(B, T, D), numbers(B, S, kdim), numbers(B, S, vdim)
    compare(
        lambda q, k, v: mine(q, k, v, ignore=ignore[:, None, None]),
        lambda q, k, v: other(q, k, v, key_padding_mask=torch.tensor(ignore), need_weights=False)[0],
        *(query, key, value),
    )
    _, record = mine(query, key, value, lengths=[4, 7], need=("weights",))
    _, weights = other(
        *(torch.tensor(x) for x in (query, key, value)),
        key_padding_mask=torch.tensor(ignore),
        average_attn_weights=False,
    )
    np.testing.assert_allclose(record.weights, weights.detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(mine.W_O.grad, other.out_proj.weight.grad.numpy().T, rtol=1e-9, atol=1e-10)
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    packed = other.in_proj_weight.grad.chunk(3) if kdim == D else [getattr(other, name).grad for name in names]
    for W, g in zip((mine.W_Q, mine.W_K, mine.W_V), packed, strict=True):
        np.testing.assert_allclose(W.grad, g.numpy().T, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_transformer_block(norm):
    mine = nn.TransformerBlock(D, H, 11, norm=norm).astype("float64")
    for i, p in enumerate(mine.parameters()):
        p.data = numbers(*p.shape, seed=i)
    other = torch.nn.TransformerEncoderLayer(
        D, H, 11, dropout=0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    p = {name: torch.tensor(t.data) for name, t in mine.named_parameters()}
    state = {
        "self_attn.in_proj_weight": torch.cat([p[f"attn.W_{x}"].T for x in "QKV"]),
        "self_attn.in_proj_bias": torch.cat([p[f"attn.b_{x}"] for x in "QKV"]),
        "self_attn.out_proj.weight": p["attn.W_O"].T,
        "self_attn.out_proj.bias": p["attn.b_O"],
    }
    for a, b in (("linear1", "feed.up"), ("linear2", "feed.down"), ("norm1", "norm1"), ("norm2", "norm2")):
        state |= {f"{a}.{kind}": p[f"{b}.{kind}"] for kind in ("weight", "bias")}
    other.load_state_dict(state)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    compare(lambda x: mine(x, is_causal=True), lambda x: other(x, src_mask=causal), numbers(B, T, D))


def test_plain_layers():
    x = numbers(B, T, D)
    weight, bias = numbers(11, D, seed=1), numbers(11, seed=2)
    compare(F.linear, TF.linear, x, weight, bias)
    compare(F.rms_norm, lambda x, w: TF.rms_norm(x, (D,), w, 1e-5), x, numbers(D))
    compare(F.layer_norm, lambda x, w, b: TF.layer_norm(x, (D,), w, b), x, numbers(D), numbers(D, seed=1))
    ids = np.array([[0, 3, 3], [10, 0, 1]])
    compare(lambda w: F.embedding(w, ids), lambda w: TF.embedding(torch.tensor(ids), w), weight)


LOSSES = {
    "mse": (F.mse, TF.mse_loss, {}, {}),
    "l1": (F.l1, TF.l1_loss, {}, {}),
    "huber": (F.huber, TF.huber_loss, {"delta": 0.7}, {"delta": 0.7}),
    "bce_with_logits": (
        F.bce_with_logits,
        TF.binary_cross_entropy_with_logits,
        {"pos_weight": np.array([2.0, 3.0, 0.5])},
        {"pos_weight": torch.tensor([2.0, 3.0, 0.5], dtype=torch.float64)},
    ),
    "kl_div": (F.kl_div, TF.kl_div, {}, {}),
    "kl_div of logarithms": (F.kl_div, TF.kl_div, {"log_target": True}, {"log_target": True}),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_losses(name, reduction):
    ours, theirs, mine, other = LOSSES[name]
    target = 1 / (1 + np.exp(-numbers(T, 3, seed=1)))
    compare(
        lambda x: ours(x, target, reduction=reduction, **mine),
        lambda x: theirs(x, torch.tensor(target), reduction=reduction, **other),
        numbers(T, 3),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_over_classes(reduction):
    targets = np.array([0, 2, -100, 1, 2])
    for smoothing in (0.0, 0.2):
        compare(
            lambda x, s=smoothing: F.cross_entropy(x, targets, label_smoothing=s, reduction=reduction),
            lambda x, s=smoothing: TF.cross_entropy(x, torch.tensor(targets), label_smoothing=s, reduction=reduction),
            numbers(5, 3),
        )
    compare(
        lambda x: F.nll(x, targets, reduction=reduction),
        lambda x: TF.nll_loss(x, torch.tensor(targets), reduction=reduction),
        numbers(5, 3),
    )


OPTIMISERS = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "SGD Nesterov": {"momentum": 0.9, "nesterov": True},
    "Adam": {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
    "AdamW": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name):
    kind, settings = name.split()[0], OPTIMISERS[name]
    start = numbers(5, 3)
    p, w = nn.Parameter(start), torch.nn.Parameter(torch.tensor(start))
    mine, other = getattr(optim, kind)([p], lr=0.1, **settings), getattr(torch.optim, kind)([w], lr=0.1, **settings)
    for i in range(7):
        g = numbers(5, 3, seed=i)
        p.grad, w.grad = Tensor(g), torch.tensor(g)
        mine.step()
        other.step()
    np.testing.assert_allclose(p, w.detach().numpy(), rtol=1e-12)


def test_clipping():
    p, w = nn.Parameter(numbers(5)), torch.nn.Parameter(torch.tensor(numbers(5)))
    p.grad, w.grad = Tensor(numbers(5, seed=1)), torch.tensor(numbers(5, seed=1))
    assert optim.clip_grad_norm([p], 0.5) == pytest.approx(float(torch.nn.utils.clip_grad_norm_([w], 0.5)))
    np.testing.assert_allclose(p.grad, w.grad.numpy(), rtol=1e-5)  # theirs adds 1e-6 to the norm
