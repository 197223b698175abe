"""The computation graph that made a tensor, as a drawing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from tinygrad_qkv.autograd import Node, ancestry, recorded_node
from tinygrad_qkv.tensor import Tensor
from tinygrad_qkv.viz.boxes import boxed
from tinygrad_qkv.viz.labels import FAINT, FONT, INK, Line, Style, label_attributes, quoted
from tinygrad_qkv.viz.legend import legend as legend_of
from tinygrad_qkv.viz.numbers import gradient_words, number, value_words
from tinygrad_qkv.viz.render import Drawing

# ---- the look: everything that has a colour, a size or a shape stands here (the inks of all pictures, in labels.py)

GRADIENT = "#8A1C7C"
TITLE, FACTS, VALUE = Style(INK, 12, bold=True), Style(FAINT), Style(INK)
GRAD = Style(GRADIENT)
FAMILIES = {"Q": ("#005A9C", "#E3EFF9"), "K": ("#B34700", "#FCEBDD"), "V": ("#00704F", "#DFF3EB")}  # ink, tint
ROLES = {
    "parameter": {"style": "filled", "color": INK, "fillcolor": "#E8E8E8", "penwidth": "2"},
    "input": {"style": "filled", "color": "#8C959F", "fillcolor": "#FFFFFF", "penwidth": "1"},
    "op": {"style": "rounded,filled", "color": "#8C959F", "fillcolor": "#F7F7F7", "penwidth": "1"},
    "output": {"style": "filled", "color": INK, "fillcolor": "#FFF3C4", "penwidth": "1", "peripheries": "2"},
}
NO_GRADIENT_EDGE = 'style="dashed" color="#8C959F"'
BOX = 'style="rounded,dashed" color="#8C959F" labelloc="t" labeljust="l" margin="10"'
BOX_TITLE = Style(FAINT, 10)
GRAPH = {"fontname": FONT, "nodesep": "0.25", "ranksep": "0.3", "pad": "0.2", "bgcolor": "white", "labelloc": "b"}
LARGE = 100  # nodes; beyond, the layout stops early, or the long arrows of a weight that is used often take minutes
EARLY = {"nslimit": "1", "nslimit1": "1", "mclimit": "0.3"}
NODE = {"fontname": FONT, "shape": "box", "margin": "0.13,0.04", "height": "0.3", "fontcolor": INK}
EDGE = {"fontname": FONT, "color": INK, "arrowsize": "0.6", "fontsize": "8", "fontcolor": FAINT}

FAMILY_NAME = re.compile(r"(?:[Wb]_)?([QKV])$", re.IGNORECASE)
FORMULA_WIDTH = 36  # characters; longer rules are wrapped
COMMUTATIVE = ("add", "mul", "maximum", "minimum", "logaddexp")


def draw_graph(
    tensor: Tensor | Sequence[Tensor],
    *,
    level: str = "op",
    values: bool = False,
    grads: bool = False,
    full: int = 6,
    formulas: bool = False,
    names: Mapping[str, Tensor] | None = None,
    direction: str = "TB",
    legend: bool = True,
) -> Drawing:
    """Draw the graph that made `tensor` (or several tensors): a `graphviz.Digraph` that renders without `dot` too.

    A node is a leaf, or an op with the shape of its result; an arrow runs from every operand to its op, so `x * x` has
    two. A module call is a box. `names` labels leaves and inner tensors, beside those that have a name. `values` and
    `grads` add numbers: all of them in arrays of up to `full` elements, else mean ± standard deviation [min, max].
    They were kept if the forward pass ran inside `with recording():`, the gradients of leaves in any case; the drawing
    says so where they were not. `formulas` puts on each arrow the rule that carries the gradient back through it.
    `direction` is "TB", "LR", "BT" or "RL".

    The drawing is the same before and after backward, and its DOT text the same in every process.
    RuntimeError for a tensor that has no graph.
    """
    if level != "op":
        raise ValueError(f"draw_graph knows level='op' only (one node an op), got {level!r}")
    if direction not in ("TB", "LR", "BT", "RL"):
        raise ValueError(f"direction is 'TB' (top to bottom), 'LR', 'BT' or 'RL', got {direction!r}")
    roots = _roots(tensor)
    nodes = _in_order(roots)
    titles, absent = _titles(nodes, names or {})
    roles = {node: _role(node, roots) for node in nodes}
    text = {}
    for i, node in enumerate(nodes):
        lines = _title_lines(node, titles[node], roles[node])
        lines += (_value_lines(node, full) if values else []) + (_gradient_lines(node, full) if grads else [])
        text[node] = f"n{i} [{label_attributes(lines)} {_look(roles[node], _family(titles[node]))}]"
    graph = {**GRAPH, **(EARLY if len(nodes) > LARGE else {}), "rankdir": direction}
    if legend:
        notes = _notes(nodes, values, grads, absent, figures=any(" ± " in label for label in text.values()))
        graph["label"] = legend_of(_entries(roles, titles), notes, FAINT)
    drawing = Drawing("computation_graph", format="svg", graph_attr=graph, node_attr=NODE, edge_attr=EDGE)
    drawing.body += boxed(nodes, text, BOX, BOX_TITLE) + _edges(nodes, formulas)
    return drawing


def _roots(tensor: Tensor | Sequence[Tensor]) -> set[Node]:
    """The nodes to start from, checked."""
    tensors: list = list(tensor) if isinstance(tensor, (list, tuple)) else [tensor]
    if not tensors:
        raise ValueError("draw_graph got an empty list; give it a tensor, or a list of tensors")
    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(f"draw_graph draws a Tensor, or a list of Tensors, got {type(t).__name__}")
    return {recorded_node(t, "draw_graph") for t in tensors}


def _in_order(roots: set[Node]) -> list[Node]:
    """All nodes: ops as they were made, every leaf before the op that uses it first.

    Not leaves as they were made: a constant enters the tape with its first use, and a second pass would differ.
    """
    order: dict[Node, None] = {}
    for node in reversed(ancestry(roots)):
        if not node.is_leaf or node in roots:
            order.update((p, None) for p in node.parents if isinstance(p, Node) and p.is_leaf)
            order[node] = None
    return list(order)


def _titles(nodes: Sequence[Node], names: Mapping[str, Tensor]) -> tuple[dict[Node, str | None], int]:
    """The name of each node, those of the call first, and how many of them no node has."""
    titles = {node: node.name for node in nodes}
    absent = 0
    if not isinstance(names, Mapping):
        raise TypeError(f"names is {{'label': tensor}}, got {type(names).__name__}")
    for label, t in names.items():
        if not isinstance(label, str) or not isinstance(t, Tensor):
            raise TypeError(f"names is {{'label': tensor}}, got {type(label).__name__}: {type(t).__name__}")
        if t._node in titles:
            titles[t._node] = label
        else:
            absent += 1
    return titles, absent


def _role(node: Node, roots: set[Node]) -> str:
    if node.is_leaf:
        return "parameter" if node.requires_grad else "input"
    return "output" if node in roots else "op"


def _family(title: str | None) -> str | None:
    """Q, K or V, if the last part of the name says so: W_Q, b_K, blocks.0.attn.W_V, q."""
    match = FAMILY_NAME.match((title or "").rpartition(".")[2])
    return match[1].upper() if match else None


def _look(role: str, family: str | None) -> str:
    """The DOT attributes of a node."""
    look = dict(ROLES[role])
    if family:
        look["color"], look["fillcolor"] = FAMILIES[family]
    return " ".join(f'{key}="{value}"' for key, value in look.items())


def _title_lines(node: Node, title: str | None, role: str) -> list[Line]:
    """The name, else the op; below it the op, if there is a name, the shape, and the dtype if it is not float32."""
    family = _family(title)
    style = TITLE._replace(color=FAMILIES[family][0]) if family else TITLE
    made = _op(node) if not node.is_leaf else "parameter" if role == "parameter" else "constant"
    facts = [made] if title and not node.is_leaf else []
    facts.append(str(node.shape) if node.dtype == np.float32 else f"{node.shape} {node.dtype}")
    if role == "output":
        facts.append("output")
    return [Line(title or made, style), Line(" · ".join(facts), FACTS)]


def _op(node: Node) -> str:
    """The op with its scalar operands: `mul 0.5`, and `1 sub` where the scalar stands on the left."""
    scalars = [number(p, 6) for p in node.parents if not isinstance(p, Node)]
    if scalars and not isinstance(node.parents[0], Node) and node.op not in COMMUTATIVE:
        return " ".join([scalars[0], node.op, *scalars[1:]])
    return " ".join([node.op, *scalars])


def _value_lines(node: Node, full: int) -> list[Line]:
    return _rows("value", value_words(node.value, full), VALUE) if node.value is not None else []


def _gradient_lines(node: Node, full: int) -> list[Line]:
    """The gradient, or the reason why there is none."""
    if not node.requires_grad:
        return [Line("grad none (not needed)", GRAD)]
    if node.grad is not None:
        return _rows("grad", gradient_words(node.grad.numpy(), full), GRAD)
    if node.is_leaf or node.value is not None:
        return [Line("grad not computed", GRAD)]
    return []


def _rows(word: str, rows: list[str], style: Style) -> list[Line]:
    """`word row`, or `word` above the rows of a matrix."""
    rows = [f"{word} {rows[0]}"] if len(rows) == 1 else [word, *rows]
    return [Line(row, style) for row in rows]


def _edges(nodes: Sequence[Node], formulas: bool) -> list[str]:
    """An arrow from every operand to its op; dashed where no gradient goes back."""
    index = {node: i for i, node in enumerate(nodes)}
    lines = []
    for node in nodes:
        tensors = sum(isinstance(p, Node) for p in node.parents)
        for k, parent in enumerate(node.parents):
            if isinstance(parent, Node):
                label = _edge_label(node, k, tensors, formulas and parent.requires_grad)
                look = [] if parent.requires_grad else [NO_GRADIENT_EDGE]
                look += [f"label={quoted(label)}"] if label else []
                attributes = f" [{' '.join(look)}]" if look else ""
                lines.append(f"\tn{index[parent]} -> n{index[node]}{attributes}\n")
    return lines


def _edge_label(node: Node, k: int, tensors: int, formula: bool) -> str:
    """The rule of operand `k`, or its name in the rule where the order of the operands matters."""
    if k >= len(node.formulas):
        return ""
    if formula:
        return "\n".join(f" {row}" for row in textwrap.wrap(node.formulas[k], FORMULA_WIDTH))
    name = node.formulas[k].rpartition("; ")[2].partition(" ")[0].removeprefix("d")
    return f" {name}" if tensors > 1 and node.op not in COMMUTATIVE else ""


def _entries(roles: Mapping[Node, str], titles: Mapping[Node, str | None]) -> list[tuple[str, str, str]]:
    """Fill, border and text of the legend, for what occurs in the drawing."""
    used, families = set(roles.values()), {_family(title) for title in titles.values()}
    entries = [(ROLES[role]["fillcolor"], ROLES[role]["color"], role) for role in ROLES if role in used]
    entries += [(tint, ink, name) for name, (ink, tint) in FAMILIES.items() if name in families]
    return entries


def _notes(nodes: Sequence[Node], values: bool, grads: bool, absent: int, figures: bool) -> list[str]:
    """How to read the drawing, and what it was asked for and does not have."""
    notes = []
    if any(not node.requires_grad for node in nodes):
        notes.append("dashed arrow: no gradient goes back along it")
    missing = sum(node.value is None for node in nodes if values or (grads and not node.is_leaf))
    if missing:
        notes.append(
            f"{missing} of {len(nodes)} nodes were not recorded: run the forward pass inside `with recording():`"
        )
    if grads and all(node.grad is None for node in nodes):
        notes.append("no gradient yet: backward() has not run")
    if absent:
        notes.append(f"{absent} of the names belong to tensors that are not in this graph")
    if figures:
        notes.append("numbers of a large array: mean ± standard deviation [min, max]")
    return notes
