"""Derivatives of functions: pullbacks and tangents, Jacobians and Hessians, and gradients per sample.

Every function here calls `f` with tensors of its own, copies of the primals (Tensors, arrays or floats), so that no
`.grad` changes, and one tensor passed twice counts as two arguments. What `f` reads from outside is a constant to it.
The functions nest: a result is recorded, so that it can be differentiated again, where it depends on a tensor outside
of `f` that requires grad (a primal, a tangent, a weight that f reads), and comes detached otherwise and under
`no_grad()`. An argument that does not matter, and an output without a gradient, give zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinygrad_qkv import ops
from tinygrad_qkv.autograd import Node, leaf_node
from tinygrad_qkv.backward import grad
from tinygrad_qkv.modes import grad_mode, switched
from tinygrad_qkv.nested import listed
from tinygrad_qkv.seeds import as_gradient
from tinygrad_qkv.tensor import Tensor


def vjp(f: Callable, *primals: Any) -> tuple[Any, Callable]:
    """f(*primals), and the function that pulls a gradient back: pullback(d loss / d value) gives d loss / d primals.

    `pullback(gradient)` takes what `f` returns, a tensor or a list of them, of those shapes; without an argument it
    means 1, for a scalar. It returns a tensor for one primal and a tuple for several, and may be called many times:
    the graph lives as long as it does.
    """
    call = _called(f, _primals(primals, "vjp()"), "vjp()")

    def pullback(gradient: Any = None) -> Any:
        given = listed(gradient) if call.several and gradient is not None else [gradient] * len(call.outputs)
        if len(given) != len(call.outputs):
            raise ValueError(f"vjp(): f returned {len(call.outputs)} tensors, and the pullback got {len(given)}")
        seeds = [as_gradient(y, g, "vjp()") for y, g in zip(call.outputs, given, strict=True)]
        found = _pulled(call.outputs, call.xs, seeds, call.is_recorded(seeds))
        return _packed([call.released(g) for g in found], len(primals) > 1)

    return _packed([call.released(y) for y in call.outputs], call.several), pullback


def jvp(f: Callable, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """f(*primals), and its derivative along `tangents`: how fast the value moves when the primals move so.

    `primals` and `tangents` are lists or tuples, one entry per argument and each tangent of its primal's shape; for a
    function of one argument the tensors themselves. Two backward passes do it: the first pulls back a gradient u, the
    second differentiates that (linear) map of u. So it costs about three times as much as f, the rules' composed
    forms run, and NOTE: through attention it takes memory for all T * S scores, on the fused path too.
    """
    xs = _primals(listed(primals), "jvp()")
    directions = _tangents(tangents, xs, "jvp()")
    call = _called(f, xs, "jvp()")
    again = call.is_recorded(directions)
    tracked = [y for y in call.outputs if y.requires_grad]
    u = [Tensor(np.ones_like(y.data), requires_grad=True) for y in tracked]
    pulled_back = _pulled(tracked, call.xs, u, True)
    moved = dict(zip(map(id, tracked), _pulled(pulled_back, u, directions, again), strict=True))
    slopes = [call.released(moved[id(y)]) if y.requires_grad else ops.zeros_like(y) for y in call.outputs]
    values = [call.released(y) for y in call.outputs]
    return _packed(values, call.several), _packed(slopes, call.several)


def jacobian(f: Callable, *primals: Any) -> Any:
    """Every derivative of an element of f(*primals) with respect to an element of x: shape (*y.shape, *x.shape).

    Several primals give a tuple of such, and an `f` that returns several tensors a tuple of those. It takes one
    backward pass for every element that f returns.
    """
    call = _called(f, _primals(primals, "jacobian()"), "jacobian()")
    again = call.is_recorded()
    found = [_packed(_rows(call, y, again), len(primals) > 1) for y in call.outputs]
    return _packed(found, call.several)


def hessian(f: Callable, *primals: Any) -> Any:
    """The second derivatives of a scalar f: shape (*x.shape, *x.shape), the Jacobian of its gradient.

    Several primals give a tuple of tuples: entry [i][j] has shape (*primals[i].shape, *primals[j].shape). It takes
    one backward pass for every element of the primals, and memory for all T * S scores through attention.
    """
    call = _called(f, _primals(primals, "hessian()"), "hessian()")
    again = call.is_recorded()
    found = [_packed(_rows(call, g, again), len(primals) > 1) for g in _gradient(call, "hessian()")]
    return _packed(found, len(primals) > 1)


def hvp(f: Callable, x: Any, v: Any) -> Any:
    """The Hessian of a scalar f at x, times v, without the Hessian: two backward passes; a tensor of x's shape.

    For an `f` of several arguments `x` and `v` are lists or tuples, and the result is a tuple. Through attention it
    takes memory for all T * S scores. For parameters, which a model reads by itself, the same two passes are
    gs = grad(loss, parameters, create_graph=True) and grad(gs, parameters, vs).
    """
    xs = _primals(listed(x), "hvp()")
    directions = _tangents(v, xs, "hvp()")
    call = _called(f, xs, "hvp()")
    found = _pulled(_gradient(call, "hvp()"), call.xs, directions, call.is_recorded(directions))
    return _packed([call.released(g) for g in found], isinstance(x, (list, tuple)))


def per_sample_grad(f: Callable, parameters: Tensor | Iterable[Tensor], *batch: Any) -> Any:
    """The gradient of the loss of each sample alone, for every parameter: (B, *p.shape), a tuple for several.

    `f(*sample)` returns the scalar loss of a batch of one: it is called B times, each time with one row of every array
    in `batch`, of shape (1, ...), and reads the parameters (`model.parameters()`, say) by itself. With one row a mean
    and a sum are the same, so row b is the gradient of sample b's own loss under either: the gradient of a mean
    loss over the batch is the mean of the rows, that of a sum their sum. The cost is B forward and B backward passes,
    and memory for B copies of the parameters. The result is detached.
    """
    single = isinstance(parameters, Tensor)
    wanted = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    arrays = [ops.tensor(array) for array in batch]
    if not wanted or not arrays:
        raise ValueError(f"per_sample_grad() got {len(wanted)} parameters and {len(arrays)} arrays; it needs both")
    if any(array.ndim == 0 or array.shape[0] != arrays[0].shape[0] for array in arrays):
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(f"per_sample_grad() takes arrays with the samples along axis 0, as many in each; got {shapes}")
    found: list[list[np.ndarray]] = [[] for _ in wanted]
    for b in range(arrays[0].shape[0]):
        with switched(grad_mode, True):
            loss = f(*(array[b : b + 1] for array in arrays))
        if not isinstance(loss, Tensor) or loss.size != 1:
            what = f"shape {loss.shape}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"per_sample_grad(): f returns the scalar loss of its one sample, got {what}")
        gradients = grad(loss, wanted, np.ones(loss.shape, loss.dtype), allow_unused=True)
        for rows, p, g in zip(found, wanted, gradients, strict=True):
            rows.append(np.zeros_like(p.data) if g is None else g.data)
    empty = [np.zeros((0, *p.shape), p.dtype) for p in wanted]  # for a batch of nothing
    stacked = [Tensor.wrap(np.stack(rows) if rows else e) for rows, e in zip(found, empty, strict=True)]
    return _packed(stacked, not single)


# ---- how f is called


class _Call(NamedTuple):
    """One run of a function on tensors of its own."""

    xs: list[Tensor]
    outputs: list[Tensor]
    several: bool  # whether f returned a list or tuple

    def is_recorded(self, more: Sequence[Tensor] = ()) -> bool:
        """Whether derivatives of this call, with `more` factors, are to be recorded themselves."""
        return grad_mode.get() and any(self._reaches_outside(t) for t in (*self.outputs, *self.xs, *more))

    def released(self, result: Tensor) -> Tensor:
        """A result as the caller gets it: with its graph only where that leads out of this call."""
        if not result.requires_grad or (grad_mode.get() and self._reaches_outside(result)):
            return result
        return result.detach()

    def _reaches_outside(self, tensor: Tensor) -> bool:
        """Whether the graph of a tensor leads to a leaf that is none of this call's, or to anything older."""
        own = {leaf_node(x) for x in self.xs}
        first = leaf_node(self.xs[0]).number
        pending = [leaf_node(tensor)] if tensor.requires_grad else []
        seen = set(pending)
        while pending:
            node = pending.pop()
            if node.number < first or (node.is_leaf and node not in own):
                return True
            fresh = {p for p in node.parents if type(p) is Node and p.requires_grad} - seen
            seen |= fresh
            pending += fresh
        return False


