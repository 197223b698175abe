"""P11 and P15: the engine's own cost, for each op and as graphs grow."""

import time

import numpy as np
from cases import Case

ROUNDS = 50  # of four ops
START = np.array([0.3, -0.2, 0.9], np.float32)


def chain(x, tanh):
    """200 elementwise ops on three numbers."""
    y = x
    for _ in range(ROUNDS):
        y = tanh(y * 1.01 + 0.1) - 0.2
    return y


def ours():
    from tinygrad_qkv import Tensor

    x = Tensor(START, requires_grad=True)

    def step():
        x.grad = None
        y = chain(x, Tensor.tanh)
        y.sum().backward()
        return [y, x.grad]

    return step


def torch():
    import torch

    x = torch.from_numpy(START.copy()).requires_grad_()

    def step():
        x.grad = None
        y = chain(x, torch.tanh)
        y.sum().backward()
        return [y, x.grad]

    return step


def mygrad():
    import mygrad

    x = mygrad.tensor(START)

    def step():
        x.null_grad()
        y = chain(x, mygrad.tanh)
        result = y.data
        y.sum().backward()
        return [result, x.grad]

    return step


def tinygrad():
    from tinygrad import Tensor

    x = Tensor(START)

    def step():
        y = chain(x, Tensor.tanh)
        (gradient,) = y.sum().gradient(x)
        return [y.numpy(), gradient.numpy()]

    return step


def backward_seconds(ops: int) -> float:
    """Of backward through a chain of so many ops."""
    from tinygrad_qkv import Tensor

    y = Tensor(START, requires_grad=True)
    for _ in range(ops // 2):
        y = y * 1.0 + 0.1
    loss = y.sum()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def drawing_seconds(nodes: int) -> float:
    """Of drawing a graph of so many ops as DOT."""
    from tinygrad_qkv import Tensor, draw_graph

    y = Tensor(START, requires_grad=True)
    for _ in range(nodes // 2):
        y = y * 1.0 + 0.1
    start = time.perf_counter()
    assert draw_graph(y).source.count("\n") >= nodes
    return time.perf_counter() - start


SIDES = {"ours": ours, "torch": torch, "mygrad": mygrad, "tinygrad": tinygrad}
TARGET = {"torch": 1.5, "mygrad": 2.0, "tinygrad": 2.0}
CASES = [Case("P11", "200 ops on 3 numbers, f+b", SIDES, {}, TARGET, quick=True)]
