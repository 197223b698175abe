"""P1 and P2: matrix products."""

import numpy as np
from cases import Case, numbers

FLIPS = {"": (False, False), " of a.T": (True, False), " of b.T": (False, True), " of a.T and b.T": (True, True)}


def operands(batch, m, k, n, flipped):
    """a (batch, m, k) and b (batch, k, n), without the batch axis where it is 0; flipped ones lie in memory as .T."""
    lead = (batch,) if batch else ()
    a = numbers(*lead, *((k, m) if flipped[0] else (m, k)))
    b = numbers(*lead, *((n, k) if flipped[1] else (k, n)), seed=1)
    return a.swapaxes(-1, -2) if flipped[0] else a, b.swapaxes(-1, -2) if flipped[1] else b


def ours(**sizes):
    from tinygrad_qkv.kernels import matmul

    a, b = operands(**sizes)
    return lambda: [matmul(a, b)]


def numpy(**sizes):
    a, b = operands(**sizes)
    return lambda: [np.matmul(a, b)]


def torch(**sizes):
    import torch

    a, b = map(torch.from_numpy, operands(**sizes))
    return lambda: [torch.matmul(a, b)]


def jax(**sizes):
    import jax

    # A transposed operand enters as it lies in memory, and XLA is told to turn it: jax arrays have no strides.
    flipped = sizes["flipped"]
    a, b = (
        jax.numpy.asarray(np.ascontiguousarray(x.swapaxes(-1, -2) if flip else x))
        for x, flip in zip(operands(**sizes), flipped, strict=True)
    )

    @jax.jit
    def product(a, b):
        return (a.swapaxes(-1, -2) if flipped[0] else a) @ (b.swapaxes(-1, -2) if flipped[1] else b)

    return lambda: [product(a, b).block_until_ready()]


def _case(row, batch, m, k, n, flip="", **options):
    name = f"matmul {f'{batch} x ' if batch else ''}({m}, {k}) @ ({k}, {n}){flip}"
    sizes = {"batch": batch, "m": m, "k": k, "n": n, "flipped": FLIPS[flip]}
    sides = {"ours": ours, "torch": torch, "jax": jax, "numpy": numpy}
    flops = 2.0 * max(batch, 1) * m * k * n
    return Case(row, name, sides, sizes, {"best": 0.9}, flops=flops, **options)


CASES = [
    *(_case("P1", 0, n, n, n, quick=n < 2048, control=n == 512) for n in (256, 512, 1024, 2048)),
    *(
        _case("P1", 0, n, n, n, flip, quick=n == 512 and flip == " of a.T")
        for n in (512, 1024)
        for flip in FLIPS
        if flip
    ),
    *(_case("P1", 0, 1024, 512, n, flip) for n in (512, 2048) for flip in ("", " of b.T")),
    *(_case("P1", 64, 128, 64, 128, flip, quick=not flip) for flip in FLIPS),
    *(_case("P2", 0, n, n, n, quick=n in (8, 64)) for n in (8, 16, 32, 48, 64, 96, 128)),
]