def _called(f: Callable, primals: list[Tensor], caller: str) -> _Call:
    """Run f on copies of the primals, which stay connected to those that require grad, unless under no_grad()."""
    nested = grad_mode.get()
    with switched(grad_mode, True):
        xs = [ops.clone(x) if nested and x.requires_grad else Tensor(x.data, requires_grad=True) for x in primals]
        y = f(*xs)
    outputs = listed(y)
    for output in outputs or [y]:
        if not isinstance(output, Tensor):
            raise TypeError(f"{caller}: f returns a Tensor, or a list or tuple of them, got {type(output).__name__}")
    return _Call(xs, outputs, isinstance(y, (list, tuple)))


def _packed(values: list, several: bool) -> Any:
    return tuple(values) if several else values[0]


def _primals(primals: Sequence, caller: str) -> list[Tensor]:
    """The points at which to differentiate, as Tensors of floats."""
    if not primals:
        raise ValueError(f"{caller} needs at least one primal, the point at which to differentiate")
    found = [ops.tensor(x) for x in primals]
    for i, x in enumerate(found):
        if x.dtype.char not in "fd":
            raise TypeError(
                f"{caller}: primal {i} of shape {x.shape} holds {x.dtype}; derivatives are with respect to float32 "
                "and float64: write 2.0 for 2, convert with astype, or let f read it from outside"
            )
    return found


