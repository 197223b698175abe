"""P6, P8 and P16: attention alone, the paper's base layer, and the learner's step."""

import functools

import numpy as np
from cases import Case, calls, numbers

HEADS, WIDTH = 8, 64


def inputs(T):
    """q, k, v and the output's gradient, (1, 8, T, 64)."""
    return [numbers(1, HEADS, T, WIDTH, seed=seed) for seed in range(4)]


def ours(T, causal, backward):
    from tinygrad_qkv import Tensor, no_grad
    from tinygrad_qkv.nn import functional as F

    *arrays, g = inputs(T)
    leaves, g = [Tensor(x, requires_grad=True) for x in arrays], Tensor.from_numpy(g)
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    return calls(attend, leaves, g, no_grad, backward)


def torch(T, causal, backward):
    import torch
    from torch.nn import functional as F

    *arrays, g = map(torch.from_numpy, inputs(T))
    leaves = [x.requires_grad_() for x in arrays]
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    return calls(attend, leaves, g, torch.no_grad, backward)


def jax(T, causal, backward):
    import jax

    *arrays, g = (jax.device_put(x.swapaxes(1, 2)) for x in inputs(T))  # its heads are axis 2

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    @jax.jit
    def both(arrays, g):
        output, pullback = jax.vjp(attend, *arrays)
        return [x.swapaxes(1, 2) for x in (output, *pullback(g))]

    forward = jax.jit(lambda arrays: [attend(*arrays).swapaxes(1, 2)])
    if backward:
        return lambda: jax.block_until_ready(both(arrays, g))
    return lambda: jax.block_until_ready(forward(arrays))


def layer_ours(B, T, D, H, learns):
    """Multi-head attention on itself; with `learns` Adam's step follows the backward pass."""
    from tinygrad_qkv import Tensor, nn
    from tinygrad_qkv.nn import optim

    layer = nn.MultiHeadAttention(D, H)
    for p, array in zip((layer.W_Q, layer.W_K, layer.W_V, layer.W_O), matrices(D), strict=True):
        p.data = array
    x, g = Tensor(numbers(B, T, D), requires_grad=not learns), Tensor.from_numpy(numbers(B, T, D, seed=1))
    adam = optim.Adam(layer.parameters(), lr=1e-3)

    def step():
        adam.zero_grad()
        x.grad = None
        output = layer(x)
        output.backward(g)
        if learns:
            adam.step()
            return [output]
        return [output, x.grad, layer.W_Q.grad, layer.W_O.grad, layer.b_V.grad]

    return step


def layer_torch(B, T, D, H, learns):
    import torch

    layer = torch.nn.MultiheadAttention(D, H, batch_first=True)
    W_Q, W_K, W_V, W_O = matrices(D)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.from_numpy(np.concatenate([W_Q.T, W_K.T, W_V.T])))
        layer.out_proj.weight.copy_(torch.from_numpy(W_O.T.copy()))
        layer.in_proj_bias.zero_()
        layer.out_proj.bias.zero_()
    x, g = torch.from_numpy(numbers(B, T, D)).requires_grad_(not learns), torch.from_numpy(numbers(B, T, D, seed=1))
    adam = torch.optim.Adam(layer.parameters(), lr=1e-3)

    def step():
        adam.zero_grad()
        x.grad = None
        output = layer(x, x, x, need_weights=False)[0]
        output.backward(g)
        if learns:
            adam.step()
            return [output]
        W = layer.in_proj_weight.grad
        return [output, x.grad, W[:D].T, layer.out_proj.weight.grad.T, layer.in_proj_bias.grad[2 * D :]]

    return step


def matrices(D):
    """W_Q, W_K, W_V and W_O, (in, out)."""
    return [numbers(D, D, seed=10 + i) / np.float32(D**0.5) for i in range(4)]


def _attention(T, causal, backward):
    target = {"torch": 1.7 if T == 512 else 1.3} if backward else {"torch": 1.2}
    sides = {"ours": ours, "torch": torch}
    if T <= 512 or not backward:  # XLA keeps all scores: at T = 2048 it takes five times as long as torch
        sides["jax"] = jax
    flops = (14.0 if backward else 4.0) * HEADS * T * T * WIDTH / (2 if causal else 1)
    name = f"attention T {T}{', causal' if causal else ''}, {'f+b' if backward else 'forward'}"
    quick = causal and (T, backward) in ((512, False), (512, True), (2048, True))
    sizes = {"T": T, "causal": causal, "backward": backward}
    return Case("P6", name, sides, sizes, target, quick, flops, control=T == 512 and causal and backward)


BASE = {"B": 8, "T": 128, "D": 512, "H": 8, "learns": False}
SMALL = {"B": 32, "T": 16, "D": 32, "H": 4, "learns": True}
LAYER = {"ours": layer_ours, "torch": layer_torch}
CASES = [
    *(
        _attention(T, causal, backward)
        for T in (512, 2048, 4096)
        for causal in (True, False)
        for backward in (False, True)
    ),
    Case("P8", "base layer B8 T128 D512 H8, f+b", LAYER, BASE, {"torch": 1.2}, quick=True, control=True),
    Case("P16", "learner's step B32 T16 D32 H4, f+b and Adam", LAYER, SMALL, {"torch": 2.0}, quick=True),
]
