"""Rendering: by `dot`, by graphviz-pure where that is missing, and an error that helps where both are."""

import re
import shutil
import stat
import struct
import sys
import xml.etree.ElementTree as ET

import graphviz
import pytest
from dot_reader import HOSTILE

from tinygrad_qkv import Tensor, draw_graph
from tinygrad_qkv.modes import Frame, module_frame, switched
from tinygrad_qkv.viz import render
from tinygrad_qkv.viz.labels import printable

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drawing():
    x = Tensor([1.0, 2.0], requires_grad=True)
    return draw_graph((x * x).sum(), names={"x": x})


@pytest.fixture
def no_dot(monkeypatch):
    """No programs on the PATH, but graphviz-pure in the environment."""
    if render.pure_program() is None:
        pytest.skip("graphviz-pure has no wheel for this platform")
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def no_program(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(render, "pure_program", lambda: None)


def words(svg):
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_svg_and_png_without_dot(drawing, no_dot):
    assert {"x", "mul", "sum", "parameter", "output"} <= set(words(drawing.pipe(format="svg")))
    png = drawing.pipe(format="png")
    width, height = struct.unpack(">II", png[16:24])
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and 50 < width < 1000 and 100 < height < 1000


def test_pipe_gives_text_when_given_an_encoding(drawing, no_dot):
    text = drawing.pipe(format="svg", encoding="utf-8")
    assert isinstance(text, str) and text == drawing.pipe(format="svg").decode()
    assert drawing.pipe() == text.encode(), "SVG is the format unless another one is asked for"


def test_render_writes_the_named_file(drawing, no_dot, tmp_path):
    for name in ("graph.svg", "graph.png"):
        path = tmp_path / name
        assert drawing.render(outfile=path) == str(path)
        assert path.read_bytes() == drawing.pipe(format=path.suffix[1:])


def test_render_names_files_as_graphviz_does(drawing, no_dot, tmp_path):
    rendered = drawing.render("net.gv", directory=tmp_path, format="svg", cleanup=True)
    assert rendered == str(tmp_path / "net.gv.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["net.gv.svg"]
    with pytest.raises(graphviz.FileExistsError):
        drawing.render("net.gv", directory=tmp_path, format="svg", raise_if_result_exists=True)


def test_pdf_needs_dot_and_says_so(drawing, no_dot, tmp_path):
    with pytest.raises(graphviz.ExecutableNotFound, match=r"pdf needs the program `dot`.*'svg' or 'png'"):
        drawing.pipe(format="pdf")
    with pytest.raises(graphviz.ExecutableNotFound):
        drawing.render(outfile=tmp_path / "graph.pdf")
    assert not (tmp_path / "graph.pdf").exists()


def test_what_graphviz_cannot_read_is_an_error(no_dot):
    broken = render.Drawing(body=["\tn0 [label=<unclosed]\n"])
    with pytest.raises(graphviz.CalledProcessError):
        broken.pipe(format="svg")


def test_no_program_at_all_names_the_way_out(drawing, no_program):
    with pytest.raises(graphviz.ExecutableNotFound, match=r"pip install graphviz-pure.*dot"):
        drawing.pipe(format="svg")
    assert "digraph" in drawing.source


def test_dot_is_used_where_it_is_on_the_path(drawing, monkeypatch, tmp_path):
    if sys.platform == "win32":
        pytest.skip("a script cannot stand in for dot.exe on Windows")
    fake = tmp_path / "dot"
    fake.write_text('#!/bin/sh\necho "drawn by dot $@"\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drawing.pipe(format="svg") == b"drawn by dot -Kdot -Tsvg\n"
    assert drawing.pipe(format="pdf", encoding="utf-8") == "drawn by dot -Kdot -Tpdf\n"


def test_a_notebook_gets_the_picture(drawing, no_dot):
    bundle = drawing._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert bundle["image/svg+xml"] == drawing._repr_svg_() == drawing.pipe(format="svg", encoding="utf-8")
    assert "3 nodes and 3 edges" in bundle["text/plain"]
    assert drawing._repr_mimebundle_(include=["image/png"])["image/png"][:4] == b"\x89PNG"


def test_a_notebook_gets_the_dot_text_where_nothing_can_draw(drawing, no_program):
    assert drawing._repr_mimebundle_() == {"text/plain": drawing.source}
    assert drawing._repr_svg_() is None


def test_a_notebook_does_not_wait_for_a_huge_picture(no_dot):
    y = Tensor(1.0, requires_grad=True)
    for _ in range(render.LARGEST_REPR):
        y = y * 1.0
    assert set(draw_graph(y)._repr_mimebundle_()) == {"text/plain"}


@pytest.mark.parametrize("program", ["graphviz-pure", "dot"])
def test_hostile_names_read_as_they_are_in_the_svg(program, request):
    if program == "graphviz-pure":
        request.getfixturevalue("no_dot")
    elif shutil.which("dot") is None:
        pytest.skip("the program dot is not installed here")
    outputs = []
    for number, name in enumerate(HOSTILE):
        x = Tensor([1.0], requires_grad=True)
        x.name = name
        with switched(module_frame, Frame(name, "Kind", None, number)):
            outputs.append(x * 2.0)
    svg = draw_graph(outputs, legend=False).pipe(format="svg", quiet=True)
    assert b"<script" not in svg
    shown = {"node": [], "cluster": []}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        if group.get("class") in shown:
            shown[group.get("class")].append([text.text or "" for text in group.findall(f"{SVG}text")])
    names = {squeezed("\n".join(rows[:-1])) for rows in shown["node"]}
    assert names == {squeezed(name) or "" for name in HOSTILE if name} | {"parameter", "mul 2"}
    titles = {squeezed("\n".join(rows)) for rows in shown["cluster"]}
    assert titles == {squeezed(f"Kind · {name}" if name else "Kind") for name in HOSTILE}


def squeezed(text):
    """`text` as SVG shows it: runs of spaces may be written as unbreakable ones."""
    return re.sub(r"\s+", " ", printable(text)).strip()
