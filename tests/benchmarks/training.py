"""P9, P10 and P14: whole training steps of a small GPT, and AdamW's step alone."""

import numpy as np
from cases import Case, numbers

LR = 1e-3


def batch(vocabulary, T, B):
    """Inputs and targets, (B, T)."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (B, T + 1))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def weights(layers, D, T, vocabulary):
    """The start of both models, by name; matrices are (out, in), those of attention (3 D, D) for q, k and v."""
    shapes = {"tokens": (vocabulary, D), "positions": (T, D), "head": (vocabulary, D)}
    for i in range(layers):
        shapes |= {f"{i}.qkv": (3 * D, D), f"{i}.out": (D, D), f"{i}.up": (4 * D, D), f"{i}.down": (D, 4 * D)}
    return {name: numbers(*shape, seed=i) * np.float32(0.02) for i, (name, shape) in enumerate(shapes.items())}


def gpt_ours(layers, D, H, T, B, vocabulary):
    from tinygrad_qkv import nn
    from tinygrad_qkv.nn import functional as F
    from tinygrad_qkv.nn import optim

    class GPT(nn.Module):
        def __init__(self):
            self.tokens, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(T, D)
            blocks = (nn.TransformerBlock(D, H, activation="gelu") for _ in range(layers))
            self.blocks = nn.ModuleList(blocks)
            self.norm = nn.LayerNorm(D)
            self.head = nn.Linear(D, vocabulary, bias=False)

        def forward(self, ids):
            x = self.tokens(ids) + self.positions(np.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x, is_causal=True)
            return self.head(self.norm(x))

    model, start = GPT(), weights(layers, D, T, vocabulary)
    for name in ("tokens", "positions", "head"):
        getattr(model, name).weight.data = start[name]
    for i, block in enumerate(model.blocks):
        attn, feed = block.attn, block.feed
        W = np.split(start[f"{i}.qkv"], 3)
        for p, array in zip((attn.W_Q, attn.W_K, attn.W_V, attn.W_O), (*W, start[f"{i}.out"]), strict=True):
            p.data = np.ascontiguousarray(array.T)
        for linear, name in ((feed.up, "up"), (feed.down, "down")):
            linear.weight.data, linear.bias.data = start[f"{i}.{name}"], np.zeros_like(linear.bias.data)
    adam = optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    ids, targets = batch(vocabulary, T, B)
    count = sum(p.size for p in model.parameters())

    def step():
        adam.zero_grad()
        loss = F.cross_entropy(model(ids), targets)
        loss.backward()
        adam.step()
        return [loss, count]

    return step


def gpt_torch(layers, D, H, T, B, vocabulary):
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
            self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
            self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

        def forward(self, x):
            q, k, v = (part.view(B, T, H, D // H).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(D, 2))
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(heads.transpose(1, 2).reshape(B, T, D))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(T, D)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, vocabulary, bias=False)

        def forward(self, ids):
            x = self.tokens(ids) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model, start = GPT(), weights(layers, D, T, vocabulary)
    with torch.no_grad():
        for name, p in model.named_parameters():
            key = name.removeprefix("blocks.").removesuffix(".weight")
            if key in start:
                p.copy_(torch.from_numpy(start[key]))
            elif name.endswith("bias"):
                p.zero_()
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    ids, targets = map(torch.from_numpy, batch(vocabulary, T, B))
    count = sum(p.numel() for p in model.parameters())

    def step():
        adam.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        adam.step()
        return [loss, count]

    return step


# 10 million parameters as a model has them: ten matrices, each with a bias.
SHAPES = [shape for _ in range(10) for shape in ((1000, 1000), (1000,))]


def adam_ours(fused):
    from tinygrad_qkv import Tensor
    from tinygrad_qkv.nn import optim

    parameters = [Tensor(numbers(*shape, seed=i), requires_grad=True) for i, shape in enumerate(SHAPES)]
    for i, p in enumerate(parameters):
        p.grad = Tensor(numbers(*p.shape, seed=100 + i))
    adam = optim.AdamW(parameters, lr=LR, weight_decay=0.01)

    def step():
        adam.step()
        return [parameters[0], parameters[1]]

    return step


def adam_torch(fused):
    import torch

    parameters = [torch.from_numpy(numbers(*shape, seed=i)).requires_grad_() for i, shape in enumerate(SHAPES)]
    for i, p in enumerate(parameters):
        p.grad = torch.from_numpy(numbers(*p.shape, seed=100 + i))
    adam = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01, **({"fused": True} if fused else {}))

    def step():
        adam.step()
        return [parameters[0], parameters[1]]

    return step


GPT = {"ours": gpt_ours, "torch": gpt_torch}
ADAM = {"ours": adam_ours, "torch": adam_torch}
SMALL = {"layers": 4, "D": 128, "H": 4, "T": 64, "B": 12, "vocabulary": 65}
LARGE = {"layers": 6, "D": 384, "H": 6, "T": 256, "B": 8, "vocabulary": 65}
CASES = [
    Case("P9", "GPT step, 4 layers D128 H4 T64 B12 V65", GPT, SMALL, {"torch": 1.3}, quick=True, control=True),
    Case("P10", "GPT step, 6 layers D384 H6 T256 B8 V65", GPT, LARGE, {"torch": 1.2}, quick=True),
    Case("P14", "AdamW step, 10 million parameters", ADAM, {"fused": False}, {"torch": 1.5}, quick=True),
    Case("P14", "the same; torch with fused=True, not its default", ADAM, {"fused": True}),
]
