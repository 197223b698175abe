"""What a path of a gradient may be called: the names of parameters, modules and tensors, as places in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tinygrad_qkv.autograd import Node
from tinygrad_qkv.modes import Frame

SHORT = {"q": "W_Q", "k": "W_K", "v": "W_V"}  # in either case, after any module path: "blocks.0.attn.q"


def nodes_named(name: str, graph: list[Node], between: set[Node], x: Node) -> set[Node]:
    """The nodes at which a path from `x` enters what is called `name`; empty if it is there, but no path meets it.

    `graph` holds every node in the order of their creation, `between` those on a path from x. A name is that of a
    parameter (the ops in which x meets it), of an inner tensor (its op), of a module (the ops in it that take something
    from outside), or q, k or v, for W_Q, W_K and W_V. It may be the end of a longer one: "attn.W_Q" is in every block.
    ValueError with the names that there are, if the graph has no such thing.
    """

    def matches(known: str | None) -> bool:
        return known is not None and (known == name or known.endswith(f".{name}"))

    named = {node for node in graph if matches(node.name)}
    if named:
        return _meetings({n for n in named if n.is_leaf}, graph, between) | {n for n in named & between if n.parents}
    inside = _module_test(matches)
    if any(map(inside, graph)):
        outside = {node for node in between if node is x or not inside(node)}
        return {node for node in between - outside if not outside.isdisjoint(node.parents)}
    place, _, last = name.rpartition(".")
    if last.lower() in SHORT:
        return nodes_named(f"{place}.{SHORT[last.lower()]}" if place else SHORT[last.lower()], graph, between, x)
    raise ValueError(f"nothing in the graph is called {name!r}; it has {_what_there_is(graph)}")


def _parents(node: Node) -> Iterable[Node]:
    return (p for p in node.parents if type(p) is Node)


def _meetings(leaves: set[Node], graph: list[Node], between: set[Node]) -> set[Node]:
    """The ops in which a path meets the leaves, or what was made of them alone, such as W.T."""
    made, found = set(leaves), set[Node]()
    for node in graph:
        parents = list(_parents(node))
        if node in between:
            if not made.isdisjoint(parents):
                found.add(node)
        elif parents and made.issuperset(parents):
            made.add(node)
    return found


def _module_test(matches: Callable[[str | None], bool]) -> Callable[[Node], bool]:
    """Whether a node was made in a module whose path matches, or in one below it."""
    known: dict[int, bool] = {}

    def inside(node: Node) -> bool:
        frame = node.frame
        if frame is None:
            return False
        if frame.number not in known:
            outer: Frame | None = frame
            while outer is not None and not matches(outer.path):
                outer = outer.parent
            known[frame.number] = outer is not None
        return known[frame.number]

    return inside


def _what_there_is(graph: list[Node]) -> str:
    """The names of tensors and modules in a graph, for messages."""
    tensors = sorted({node.name for node in graph if node.name})
    modules = sorted({node.frame.path for node in graph if node.frame is not None and node.frame.path})
    lines = [f"{what} {', '.join(names)}" for what, names in (("tensors", tensors), ("modules", modules)) if names]
    return " and ".join(lines) or "no names at all: pass tensors, {'Q': q, ...}"