def _tangents(tangents: Any, primals: list[Tensor], caller: str) -> list[Tensor]:
    """One direction per primal, each of its shape and dtype."""
    given = listed(tangents)
    if len(given) != len(primals):
        raise ValueError(f"{caller} got {len(primals)} primals and {len(given)} tangents; give one for each")
    pairs = enumerate(zip(primals, given, strict=True))
    return [as_gradient(x, v, f"{caller}, argument {i}", "tangent") for i, (x, v) in pairs]


# ---- passes over the graph of one call


def _pulled(ys: list[Tensor], xs: list[Tensor], seeds: list[Tensor], create_graph: bool) -> list[Tensor]:
    """d sum(ys * seeds) / d xs; zeros where nothing leads from the ys to an x."""
    tracked = [(y, g) for y, g in zip(ys, seeds, strict=True) if y.requires_grad]
    if not tracked:
        return [ops.zeros_like(x) for x in xs]
    outputs, gradients = map(list, zip(*tracked, strict=True))
    found = grad(outputs, xs, gradients, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return [ops.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]


def _gradient(call: _Call, caller: str) -> list[Tensor]:
    """The recorded gradient of a scalar function."""
    if call.several or call.outputs[0].size != 1:
        got = ", ".join(str(y.shape) for y in call.outputs)
        raise ValueError(f"{caller} needs an f that returns one scalar, got shape {got}; reduce it first, e.g. .sum()")
    return _pulled(call.outputs, call.xs, [ops.ones_like(call.outputs[0])], True)


def _rows(call: _Call, y: Tensor, create_graph: bool) -> list[Tensor]:
    """For every argument x the derivatives of all elements of y, (*y.shape, *x.shape): one pass for each element."""
    if y.size == 0 or not y.requires_grad:
        return [Tensor.wrap(np.zeros((*y.shape, *x.shape), x.dtype)) for x in call.xs]
    rows = []
    for i in range(y.size):
        one = np.zeros(y.size, y.dtype)
        one[i] = 1
        rows.append(_pulled([y], call.xs, [Tensor.wrap(one.reshape(y.shape))], create_graph))
    columns = zip(call.xs, zip(*rows, strict=True), strict=True)
    return [call.released(ops.reshape(ops.stack(parts), *y.shape, *x.shape)) for x, parts in columns]
