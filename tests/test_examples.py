"""The lessons: each runs, writes its pictures and keeps its promises, and notices when it does not."""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LESSONS = sorted(path.stem for path in EXAMPLES.glob("[0-9]*.py"))
sys.path.append(str(EXAMPLES))  # as Python does for a script: lessons import the modules that lie beside them

import console  # noqa: E402
import phonebook_data as data  # noqa: E402
import phonebook_measures as measures  # noqa: E402


def run(lesson, **options):
    """The printed text and the result of a lesson's main()."""
    module = importlib.import_module(lesson)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = module.main(**options)
    return out.getvalue(), result


@pytest.fixture(scope="module", params=LESSONS)
def finished(request, tmp_path_factory):
    """Each lesson, run as a reader runs it: its printed text, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp(request.param)
    text, _ = run(request.param, out=folder)
    return text, folder


def test_a_lesson_ends_with_things_to_try_and_fits_80_columns(finished):
    text, folder = finished
    assert "\nTry this:\n" in text.split("\n----")[-1]
    too_wide = [line for line in text.splitlines() if len(line) > 80 and str(folder) not in line]
    assert not too_wide


def test_a_lesson_says_what_it_wrote_and_the_pictures_are_whole(finished):
    text, folder = finished
    pictures = sorted(folder.iterdir())
    assert pictures and {path.suffix for path in pictures} == {".svg"}
    for path in pictures:
        assert str(path) in text
        assert ET.parse(path).getroot().tag.endswith("svg")


def test_the_table_of_lessons_is_complete():
    rows = re.findall(r"^\| \[`([^`]+)\.py`\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M)
    assert rows == LESSONS


# ---- this forum is awesome


def test_a_wrong_number_ends_the_small_lesson(monkeypatch, tmp_path):
    module = importlib.import_module("05_this_forum_is_awesome")
    monkeypatch.setitem(module.CALCULATOR, "loss", 1.5193)
    with pytest.raises(SystemExit, match="numbers of a pocket calculator"):
        run("05_this_forum_is_awesome", out=tmp_path)


def test_a_wrong_formula_ends_the_small_lesson(monkeypatch, tmp_path):
    module = importlib.import_module("05_this_forum_is_awesome")
    right = module.by_the_formulas
    monkeypatch.setattr(module, "by_the_formulas", lambda **w: {**right(**w), "d_K": right(**w)["d_K"] + 1e-11})
    with pytest.raises(SystemExit, match="all numbers by the formulas"):
        run("05_this_forum_is_awesome", out=tmp_path)


@pytest.mark.parametrize(
    ("name", "promise"), [("d_K", "all gradients by the formulas on paper"), ("d_V", "by the formulas on paper")]
)
def test_a_wrong_line_ends_the_lesson_on_backward(monkeypatch, tmp_path, name, promise):
    module = importlib.import_module("06_attention_backward")
    right = module.by_the_formulas
    monkeypatch.setattr(module, "by_the_formulas", lambda **w: {**right(**w), name: right(**w)[name] + 1e-11})
    with pytest.raises(SystemExit, match=promise):
        run("06_attention_backward", out=tmp_path)


def test_the_lesson_on_backward_runs_with_other_numbers(tmp_path, monkeypatch):
    module = importlib.import_module("06_attention_backward")
    monkeypatch.setitem(module.START, "W_V", np.zeros((3, 2)))
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit, match="pocket calculator"):
        module.main(out=tmp_path)
    assert "WRONG" in out.getvalue() and [path.name for path in tmp_path.iterdir()] == ["graph.svg"]


# ---- reuse and accumulate


def test_a_loop_that_adds_where_it_should_set_ends_the_lesson(monkeypatch, tmp_path):
    module = importlib.import_module("02_reuse_and_accumulate")
    right = module.backward
    monkeypatch.setattr(module, "backward", lambda loss, order, add=True: right(loss, order))
    with pytest.raises(SystemExit, match="dL/da with =, distance from 27 is 87"):
        run("02_reuse_and_accumulate", out=tmp_path)


def test_a_right_order_where_it_should_be_wrong_ends_the_lesson(monkeypatch, tmp_path):
    module = importlib.import_module("02_reuse_and_accumulate")
    found = module.as_found
    monkeypatch.setattr(module, "as_found", lambda loss: sorted(found(loss), key=lambda node: -node.number))
    with pytest.raises(SystemExit, match="dL/da as found, distance from 6 is 108"):
        run("02_reuse_and_accumulate", out=tmp_path)


# ---- one attention, three graphs; who gets what


def test_a_wrong_count_ends_the_lesson_of_three_graphs(monkeypatch, tmp_path):
    module = importlib.import_module("03_one_attention_three_graphs")
    right = module.by_hand
    monkeypatch.setattr(module, "by_hand", lambda *sizes: right(*sizes) | {"exp": 4})
    with pytest.raises(SystemExit, match="arithmetic nodes by hand, difference is 1"):
        run("03_one_attention_three_graphs", out=tmp_path, largest=4)


@pytest.mark.parametrize("mask", [{}, {"ignore": [[True, True], [False, False]]}])
def test_the_lesson_of_three_graphs_holds_under_the_masks_that_it_proposes(monkeypatch, tmp_path, mask):
    module = importlib.import_module("03_one_attention_three_graphs")
    monkeypatch.setattr(module, "MASK", mask)
    _, counts = run("03_one_attention_three_graphs", out=tmp_path, largest=4)
    assert counts["scalar"]["exp"] == (2 if mask else 4)


def test_a_part_that_is_no_detached_run_ends_the_lesson_of_paths(monkeypatch, tmp_path):
    module = importlib.import_module("06b_who_gets_what")
    right = module.with_the_others_cut
    monkeypatch.setattr(module, "with_the_others_cut", lambda name: right(name) + 1e-11 * (name == "K"))
    with pytest.raises(SystemExit, match="K: others detached, error"):
        run("06b_who_gets_what", out=tmp_path)


def test_whoever_asks_another_token_hears_of_that_one(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.import_module("06b_who_gets_what"), "ASKED", 3)
    _, parts = run("06b_who_gets_what", out=tmp_path)
    assert parts["Q"][3].any() and not parts["Q"][:3].any()


# ---- the phone book


def test_the_phone_book_learns_with_an_output_matrix_too(tmp_path):
    _, promised = run("08_phonebook", with_output_matrix=True, out=tmp_path)
    assert promised["number right, made-up names, 1 typo"] >= 0.97


def test_the_same_seed_gives_the_same_story(tmp_path):
    stories = []
    for seed in (3, 3, 4):
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
            importlib.import_module("08_phonebook").main(steps=30, seed=seed, out=tmp_path)
        stories.append(out.getvalue())
    assert stories[0] == stories[1] != stories[2]


def test_a_head_that_did_not_learn_ends_the_program_with_an_error(tmp_path):
    command = [sys.executable, str(EXAMPLES / "08_phonebook.py"), "--steps", "20", "--out", str(tmp_path)]
    # An ASCII pipe, as some consoles are, must not stop the story before its end.
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert re.search(
        r"did not keep its promise: number right, made-up names, 1 typo is [\d.]+, not >= 0\.97", result.stderr
    )
    assert "UnicodeEncodeError" not in result.stderr


def test_whoever_changes_a_number_of_lesson_05_gets_the_graph_and_the_broken_promises(tmp_path, monkeypatch):
    lesson = importlib.import_module("05_this_forum_is_awesome")
    monkeypatch.setattr(lesson, "TARGET", np.array([0.0, 1.0]))
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit, match="pocket calculator"):
        lesson.main(out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["graph.svg"]


def test_a_matrix_that_no_optimiser_moves_shows_the_gradient_of_its_step_alone(tmp_path, monkeypatch):
    lesson = importlib.import_module("08_phonebook")
    real = lesson.optim.AdamW
    monkeypatch.setattr(lesson.optim, "AdamW", lambda groups, **settings: real(groups[:1], **settings))
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        lesson.main(steps=40, out=tmp_path)
    sizes = [float(size) for size in re.findall(r"\|dW_V\| (\S+)", out.getvalue())]
    assert max(sizes) < 2 * sizes[0]


def test_a_measure_holds_at_its_bound_and_not_beyond():
    assert console.Measure("m", 0.5, ">=", 0.5).holds and console.Measure("m", 0.5, "<=", 0.5).holds
    assert not console.Measure("m", 0.49, ">=", 0.5).holds and not console.Measure("m", 0.51, "<=", 0.5).holds
    assert not console.Measure("m", float("nan"), ">=", 0.5).holds


def test_a_table_sets_numbers_right_and_floats_to_three_decimals():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        console.table(["name", "typos", "share"], [["eva", 0, 0.12345], ["jindrich", 10, 1.0]])
    assert out.getvalue() == "  name       typos   share\n  eva            0   0.123\n  jindrich      10   1.000\n\n"


class Terminal(io.StringIO):
    """An output that says it is a terminal."""

    def isatty(self):
        return True


def test_on_a_terminal_lines_stay_and_a_bar_moves_below():
    pytest.importorskip("rich", reason="the progress bar is rich's; without it lessons print plain lines")
    with contextlib.redirect_stdout(Terminal()) as out:
        console.heading("a part")
        with console.progress(10) as report:
            for step in range(10):
                report(step, f"loss [{step}]" if step % 5 == 0 else "")
    assert "---- a part ---" in out.getvalue() and "/10" in out.getvalue()
    assert out.getvalue().count("loss [0]") == out.getvalue().count("loss [5]") == 1


def typos_between(a, b):
    """The edit distance where a letter wrong, missing, too many, or two neighbours swapped count 1."""
    d = {(i, -1): i + 1 for i in range(-1, len(a))} | {(-1, j): j + 1 for j in range(-1, len(b))}
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            d[i, j] = min(d[i - 1, j] + 1, d[i, j - 1] + 1, d[i - 1, j - 1] + (x != y))
            if i and j and x == b[j - 1] and y == a[i - 1]:
                d[i, j] = min(d[i, j], d[i - 2, j - 2] + 1)
    return d[len(a) - 1, len(b) - 1]


def test_the_story_counts_its_typos_right():
    module = importlib.import_module("08_phonebook")
    assert [typos_between(typed, meant) for typed, meant, _ in module.CALLS] == [typos for _, _, typos in module.CALLS]
    assert set(module.BOOK) <= set(data.REAL_NAMES) and len(set(module.BOOK)) == 16


def test_one_typo_is_one_typo():
    rng = np.random.default_rng(0)
    names = data.random_names(rng, 500, never=data.encode(["jindrich"]))
    short = names[names[:, -1] == 0]  # in a full name a letter too many drops the last one
    kinds = {"wrong": 0, "missing": 0, "extra": 0, "swapped": 0}
    for name, typed in zip(map(data.decode, short), map(data.decode, data.misspell(rng, short, 1)), strict=True):
        assert typos_between(name, typed) == 1
        same_length = "swapped" if sorted(name) == sorted(typed) else "wrong"
        kinds[{-1: "missing", 0: same_length, 1: "extra"}[len(typed) - len(name)]] += 1
    assert min(kinds.values()) > 0.15 * len(short)
    assert np.array_equal(data.misspell(rng, names, 0), names)
    some = data.misspell(rng, names, np.arange(500) % 2)
    assert np.array_equal((some != names).any(axis=1), np.arange(500) % 2 == 1)


def test_names_are_encoded_and_unwanted_ones_are_left_out():
    words = ["jindrich", "eva", "abcdefghij", "a"]
    assert [data.decode(row) for row in data.encode(words)] == words
    rng = np.random.default_rng(0)
    first = data.random_names(rng, 20_000, never=data.encode(data.REAL_NAMES))
    second = data.random_names(rng, 20_000, never=np.concatenate([first, data.encode(data.REAL_NAMES)]))
    assert len(first) == len(second) == 20_000
    seen = {data.decode(name) for name in first}
    assert not seen & {data.decode(name) for name in second} and not seen & set(data.REAL_NAMES)


def test_a_token_says_name_and_phone_and_a_call_the_name_only():
    names, phones = data.encode(["eva", "jan"]), np.array([[0, 1, 2, 3, 4, 9], [5, 5, 5, 5, 5, 5]])
    book, call = data.entries(names, phones), data.calls(names)
    assert book.shape == call.shape == (2, 320) and book.dtype == call.dtype == np.float32
    assert np.flatnonzero(book[0]).tolist() == [4, 26 + 21, 52 + 0, 260, 271, 282, 293, 304, 319]
    assert np.array_equal(call[:, :260], book[:, :260]) and not call[:, 260:].any()


def test_the_task_cannot_be_solved_without_looking():
    phones = data.random_phones(np.random.default_rng(0), (400, 16))
    blend = np.eye(10)[phones].mean(axis=1, keepdims=True)  # what uniform attention retrieves, for every call the same
    assert measures.right(np.broadcast_to(blend.argmax(-1), phones.shape), phones) < 0.01


def test_measures_read_matrices_that_were_set_by_hand():
    rng = np.random.default_rng(0)
    names = data.random_names(rng, 300, never=data.encode(["eva"]))
    book = data.entries(names, data.random_phones(rng, (300,)))
    identity = np.eye(320, dtype=np.float32)
    assert measures.name_share(book, identity[:, :260]) == 1
    assert measures.name_share(book, identity[:, 260:]) == 0
    bonus = measures.same_letter_bonus(identity[:, :260], identity[:, :260]) * np.sqrt(260)
    np.testing.assert_allclose(bonus, np.eye(10), atol=1e-6)
    assert measures.mean_at_distance(bonus, 0) == pytest.approx(1) and measures.mean_at_distance(bonus, 1) == 0
    assert measures.found(np.eye(3)) == 1 and measures.found(np.eye(3)[::-1]) == pytest.approx(1 / 3)
