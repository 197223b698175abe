"""A reader of DOT text for tests: strict about the syntax, and it resolves labels as Graphviz does."""

import html
import re
import xml.etree.ElementTree as ET
from typing import NamedTuple

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|->|[{}\[\]=;,]|[A-Za-z_\x80-\uffff][\w\x80-\uffff]*|-?(?:\d+\.?\d*|\.\d+)', re.S)

# Names that break a label that is written carelessly.
# fmt: off
HOSTILE = [
    "a\\Nb", "\\N\\G\\T\\E\\H\\L", "lr\\nu\\", "\\", "\\\\", "a\\\\Nb", "&#92;N", "&lt;b&gt;", "a;&b;", "&copy;\\N",
    "a & b;", 'w{1}|<a>"q"', '"', '\\"', "</TABLE>", "]]>", "<!--", '"><script>alert(1)</script>', "%s 100%",
    "line\nbreak", "a\tb", "\x00\x1b[0m\x7f", "\r\n", "日本語", "שלום", "😀e\u0301", "\ud800", "\ufffe", " ", "",
    "  two  ", "n0 -> n1", "//", "/*", "graph", "\xa0",
]
# fmt: on


class Dot(NamedTuple):
    """nodes: id -> attributes; edges: (tail, head, attributes); boxes: cluster -> (attributes, what is in it)."""

    nodes: dict
    edges: list
    boxes: dict
    attributes: dict


def tokens(source):
    found, i = [], 0
    while i < len(source):
        if source[i].isspace():
            i += 1
        elif source[i] == "<":
            start, depth = i, 0
            while depth or i == start:
                depth += (source[i] == "<") - (source[i] == ">")
                i += 1
            found.append(source[start:i])
        else:
            match = TOKEN.match(source, i)
            assert match, f"no DOT: {source[i : i + 40]!r}"
            found.append(match.group())
            i = match.end()
    return found[::-1]


def read(source):
    """The graph that DOT text describes; AssertionError where it is no valid DOT."""
    todo = tokens(source)
    assert todo.pop() == "digraph"
    if todo[-1] != "{":
        todo.pop()
    assert todo.pop() == "{"
    dot = Dot({}, [], {}, {})
    _statements(todo, dot, dot.attributes, [])
    assert not todo, "text after the graph"
    return dot


def _statements(todo, dot, attributes, inside):
    while (token := todo.pop()) != "}":
        if token == "subgraph":
            name = todo.pop()
            assert todo.pop() == "{" and name not in dot.boxes
            dot.boxes[name] = ({}, [])
            inside.append(name)
            _statements(todo, dot, *dot.boxes[name])
        elif todo[-1] == "=":
            todo.pop()
            attributes[token] = todo.pop()
        elif todo[-1] == "->":
            todo.pop()
            dot.edges.append((token, todo.pop(), _attributes(todo)))
        elif token in ("graph", "node", "edge"):
            found = _attributes(todo)
            attributes |= found if token == "graph" else {}
        else:
            assert token not in dot.nodes, f"{token} is declared twice"
            dot.nodes[token] = _attributes(todo)
            inside.append(token)


def _attributes(todo):
    found = {}
    if todo[-1] == "[":
        todo.pop()
        while (key := todo.pop()) != "]":
            assert todo.pop() == "=" and key not in found
            found[key] = todo.pop()
    return found


def lines(attributes):
    """The lines that a viewer sees of a label."""
    label = attributes.get("label", '""')
    if not label.startswith("<"):
        return _unescaped(label[1:-1]).split("\n")
    table = ET.fromstring(label[1:-1])
    rows = ["".join(row.itertext()) for row in table.iter("TR")]
    assert not any(re.search(r"\\[NGTEHL\\]", row) for row in rows), "Graphviz would expand this"
    return rows


def _unescaped(text):
    """A plain label: Graphviz decodes entities first, and drops the backslash of escapes after that."""
    text = re.sub(r"&(?:#\d+|#x[\da-fA-F]+|[A-Za-z]\w*);", lambda entity: html.unescape(entity.group()), text)
    return re.sub(r"\\(.)", lambda escape: {"n": "\n"}.get(escape[1], escape[1]), text, flags=re.S)
