"""P3 to P5: softmax, cross-entropy, layer norm and GELU, forward, and forward with backward."""

import functools

import numpy as np
from cases import Case, calls, numbers

CLASSES = (512, 50257)


def targets(rows, classes):
    return np.random.default_rng(1).integers(0, classes, rows)


# Each function takes x and the layer's weight and bias, which only the layer norm uses.
def _functions_ours():
    from tinygrad_qkv.nn import functional as F

    return {
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "gelu": F.gelu,
        "layer_norm": F.layer_norm,
    }


def _functions_torch():
    from torch.nn import functional as F

    return {
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "gelu": F.gelu,
        "layer_norm": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
    }


def _functions_jax():
    import jax

    def layer_norm(x, weight, bias):
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias

    return {
        "softmax": jax.nn.softmax,
        "log_softmax": jax.nn.log_softmax,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "layer_norm": layer_norm,
    }


def inputs(what, shape):
    """x and what else the function takes, then the gradient of its result."""
    extra = [numbers(shape[1], seed=2), numbers(shape[1], seed=3)] if what == "layer_norm" else []
    return [numbers(*shape), *extra], numbers(*shape, seed=1)


def ours(what, shape, backward):
    from tinygrad_qkv import Tensor, no_grad

    function = _functions_ours()[what]
    arrays, g = inputs(what, shape)
    g = Tensor.from_numpy(g)
    leaves = [Tensor(x, requires_grad=True) for x in arrays]
    return calls(function, leaves, g, no_grad, backward)


def torch(what, shape, backward):
    import torch

    function = _functions_torch()[what]
    arrays, g = inputs(what, shape)
    g = torch.from_numpy(g)
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
    return calls(function, leaves, g, torch.no_grad, backward)


def jax(what, shape, backward):
    import jax

    function = _functions_jax()[what]
    arrays, g = inputs(what, shape)
    arrays, g = jax.device_put(arrays), jax.device_put(g)

    @jax.jit
    def both(arrays, g):
        y, pullback = jax.vjp(function, *arrays)
        return [y, *pullback(g)]

    forward = jax.jit(lambda arrays: [function(*arrays)])
    if backward:
        return lambda: jax.block_until_ready(both(arrays, g))
    return lambda: jax.block_until_ready(forward(arrays))


def entropy_ours(shape):
    from tinygrad_qkv import Tensor
    from tinygrad_qkv.nn import functional as F

    x, t = Tensor(numbers(*shape), requires_grad=True), targets(*shape)

    def step():
        x.grad = None
        loss = F.cross_entropy(x, t)
        loss.backward()
        return [loss, x.grad]

    return step


def entropy_torch(shape):
    import torch

    x, t = torch.from_numpy(numbers(*shape)).requires_grad_(), torch.from_numpy(targets(*shape))

    def step():
        x.grad = None
        loss = torch.nn.functional.cross_entropy(x, t)
        loss.backward()
        return [loss, x.grad]

    return step


def entropy_jax(shape):
    import jax

    def loss(x, t):
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(x), t[:, None], 1).mean()

    x, t = jax.device_put(numbers(*shape)), jax.device_put(targets(*shape))
    step = jax.jit(jax.value_and_grad(loss))
    return lambda: jax.block_until_ready(step(x, t))


def _case(row, what, shape, backward, target, **options):
    name = f"{what.replace('_', '-')} {shape}, {'f+b' if backward else 'forward'}"
    sizes = {"what": what, "shape": shape, "backward": backward}
    return Case(row, name, {"ours": ours, "torch": torch, "jax": jax}, sizes, target, **options)


SHAPES = [(65536, 128), (4096, 1024), (32768, 64), (1024, 16)]
CASES = [
    *(
        _case(
            *("P3", what, shape, backward, {"torch": 1.2, "best": 1.0} if backward else {}),
            quick=(what, shape) == ("softmax", (4096, 1024)) or (backward and (what, shape) == ("softmax", (1024, 16))),
            control=(what, shape, backward) == ("softmax", (4096, 1024), True),
        )
        for what in ("softmax", "log_softmax")
        for shape in SHAPES
        for backward in (False, True)
    ),
    Case(
        *("P4", f"cross-entropy {CLASSES}, f+b"),
        {"ours": entropy_ours, "torch": entropy_torch, "jax": entropy_jax},
        {"shape": CLASSES},
        {"torch": 5.0, "jax": 2.5},
        quick=True,
    ),
    *(_case("P5", what, (4096, 1024), True, {"torch": 1.4, "jax": 1.0}, quick=True) for what in ("layer_norm", "gelu")),
]
