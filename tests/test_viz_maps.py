"""Heat maps of attention, as SVG and as text."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_qkv import Tensor
from tinygrad_qkv.viz import attention_map, attention_text

SVG = "{http://www.w3.org/2000/svg}"
WEIGHTS = np.array([[0.1651, 0.3349, 0.5], [0.0, 1.0, 0.0]])


def cells(picture):
    """Tooltip, fill and drawn number of every cell, in order."""
    found = []
    for group in ET.fromstring(picture.svg).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        title = group.find(f"{SVG}title")
        if box is not None and title is not None:
            number = group.find(f"{SVG}text")
            found.append((title.text, box.get("fill"), None if number is None else number.text))
    return found


def test_cells_hold_the_weights():
    found = cells(attention_map(WEIGHTS, ["q0", "q1"], ["a", "b", "c"]))
    assert [cell[0] for cell in found[:3]] == ["q0 → a: 0.1651", "q0 → b: 0.3349", "q0 → c: 0.5"]
    assert [cell[2] for cell in found] == ["0.17", "0.33", "0.50", "0.00", "1.00", "0.00"]


def test_colours_are_linear_from_0_to_1_whatever_the_largest_weight_is():
    def red(w):
        return int(cells(attention_map([[w]]))[0][1][1:3], 16)

    assert cells(attention_map([[0.0, 1.0]]))[0][1] == "#ffffff"
    assert cells(attention_map([[0.25]])) == cells(attention_map([[0.25]]))
    assert [red(w) for w in (0, 0.25, 0.5, 0.75, 1)] == [255, 194, 133, 72, 11]


def test_masked_cells_are_dots_and_nan_is_a_cross():
    weights = np.array([[1.0, 0.0], [np.nan, 0.5]])
    picture = attention_map(weights, attend=[[True, False], [True, True]])
    assert [cell[0].split(": ")[1] for cell in cells(picture)] == ["1", "masked", "nan", "0.5"]
    root = ET.fromstring(picture.svg)
    assert len(list(root.iter(f"{SVG}circle"))) == 1 and len(list(root.iter(f"{SVG}path"))) == 1


def test_panels_side_by_side_and_heads():
    for weights, titles in (
        ({"before": WEIGHTS, "after": WEIGHTS[:, ::-1]}, ["before", "after"]),
        (np.stack([WEIGHTS, WEIGHTS, WEIGHTS]), ["head 0", "head 1", "head 2"]),
    ):
        picture = attention_map(weights, title="A")
        texts = [text.text for text in ET.fromstring(picture.svg).iter(f"{SVG}text")]
        assert set(titles) <= set(texts) and len(cells(picture)) == 6 * len(titles)


def test_many_heads_go_below_each_other():
    root = ET.fromstring(attention_map(np.full((16, 4, 4), 0.25)).svg)
    assert float(root.get("width")) < 1500 < 4 * float(root.get("height"))


def test_a_mask_with_heads_belongs_to_each_head():
    attend = np.ones((2, 2, 3), bool)
    attend[1, 0, 2] = False
    said = [cell[0].endswith("masked") for cell in cells(attention_map(np.stack([WEIGHTS] * 2), attend=attend))]
    assert said == [False] * 8 + [True] + [False] * 3


def test_every_text_and_cell_lies_inside_the_picture():
    names = [f"a rather long label {i}" for i in range(20)]
    rng = np.random.default_rng(0)
    picture = attention_map(rng.dirichlet(np.ones(20), (3, 20)), names, names, title="t" * 99)
    root = ET.fromstring(picture.svg)
    width, height = float(root.get("width")), float(root.get("height"))
    for panel in root.findall(f"{SVG}g"):
        x, y = map(float, re.findall(r"[\d.]+", panel.get("transform")))
        for box in panel.iter(f"{SVG}rect"):
            assert x + float(box.get("x")) + float(box.get("width")) <= width
            assert y + float(box.get("y")) + float(box.get("height")) <= height


def test_numbers_up_to_8_by_8_only():
    assert cells(attention_map(np.full((8, 8), 1 / 8)))[0][2] == "0.12"
    assert cells(attention_map(np.full((3, 9), 1 / 9)))[0][2] is None
    assert "12" in attention_text(np.full((8, 8), 1 / 8)) and "percent" not in attention_text(np.full((9, 9), 1 / 9))


def test_tensors_and_lists_are_taken():
    assert attention_map(Tensor(WEIGHTS)).svg == attention_map(WEIGHTS.tolist()).svg == attention_map(WEIGHTS).svg


@given(st.text(max_size=40))
def test_any_label_and_title_is_valid_svg(label):
    picture = attention_map({label: [[1.0]]}, [label], [label], title=label)
    root = ET.fromstring(picture.svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "g", "title", "desc", "rect", "text"}


def test_labels_are_cut_and_the_tooltip_has_all_of_them():
    label = "<script>alert('x')</script>" * 2
    picture = attention_map([[1.0]], [label], ["\n"])
    assert "<script" not in picture.svg
    assert cells(picture)[0][0] == f"{label} → ↵: 1"
    assert max(len(text.text) for text in ET.fromstring(picture.svg).iter(f"{SVG}text")) < 30


def test_saving_writes_the_whole_file(tmp_path):
    picture = attention_map(WEIGHTS)
    path = picture.save(tmp_path / "map.svg")
    assert path.read_text(encoding="utf-8") == str(picture) == picture._repr_svg_()
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_is_svg_and_needs_a_folder(tmp_path):
    picture = attention_map(WEIGHTS)
    with pytest.raises(ValueError, match=r"saved as SVG.*map\.png.*write map\.svg"):
        picture.save(tmp_path / "map.png")
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing.*make it first"):
        picture.save(tmp_path / "missing" / "map.svg")
    assert not list(tmp_path.iterdir())


def test_text_map():
    text = attention_text({"before": WEIGHTS}, ["This", "forum"], ["a", "b", "c"], title="Attention")
    assert text.splitlines() == [
        "Attention",
        "",
        "before",
        "query      a      b      c",
        "This   ▁  17  ▃  33  ▄  50",
        "forum      0  █ 100      0",
        "",
        "weight 0 [ ▁▂▃▄▅▆▇█] 1, numbers are percent",
    ]


def test_no_text_reaches_the_terminal_as_a_command():
    text = attention_text({"\x1b[2J": [[1.0]]}, ["\x1b]0;"], ["\x07"], title="\x1b[31m")
    assert not any(ord(letter) < 32 and letter != "\n" for letter in text)


def test_text_map_in_ascii_letters():
    text = attention_text(WEIGHTS, ["日本", "é"], ["a", "b", "\n"], ascii=True, attend=[[True, True, False]] * 2)
    assert text.isascii()
    assert text.splitlines()[0].split() == ["query", "a", "b", "\\u21b5"]
    assert text.splitlines()[-1] == "weight 0 [ .:-=+*#%@] 1, numbers are percent, ' is masked"


@pytest.mark.parametrize("ascii", [False, True])
def test_text_lines_are_no_longer_than_the_width(ascii):
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(40), 5)
    names = [f"日本語 label {i}" for i in range(40)]
    text = attention_text(weights, names[:5], names, width=60, ascii=ascii)
    table = text.split("\n\n")[0].splitlines()
    wide = [sum(2 if letter > "\u2fff" else 1 for letter in line) for line in table]
    assert max(wide) <= 60 and "more keys do not fit into 60 letters" in table[-1]
    assert len(table) == 7


@pytest.mark.parametrize("draw", [attention_map, attention_text])
@pytest.mark.parametrize(
    ("weights", "options", "error", "words"),
    [
        (np.zeros(3), {}, ValueError, "(3,)"),
        (np.zeros((2, 1, 3, 3)), {}, ValueError, "choose one of a batch"),
        (np.zeros((0, 3)), {}, ValueError, "(0, 3)"),
        ({}, {}, ValueError, "none"),
        (WEIGHTS * 3, {}, ValueError, "softmax"),
        (-WEIGHTS, {}, ValueError, "between 0 and 1"),
        (WEIGHTS, {"queries": ["a"]}, ValueError, "2 queries, got 1"),
        (WEIGHTS, {"keys": "ab"}, ValueError, "3 keys, got 2"),
        (WEIGHTS, {"attend": np.zeros((2, 3))}, TypeError, "boolean"),
        (WEIGHTS, {"attend": np.ones((2, 2), bool)}, ValueError, "(2, 2)"),
    ],
)
def test_wrong_input_is_explained(draw, weights, options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        draw(weights, **options)


def test_a_map_that_is_too_large_says_how_to_go_on():
    with pytest.raises(ValueError, match=re.escape("weights[:64, :64]")):
        attention_map(np.zeros((129, 3)))
