"""What the README shows is what happens: programs run, print what stands below them, and links lead somewhere."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS = [(code, output) for code, output in BLOCKS if not code.startswith("# tinygrad_qkv/")]
QUOTES = [code for code, _ in BLOCKS if code.startswith("# tinygrad_qkv/")]


@pytest.mark.parametrize(("code", "output"), PROGRAMS, ids=[code.splitlines()[-1][:40] for code, _ in PROGRAMS])
def test_a_program_prints_what_the_readme_says(code, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them writes a picture
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == output


@pytest.mark.parametrize("code", QUOTES, ids=[code.splitlines()[0] for code in QUOTES])
def test_quoted_code_is_the_code(code):
    first, _, body = code.partition("\n")
    assert body in (ROOT / first.removeprefix("# ")).read_text(encoding="utf-8")


def test_there_is_something_to_test():
    assert len(PROGRAMS) >= 4 and QUOTES


@pytest.mark.parametrize("page", ["README.md", "examples/README.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert links and not missing
