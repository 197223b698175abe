"""A Digraph that renders without the `dot` program too: graphviz-pure, a dependency, stands in for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import graphviz
from graphviz.backend.rendering import get_outfile

PURE_FORMATS = ("svg", "png", "jpg", "jpeg", "json", "dot", "canon", "gv", "xdot", "xdot_json", "plain")
LARGEST_REPR = 1000  # nodes; the layout of a larger graph takes so long that a notebook would seem to hang
GET_DOT = "install Graphviz (https://graphviz.org/download) so that `dot` is on the PATH"


class RendererNotFound(graphviz.ExecutableNotFound):
    """No program on this machine can draw the format; the DOT text, `.source`, is always there."""

    def __init__(self, message: str):
        RuntimeError.__init__(self, message)


class Drawing(graphviz.Digraph):
    """A `graphviz.Digraph` that is drawn by `dot` where that is on the PATH, and else by graphviz-pure.

    graphviz-pure makes SVG, PNG and JPEG; PDF and the rarer formats need `dot`.
    """

    @property
    def _pipe_lines(self) -> Callable[..., bytes]:
        return super()._pipe_lines if shutil.which("dot") else _pipe

    @property
    def _pipe_lines_string(self) -> Callable[..., str]:
        return super()._pipe_lines_string if shutil.which("dot") else _pipe_text

    @property
    def _render(self) -> Callable[..., str]:
        return super()._render if shutil.which("dot") else _render_file

    def __repr__(self) -> str:
        nodes, edges = self._size()
        return f"<Drawing of {nodes} nodes and {edges} edges; .render(outfile='graph.svg') or .source>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **options: Any) -> dict[str, Any]:
        """What a notebook shows: the picture, or the DOT text where it cannot be drawn; never an exception."""
        bundle: dict[str, Any] = {}
        if self._size()[0] <= LARGEST_REPR:
            try:
                bundle = super()._repr_mimebundle_(include, exclude, **options)
            except Exception:
                bundle = {}
        return {**bundle, "text/plain": repr(self) if bundle else self.source}

    def _repr_svg_(self) -> str | None:
        """The same for IPython before version 6."""
        return self._repr_mimebundle_().get("image/svg+xml")

    def _size(self) -> tuple[int, int]:
        """Nodes and edges that were drawn, counted in the DOT text."""
        edges = sum(" -> " in line for line in self.body)
        return sum(re.match(r"\t+n\d+ \[", line) is not None for line in self.body), edges


def pure_program() -> str | None:
    """The path of the graphviz-pure program, wherever pip has put it; the PATH may be empty."""
    try:
        files = metadata.files("graphviz-pure") or []
    except metadata.PackageNotFoundError:
        files = []
    places = [Path(str(file.locate())) for file in files if file.stem == "graphviz-pure"]
    places.append(Path(sysconfig.get_path("scripts"), "graphviz-pure" + (sysconfig.get_config_var("EXE") or "")))
    return next((str(path.resolve()) for path in places if path.is_file()), shutil.which("graphviz-pure"))


def _run(engine: str, format: str, source: bytes, neato_no_op: Any = None, **unused: Any) -> bytes:
    """`source`, DOT text, drawn by graphviz-pure. It takes neither a renderer nor a formatter: it has one of each."""
    program = pure_program()
    if format not in PURE_FORMATS:
        raise RendererNotFound(f"{format} needs the program `dot`: {GET_DOT}, or ask for 'svg' or 'png'")
    if program is None:
        raise RendererNotFound(f"no program that draws graphs: `pip install graphviz-pure`, or {GET_DOT}")
    command = [program, f"-K{engine}", f"-T{format}"] + ([f"-n{neato_no_op:d}"] if neato_no_op else [])
    done = subprocess.run(command, input=source, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        raise graphviz.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def _pipe(engine: str, format: str, input_lines: Iterable[str], *, input_encoding: str, **options: Any) -> bytes:
    """What `graphviz.backend.pipe_lines` does, by graphviz-pure."""
    return _run(engine, format, "".join(input_lines).encode(input_encoding), **options)


def _pipe_text(engine: str, format: str, input_lines: Iterable[str], *, encoding: str, **options: Any) -> str:
    """What `graphviz.backend.pipe_lines_string` does, by graphviz-pure."""
    return _run(engine, format, "".join(input_lines).encode(encoding), **options).decode(encoding)


def _render_file(
    engine: str, format: str, filepath: str, outfile: Any = None, raise_if_result_exists: bool = False, **options: Any
) -> str:
    """What `graphviz.render` does, by graphviz-pure."""
    result = Path(outfile) if outfile is not None else get_outfile(filepath, format=format)
    if raise_if_result_exists and result.exists():
        raise graphviz.FileExistsError(f"output file exists: {os.fspath(result)!r}")
    result.write_bytes(_run(engine, format, Path(filepath).read_bytes(), **options))
    return os.fspath(result)
