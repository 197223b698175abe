"""A call of every public kernel, for work of any size: `test_kernels_bits.py` and the benchmark of size rules run them.

`python tests/kernel_calls.py parallel` runs all of them large enough for threads, and prints as JSON the bits of their
results, the threading layer, the names of all compiled kernels, and which of these ran in threads; with `serial` all
run on one thread.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv import kernels as k
from tinygrad_qkv.kernels import threads
from tinygrad_qkv.kernels.__main__ import all_kernels
from tinygrad_qkv.kernels.adam import Moving, adam_settings
from tinygrad_qkv.kernels.attention_rules import AttentionRules

WIDTH = 251  # of a row; no multiple of a vector
CLASSES = 37
SHORT = 13  # of a row that stays in registers


class Call(NamedTuple):
    """`make(n)` prepares inputs for n units of the size rule, and gives the function that returns the results."""

    rule: str  # a key of threads.PARALLEL_FROM
    make: Callable[[int], Callable[[], Iterable[Any]]]


def numbers(n: int, count: int) -> list[np.ndarray]:
    """Arrays of rows, n elements or a few more."""
    return list(np.random.default_rng(0).standard_normal((count, -(-n // WIDTH), WIDTH), np.float32))


def plain(rule: str, function: Callable[..., Any], arrays: int = 1, *more: Any) -> Call:
    """A kernel of arrays of one shape."""

    def make(n: int) -> Callable[[], list[Any]]:
        given = numbers(n, arrays)
        return lambda: [function(*given, *more)]

    return Call(rule, make)


def over_axes(function: Callable[..., Any], arrays: int = 1) -> Call:
    """A kernel with three forms: for rows, for columns and for short rows."""

    def make(n: int) -> Callable[[], list[Any]]:
        given = numbers(n, arrays)
        short = [x.reshape(-1)[: x.size // SHORT * SHORT].reshape(-1, SHORT) for x in given]
        return lambda: [function(*given, -1), function(*given, 0), function(*short, -1)]

    return Call("softmax", make)


def reduction(function: Callable[..., Any]) -> Call:
    """A kernel with two forms: along lines, and over them."""

    def make(n: int) -> Callable[[], list[Any]]:
        (x,) = numbers(n, 1)
        return lambda: [function(x, (1,)), function(x, (0,))]

    return Call("reductions", make)


def _gather(n: int) -> Callable[[], list[Any]]:
    (x,) = numbers(CLASSES * WIDTH, 1)
    ids = np.random.default_rng(1).integers(0, CLASSES, -(-n // WIDTH))
    return lambda: [k.gather(x, ids)]


def _select(n: int) -> Callable[[], list[Any]]:
    x, y = numbers(n, 2)
    keep = x > 0
    return lambda: [k.select(keep, x, y)]


def _matmul(n: int) -> Callable[[], list[Any]]:
    side = max(3, round(n ** (1 / 3)))
    a, b = np.random.default_rng(0).standard_normal((2, side, side), np.float32)
    (rows,) = numbers(n, 1)
    return lambda: [k.matmul(a, b), k.matmul(rows, rows[:1].T), k.matmul(rows[:, :1].T, rows)]


def _targets(x: np.ndarray) -> np.ndarray:
    targets = np.random.default_rng(1).integers(0, x.shape[1], len(x))
    targets[::CLASSES] = -100
    return targets


def _cross_entropy(n: int) -> Callable[[], Iterable[Any]]:
    (x,) = numbers(n, 1)
    targets = _targets(x)
    return lambda: k.cross_entropy(x, targets, -100, 0.1)


def _cross_entropy_pullback(n: int) -> Callable[[], list[Any]]:
    (x,) = numbers(n, 1)
    targets = _targets(x)
    losses, logsumexp = k.cross_entropy(x, targets, -100, 0.1)
    return lambda: [k.cross_entropy_pullback(losses, x, targets, logsumexp, -100, 0.1)]


def _layer_norm(n: int) -> Callable[[], Iterable[Any]]:
    x, g = numbers(n, 2)
    return lambda: k.layer_norm(x, g[0], g[-1], 1e-5)


def _layer_norm_pullback(n: int) -> Callable[[], Iterable[Any]]:
    x, g = numbers(n, 2)
    _, mean, rstd = k.layer_norm(x, g[0], g[-1], 1e-5)
    return lambda: k.layer_norm_pullback(g, x, g[0], mean, rstd)


def _rms_norm(n: int) -> Callable[[], Iterable[Any]]:
    x, g = numbers(n, 2)
    return lambda: k.rms_norm(x, g[0], 1e-5)


def _rms_norm_pullback(n: int) -> Callable[[], Iterable[Any]]:
    x, g = numbers(n, 2)
    _, rrms = k.rms_norm(x, g[0], 1e-5)
    return lambda: k.rms_norm_pullback(g, x, g[0], rrms)


def _scatter_add(n: int) -> Callable[[], list[Any]]:
    (g,) = numbers(n, 1)
    ids = np.random.default_rng(1).integers(0, CLASSES, len(g))
    return lambda: [k.scatter_add(g, ids, CLASSES)]


def _adam_step(n: int) -> Callable[[], list[Any]]:
    """Two parameters with settings of their own, neither of them a whole number of stretches."""
    p, g, m, v = numbers(n, 4)
    v *= v
    cut = len(p) // 3
    halves = slice(None, cut), slice(cut, None)
    settings = [adam_settings(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, step=3, shrink=s) for s in (0.999, 1.0)]

    def step() -> list[Any]:
        k.adam_step([Moving(p[h], g[h], m[h], v[h], own) for h, own in zip(halves, settings, strict=True)])
        return [p, m, v]

    return step


def _attention(n: int, backward: bool = False) -> Callable[[], Iterable[Any]]:
    """Many rules at once, on narrow heads, so that there are many tiles; and many heads of few keys."""
    T = max(3, round((n / 8) ** 0.5))
    q, g = np.random.default_rng(0).standard_normal((2, 1, 2, T, 2), np.float32)
    kv = np.random.default_rng(1).standard_normal((2, 1, 1, T, 2), np.float32)
    rules = AttentionRules(softcap=2.0, bias=q[..., :1], least=-9, dropout_p=0.2)
    short = np.random.default_rng(2).standard_normal((4, n // (4 * SHORT**2) + 1, 1, SHORT, 2), np.float32)
    if backward:
        (out, lse), few = k.attention(q, *kv, rules), k.attention(*short[:3])
        return lambda: (
            *k.attention_pullback(g, q, *kv, out, lse, rules, True),
            *k.attention_pullback(short[3], *short[:3], *few)[:3],
        )
    return lambda: (*k.attention(q, *kv, rules), *k.attention(*short[:3]))


CALLS = {
    "adam_step": Call("adam", _adam_step),
    "attention": Call("attention", _attention),
    "attention_pullback": Call("attention", lambda n: _attention(n, backward=True)),
    "cross_entropy": Call("cross_entropy", _cross_entropy),
    "cross_entropy_pullback": Call("cross_entropy", _cross_entropy_pullback),
    "dropout": plain("dropout", k.dropout, 1, 0.3, 12345),
    "erf": plain("transcendental", k.erf),
    "gather": Call("gather", _gather),
    "gelu": plain("transcendental", k.gelu),
    "gelu_pullback": plain("transcendental", k.gelu_pullback, 2),
    "gelu_tanh": plain("transcendental", k.gelu_tanh),
    "gelu_tanh_pullback": plain("transcendental", k.gelu_tanh_pullback, 2),
    "largest": reduction(k.largest),
    "layer_norm": Call("layer_norm", _layer_norm),
    "layer_norm_pullback": Call("layer_norm", _layer_norm_pullback),
    "log_softmax": over_axes(k.log_softmax),
    "log_softmax_pullback": over_axes(k.log_softmax_pullback, 2),
    "matmul": Call("matmul", _matmul),
    "relu": plain("elementwise", k.relu),
    "relu_pullback": plain("elementwise", k.relu_pullback, 2),
    "rms_norm": Call("rms_norm", _rms_norm),
    "rms_norm_pullback": Call("rms_norm", _rms_norm_pullback),
    "scatter_add": Call("scatter", _scatter_add),
    "select": Call("elementwise", _select),
    "sigmoid": plain("elementwise", k.sigmoid),
    "sigmoid_pullback": plain("elementwise", k.sigmoid_pullback, 2),
    "silu": plain("elementwise", k.silu),
    "silu_pullback": plain("transcendental", k.silu_pullback, 2),
    "smallest": reduction(k.smallest),
    "softmax": over_axes(k.softmax),
    "softmax_pullback": over_axes(k.softmax_pullback, 2),
    "softplus": plain("transcendental", k.softplus),
    "softplus_pullback": plain("elementwise", k.softplus_pullback, 2),
    "tanh": plain("elementwise", k.tanh),
    "tanh_pullback": plain("elementwise", k.tanh_pullback, 2),
    "total": reduction(k.total),
}


def digest(arrays: Iterable[Any]) -> str:
    """A hash of the arrays' bits."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()[:16]


def main(form: str) -> None:
    """Print the bits of every kernel, in the "parallel" or the "serial" form."""
    in_threads: list[Any] = []
    run = threads.run
    threads.run = lambda compiled, args: (in_threads.append(compiled), run(compiled, args))  # type: ignore[assignment]
    threads.serial_process = form == "serial"
    bits = {}
    for name, call in CALLS.items():
        # Twice as large as the rule asks, and a little: no number of tiles, stretches or rows is even.
        bits[name] = digest(call.make(2 * threads.PARALLEL_FROM[call.rule] + 10_007)())
    shared = [kernel for kernel in all_kernels() if kernel.has_threads]
    found: dict[str, Any] = {"bits": bits, "kernels": [kernel.name for kernel in shared]}
    if form == "parallel":
        import numba

        found["layer"] = numba.threading_layer()
        names = {kernel.form(np.dtype(np.float32), True): kernel.name for kernel in shared}
        found["in threads"] = sorted({names[compiled] for compiled in in_threads})
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
