"""Gradients by path: how much of dL/dx came through Q, through K, through V, and past all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_qkv.autograd import Node, ancestry, between, by_number, leading_to, recorded_node
from tinygrad_qkv.backward import grad, sweep
from tinygrad_qkv.path_names import nodes_named
from tinygrad_qkv.seeds import seeded
from tinygrad_qkv.tensor import Tensor

REST = ("residual", "other")  # what all paths together are called that go through none of the others


@dataclass(frozen=True, eq=False, repr=False)
class GradientPaths:
    """A gradient, and the parts of it by the path that they took; `print(it)` is a table.

    parts    name -> Tensor of the gradient's shape; they add up to the total
    total    the whole gradient, from an ordinary backward pass
    nested   pairs (first, second) of names such that some path from x enters the first and later the second; it was
             counted to the first
    """

    parts: dict[str, Tensor]
    total: Tensor
    nested: tuple[tuple[str, str], ...] = ()

    @property
    def norms(self) -> dict[str, float]:
        """The length of each part."""
        return {name: float(np.linalg.norm(part.data)) for name, part in self.parts.items()}

    @property
    def shares(self) -> dict[str, float]:
        """How far each part goes along the total: <part, total> / <total, total>. They add up to 1; NaN if it is 0."""
        return {name: _ratio(_dot(part, self.total), _dot(self.total, self.total)) for name, part in self.parts.items()}

    @property
    def alignments(self) -> dict[str, float]:
        """The cosine of the angle between each part and the total, from -1 (against it) to 1; NaN if one is 0."""
        lengths, whole = self.norms, float(np.linalg.norm(self.total.data))
        return {name: _ratio(_dot(part, self.total), lengths[name] * whole) for name, part in self.parts.items()}

    @property
    def error(self) -> float:
        """The largest difference between the sum of the parts and the total; rounding alone."""
        difference = sum((part.data for part in self.parts.values()), np.zeros(self.total.shape)) - self.total.data
        return float(np.max(np.abs(difference), initial=0.0))

    def __str__(self) -> str:
        width = max(map(len, ("path", *self.parts)))
        lines = [f"{'path':<{width}}  {'norm':>10}  {'share':>8}  {'cosine':>7}"]
        for name, length in self.norms.items():
            share, cosine = self.shares[name], self.alignments[name]
            lines.append(f"{name:<{width}}  {length:>10.4g}  {share:>8.1%}  {cosine:>7.3f}")
        whole = float(np.linalg.norm(self.total.data))
        lines.append(f"{'all':<{width}}  {whole:>10.4g}  {1:>8.1%}  {1:>7.3f}   parts add up within {self.error:.1e}")
        if self.nested:
            pairs = ", ".join(f"{first} then {second}" for first, second in self.nested)
            lines += textwrap.wrap(f"a path through two counts to the one that x enters first: {pairs}", 78)
        return "\n".join(lines).replace("nan%", "  --").replace("nan", " --")

    __repr__ = __str__


def explain_grad(
    loss: Tensor, x: Tensor, paths: Mapping[str, Any] | Sequence[str], *, gradient: Any = None
) -> GradientPaths:
    """Split dL/dx by the way that it took from the loss back to x, a leaf or an inner tensor.

        explain_grad(loss, x, ["q", "k", "v", "residual"])         in a model with attention
        explain_grad(loss, x, {"Q": q, "K": k, "through the MLP": "blocks.0.feed"})

    A path is named by a tensor that it goes through, by the path of a module, by a parameter that x meets on it
    ("attn.W_Q"; "q", "k" and "v" are short for W_Q, W_K and W_V), or by a list of these. A name may be the end of a
    longer one, and then means all that it fits: "q" every attention layer, "blocks.0.attn.q" one. "residual" or
    "other" is all paths through none of the others, and is added where it is missing and not empty. `gradient`, of
    the loss's shape, is for a loss that is no scalar, as in `loss.backward(gradient)`.

    A path that goes through two of them counts to the one that x enters first (`nested` tells). Where there is none
    such, each part is what dL/dx becomes when the tensors of all other paths are detached. The graph is retained, and
    no `.grad` changes. ValueError for a name or tensor that the graph of the loss does not have, RuntimeError for a
    graph with hooks between the two: what a hook does to a part is not known.
    """
    start, g = seeded(loss, gradient, "explain_grad()")
    end = recorded_node(x, "explain_grad()")
    graph, order = ancestry([start])[::-1], _ways(start, end)
    paths = _as_mapping(paths)
    rest, cuts = _cuts(paths, graph, set(order), end)
    nested, levels = _nesting(cuts, order[::-1])
    cut = {node for nodes in cuts.values() for node in nodes}
    found = sweep({start: g}, order, ({end, *cut}, {end}), False, True)  # whole gradients
    open_nodes = set(order) - cut
    parts = {name: np.zeros(x.shape, x.dtype) for name in paths}
    for name, level in levels:
        parts[name] += _flow({node: found[node] for node in level}, end, open_nodes)
    past = _flow({start: g}, end, open_nodes) if start in open_nodes else 0
    if rest is not None:
        parts[rest] += past
    elif not isinstance(past, int):
        parts[REST[1]] = past
    return GradientPaths({name: Tensor.wrap(part) for name, part in parts.items()}, found[end], nested)


def _ways(start: Node, end: Node) -> list[Node]:
    """The nodes on the ways from the loss back to x, the loss first; refuses a graph without one, and hooks on them."""
    order = between([start], {end})
    if end not in order:
        raise ValueError(f"explain_grad(): the loss does not depend on this tensor of shape {end.shape}")
    for node in order:
        if node.hooks is not None and node.hooks.functions:
            raise RuntimeError(
                f"explain_grad(): a hook stands on op '{node.op}' of shape {node.shape}, and may change the whole "
                "gradient in a way that parts do not add up in; remove it first: handle.remove()"
            )
    return order


def explain_softmax_grad(loss: Tensor, scores: Tensor, weights: Tensor, *, gradient: Any = None) -> GradientPaths:
    """Split dL/dscores of weights = softmax(scores), along the last axis, by the two halves of softmax's derivative.

    "own element" is weights * dL/dweights: what raising a score does to its own weight, were the row's sum to stay.
    "normalisation" is -weights * sum(weights * dL/dweights): what it takes from all weights of the row, its own too.
    A way from the scores to the loss past the weights comes as "other". In attention, scores and weights are those of
    `need=("scores", "weights")` with path="tensor". ValueError if the weights are no softmax of the scores.
    """
    try:
        split = explain_grad(loss, scores, {"weights": weights}, gradient=gradient)
    except ValueError as error:
        raise ValueError(f'{error}; attention makes its output of them with path="tensor" alone') from None
    g = grad(loss, weights, gradient, retain_graph=True)[0]
    if weights.shape != scores.shape or g is None:
        raise ValueError(f"weights {weights.shape} are no softmax of scores {scores.shape}: they have one shape")
    with np.errstate(invalid="ignore"):
        own = np.where(weights.data == 0, 0, weights.data * g.data)  # what is masked has no part, were g infinite
    normalisation = -weights.data * np.sum(own, axis=-1, keepdims=True)
    tolerance = 1e3 * np.finfo(own.dtype).eps * np.max(np.abs(own), initial=0.0)
    if not np.allclose(own + normalisation, split.parts["weights"].data, 1e-4, tolerance, equal_nan=True):
        raise ValueError("these weights are not softmax(scores) along the last axis")
    parts = {"own element": Tensor.wrap(own), "normalisation": Tensor.wrap(normalisation)}
    return GradientPaths(parts | {n: p for n, p in split.parts.items() if n != "weights"}, split.total)


def _flow(seeds: dict[Node, Tensor], end: Node, open_nodes: set[Node]) -> np.ndarray | int:
    """What reaches `end` from these gradients by way of `open_nodes` alone; 0 where no way leads there.

    No seed lies between another and the end, for it would take in the other's gradient.
    """
    reached = list(seeds)
    seen = set(reached)
    for node in reached:  # grows on the way
        for parent in node.parents:
            if type(parent) is Node and parent in open_nodes and parent not in seen:
                seen.add(parent)
                reached.append(parent)
    order = leading_to({end}, sorted(reached, key=by_number, reverse=True))
    return sweep(seeds, order, ({end}, {end}), False, True)[end].data if end in order else 0


def _as_mapping(paths: Any) -> dict[str, Any]:
    if isinstance(paths, Mapping):
        return dict(paths)
    names: Any = [paths] if isinstance(paths, str) else paths
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            'paths is a list of names, e.g. ["q", "k", "v", "residual"], or a mapping from names to tensors, e.g. '
            f'{{"Q": q, "K": k}}; got {type(paths).__name__}'
        )
    return {name: name for name in names}


def _cuts(
    paths: dict[str, Any], graph: list[Node], useful: set[Node], x: Node
) -> tuple[str | None, dict[str, set[Node]]]:
    """The name of the rest (None if it has none), and the nodes that each other name stands for."""
    rests = [name for name, what in paths.items() if isinstance(what, str) and what in REST]
    if len(rests) > 1:
        raise ValueError(f"{rests[0]!r} and {rests[1]!r} both name all other paths; give one of them")
    known, owner = set(graph), dict[Node, str]()
    cuts = {name: set[Node]() for name in paths if name not in rests}
    for name in cuts:
        for what in paths[name] if isinstance(paths[name], (list, tuple)) else [paths[name]]:
            if isinstance(what, str):
                cuts[name] |= nodes_named(what, graph, useful, x)
            elif not isinstance(what, Tensor):
                raise TypeError(f"path {name!r} is a tensor or a name, or a list of them; got {type(what).__name__}")
            elif what._node is None or what._node not in known:
                raise ValueError(
                    f"path {name!r}: this tensor of shape {what.shape} is not in the graph of the loss; take the one "
                    "that this forward pass made (a slice or a reshape of it is another tensor)"
                )
            elif what._node in useful:
                cuts[name].add(what._node)
        if x in cuts[name]:
            raise ValueError(f"path {name!r} is x itself, where all paths end; name tensors between x and the loss")
        for node in cuts[name]:
            if owner.setdefault(node, name) != name:
                raise ValueError(f"paths {owner[node]!r} and {name!r} both go through op '{node.op}' {node.shape}")
    return rests[0] if rests else None, cuts


def _nesting(
    cuts: dict[str, set[Node]], rising: list[Node]
) -> tuple[tuple[tuple[str, str], ...], list[tuple[str, list[Node]]]]:
    """Which names lie behind which, seen from x, and each name's nodes in groups that do not lie behind each other."""
    owner = {node: name for name, nodes in cuts.items() for node in nodes}
    passed: dict[Node, dict[str, int]] = {}  # name -> the most nodes of it on a path from x to here
    groups: dict[tuple[str, int], list[Node]] = {}
    nested = dict[tuple[str, str], None]()
    for node in rising:
        most: dict[str, int] = {}
        for parent in node.parents:
            for name, count in passed[parent].items() if type(parent) is Node and parent in passed else ():
                most[name] = max(count, most.get(name, 0))
        if node in owner:
            name = owner[node]
            nested.update(dict.fromkeys((other, name) for other in most if other != name))
            most[name] = most.get(name, 0) + 1
            groups.setdefault((name, most[name]), []).append(node)
        passed[node] = most
    return tuple(nested), [(name, nodes) for (name, _), nodes in groups.items()]


def _dot(a: Tensor, b: Tensor) -> float:
    return float(np.sum(a.data * b.data, dtype=np.float64))


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("nan")
