"""Module boxes: every node stands in the box of the module call that it was made in."""

from __future__ import annotations

from collections.abc import Sequence

from tinygrad_qkv.autograd import Node
from tinygrad_qkv.modes import Frame
from tinygrad_qkv.viz.labels import Line, Style, label_attributes


def boxed(nodes: Sequence[Node], text: dict[Node, str], look: str, title: Style) -> list[str]:
    """The DOT lines of all nodes, nested as the module calls were; `look` and `title` are those of every box."""
    inside = _contents(nodes)
    lines, boxes = [], 0
    stack = [iter(inside[None])]
    while stack:
        indent = "\t" * len(stack)
        item = next(stack[-1], None)
        if item is None:
            stack.pop()
            lines.append(indent[1:] + "}\n")
        elif isinstance(item, Node):
            lines.append(f"{indent}{text[item]}\n")
        else:
            name = Line(" · ".join(part for part in (item.kind, item.path) if part), title)
            lines.append(f"{indent}subgraph cluster_{boxes} {{\n{indent}\t{look} {label_attributes([name])}\n")
            boxes += 1
            stack.append(iter(inside[item]))
    return lines[:-1]  # the last brace closes the graph itself


def _contents(nodes: Sequence[Node]) -> dict[Frame | None, list[Node | Frame]]:
    """What stands directly in each box, in the order of creation; None is the graph outside all boxes."""
    homes = _homes(nodes)
    inside: dict[Frame | None, list[Node | Frame]] = {None: []}
    for node in nodes:
        item: Node | Frame = node
        frame = homes.get(node, node.frame)
        while frame is not None and frame not in inside:
            inside[frame] = [item]
            item, frame = frame, frame.parent
        inside[frame].append(item)
    return inside


def _homes(nodes: Sequence[Node]) -> dict[Node, Frame]:
    """The boxes of parameters: among the calls around the ops that use one, the innermost whose path its name has."""
    homes: dict[Node, Frame] = {}
    for node in nodes:
        for parent in node.parents:
            if isinstance(parent, Node) and parent.is_leaf and parent.name:
                frame = node.frame
                while frame is not None and not _owns(frame, parent):
                    frame = frame.parent
                if frame is not None and (parent not in homes or len(frame.path) > len(homes[parent].path)):
                    homes[parent] = frame
    return homes


def _owns(frame: Frame, leaf: Node) -> bool:
    """Whether a leaf is a parameter of the called module; the whole model has the empty path."""
    return (leaf.name or "").startswith(frame.path + ".") if frame.path else leaf.requires_grad
