"""The drawn graph: what is in it, how it reads, and that it never breaks."""

import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from dot_reader import HOSTILE, lines, read
from hypothesis import example, given
from hypothesis import strategies as st

import tinygrad_qkv as tq
from tinygrad_qkv import Tensor, draw_graph, nn, no_grad, recording
from tinygrad_qkv.modes import Frame, module_frame, switched
from tinygrad_qkv.viz.labels import printable


def leaf(values, name=None, requires_grad=True):
    x = Tensor(values, requires_grad=requires_grad)
    if name is not None:
        x.name = name
    return x


def texts(drawing):
    """The lines of every node, by its id."""
    return {node: lines(attributes) for node, attributes in read(drawing.source).nodes.items()}


def node_of(drawing, title):
    """The lines of the one node with this first line."""
    (found,) = [rows for rows in texts(drawing).values() if rows[0] == title]
    return found


def ends(drawing):
    """The edges as pairs of first lines, counted."""
    dot, shown = read(drawing.source), texts(drawing)
    assert all(tail in dot.nodes and head in dot.nodes for tail, head, _ in dot.edges)
    return Counter((shown[tail][0], shown[head][0]) for tail, head, _ in dot.edges)


# ---- nodes and edges


def test_one_operand_twice_is_two_arrows():
    x = leaf([2.0], "x")
    assert ends(draw_graph(x * x)) == {("x", "mul"): 2}


def test_equal_leaves_stay_apart():
    a, b = leaf([1.0, 1.0], "w"), leaf([1.0, 1.0], "w")
    drawing = draw_graph((a * b).sum())
    assert ends(drawing) == {("w", "mul"): 2, ("mul", "sum"): 1}
    assert len(texts(drawing)) == 4


def test_a_constant_is_drawn_with_a_dashed_arrow():
    x, c = leaf([1.0, 2.0], "x"), Tensor([3.0, 4.0])
    drawing = draw_graph(x * c)
    dashed = [attributes.get("style") for _, _, attributes in read(drawing.source).edges]
    assert ends(drawing) == {("x", "mul"): 1, ("constant", "mul"): 1}
    assert dashed == [None, '"dashed"']


@pytest.mark.parametrize(
    ("make", "title"),
    [
        (lambda x: x * 0.5, "mul 0.5"),
        (lambda x: 0.5 * x, "mul 0.5"),
        (lambda x: x - 1, "sub 1"),
        (lambda x: 1 - x, "1 sub"),
        (lambda x: 2 / x, "2 div"),
        (lambda x: x**3, "pow 3"),
        (lambda x: x * 1.0001, "mul 1.0001"),
        (lambda x: tq.masked_fill(x, np.array([True]), -np.inf), "where -inf"),
    ],
)
def test_scalar_operands_stand_in_the_op(make, title):
    assert title in [rows[0] for rows in texts(draw_graph(make(leaf([2.0])))).values()]


def test_shape_always_and_dtype_where_it_is_not_float32():
    x = leaf(np.ones((2, 3)), "x")
    drawing = draw_graph(x.astype(np.float32).sum(axis=0))
    assert texts(drawing) == {
        "n0": ["x", "(2, 3) float64"],
        "n1": ["astype", "(2, 3)"],
        "n2": ["sum", "(3,) · output"],
    }


def test_operands_are_named_where_their_order_matters():
    a, b = leaf(np.ones((2, 3)), "A"), leaf(np.ones((3, 2)), "B")
    edges = read(draw_graph(a @ b + a @ b).source).edges
    assert [attributes.get("label") for _, _, attributes in edges] == ['" a"', '" b"', '" a"', '" b"', None, None]


def test_formulas_on_the_arrows():
    x = leaf([0.5], "x")
    edges = read(draw_graph(x.exp() * x, formulas=True).source).edges
    assert [lines(attributes)[0].strip() for _, _, attributes in edges] == ["dx = g * y", "da = g * b", "db = g * a"]


def test_long_formulas_are_wrapped():
    x = leaf(np.ones((2, 3)))
    dot = read(draw_graph(tq.cross_entropy(x, np.array([0, 1])), formulas=True).source)
    rows = [row for _, _, attributes in dot.edges for row in lines(attributes)]
    assert len(rows) > len(dot.edges) and max(map(len, rows)) < 45


@pytest.mark.parametrize("name", ["W_Q", "b_Q", "blocks.0.attn.W_Q", "Q", "q"])
def test_the_q_family_has_its_colour_and_its_letter(name):
    (attributes,) = read(draw_graph(leaf([1.0], name)).source).nodes.values()
    assert attributes["color"] == '"#005A9C"' and name in lines(attributes)[0]


@pytest.mark.parametrize("name", ["weight", "W_O", "W_QK", "seq", "Q.weight", None])
def test_other_names_are_of_no_family(name):
    (attributes,) = read(draw_graph(leaf([1.0], name)).source).nodes.values()
    assert attributes["color"] not in ('"#005A9C"', '"#B34700"', '"#00704F"')


def test_a_leaf_alone_is_one_node():
    assert texts(draw_graph(leaf([1.0], "x"))) == {"n0": ["x", "(1,)"]}


def test_several_outputs_share_one_picture():
    x = leaf([1.0], "x")
    y = x.exp()
    drawing = draw_graph([y, y.sin(), y])
    assert ends(drawing) == {("x", "exp"): 1, ("exp", "sin"): 1}
    assert [rows[1].endswith("output") for rows in texts(drawing).values()] == [False, True, True]


def test_names_label_leaves_and_inner_tensors():
    x, mask = leaf([1.0], "x"), Tensor([1.0])
    scores = x * 2.0
    drawing = draw_graph(scores.exp(), names={"scores": scores, "input": x, "mask": mask})
    assert node_of(drawing, "scores") == ["scores", "mul 2 · (1,)"]
    assert node_of(drawing, "input") == ["input", "(1,)"]
    assert any("1 of the names" in row for row in notes(drawing))
    with pytest.raises(TypeError, match=r"names is {'label': tensor}, got list"):
        draw_graph(scores, names=[scores])


# ---- the same picture every time


def attention():
    rng = np.random.default_rng(3)
    layer = nn.MultiHeadAttention(4, 2)
    for parameter in layer.parameters():
        parameter.write(rng.normal(size=parameter.shape).astype(np.float32))
    return layer, Tensor(rng.normal(size=(2, 3, 4)).astype(np.float32))


def test_a_second_pass_and_backward_change_no_byte():
    layer, x = attention()
    late = Tensor(np.ones((2, 3, 4), np.float32))
    first = (layer(x) * late).sum()
    source = draw_graph(first).source
    first.backward()
    assert draw_graph(first).source == source
    assert draw_graph((layer(x) * late).sum()).source == source


def test_two_processes_draw_the_same_bytes():
    code = (
        "from tinygrad_qkv import Tensor, draw_graph, recording\n"
        "from tinygrad_qkv.modes import Frame, module_frame, switched\n"
        "x, w = Tensor([0.5, 2.0]), Tensor([3.0], requires_grad=True)\n"
        "with recording(), switched(module_frame, Frame('a.b', 'Layer', None, 1)): y = (x * w + w.exp()).sum()\n"
        "y.backward(); print(draw_graph(y, values=True, grads=True, formulas=True, names={'x': x}).source)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": s}
        )
        for s in "12"
    ]
    assert runs[0].stdout == runs[1].stdout and b"digraph" in runs[0].stdout


def test_a_doubling_chain_is_drawn_once():
    y = leaf(1.0, "x")
    for _ in range(40):
        y = y + y
    dot = read(draw_graph(y).source)
    assert (len(dot.nodes), len(dot.edges)) == (41, 80)


def test_a_long_chain_does_not_recurse():
    y = leaf(1.0)
    for _ in range(20_000):
        y = y * 1.0
    source = draw_graph(y, legend=False).source
    assert source.count(" -> ") == 20_000


def test_ten_thousand_nodes_in_nested_boxes_with_everything():
    x = y = leaf([1.0], "x")
    with recording():
        for i in range(2000):
            with switched(module_frame, Frame(f"layers.{i}", "Layer", None, i)):
                y = y * 0.5 + x.exp().sin()
    y.backward()
    dot = read(draw_graph(y, values=True, grads=True, formulas=True).source)
    assert (len(dot.nodes), len(dot.boxes)) == (8001, 2000)


# ---- values and gradients


def notes(drawing):
    return [row for row in lines(read(drawing.source).attributes) if row]


def test_values_and_gradients_are_those_of_the_tensors():
    x = leaf([[1.0, -2.0], [0.25, 3.0]], "x")
    with recording():
        y = x * x
        loss = y.sum()
    loss.backward()
    drawing = draw_graph(loss, values=True, grads=True, names={"y": y})
    assert x.grad.tolist() == [[2, -4], [0.5, 6]]
    assert node_of(drawing, "x")[2:] == ["value", "[1, -2]", "[0.25, 3]", "grad", "[2, -4]", "[0.5, 6]"]
    assert node_of(drawing, "y")[2:] == ["value", "[1, 4]", "[0.0625, 9]", "grad", "[1, 1]", "[1, 1]"]
    assert node_of(drawing, "sum")[2:] == ["value 14.06", "grad 1"]


def test_more_than_six_elements_are_summed_up():
    numbers = np.array([-3.0, 0, 1, 2, 4, 5, 12], np.float32)
    with recording():
        y = leaf(numbers, "x") * 1.0
    row = node_of(draw_graph(y, values=True), "x")[2]
    figures = [float(n) for n in re.findall(r"-?[\d.]+", row)]
    np.testing.assert_allclose(figures, [numbers.mean(), numbers.std(), -3, 12], rtol=5e-3)


def test_larger_arrays_in_full_on_request():
    with recording():
        y = leaf(np.arange(8.0).reshape(2, 4), "x") * 1.0
    assert node_of(draw_graph(y, values=True, full=8), "x")[2:] == ["value", "[0, 1, 2, 3]", "[4, 5, 6, 7]"]


@pytest.mark.parametrize(
    ("numbers", "rows"),
    [
        (np.full(8, 0.5), ["value all 0.5"]),
        (np.array([-np.inf] * 3 + [1.0] * 5), ["value", "all 1", "-inf (3 of 8)"]),
        (np.array([np.nan] + [np.inf] * 7), ["value", "nan! (1 of 8)", "inf (7 of 8)"]),
        (np.zeros((0, 3)), ["value empty"]),
        (np.array([np.nan, 1]), ["value [nan, 1]"]),
    ],
)
def test_values_that_are_not_ordinary(numbers, rows):
    with recording():
        y = leaf(numbers, "x") * 1.0
    assert node_of(draw_graph(y, values=True), "x")[2:] == rows


def test_the_four_states_of_a_gradient_in_words():
    bad, zero, frozen, waiting = (
        leaf([v], n) for v, n in ((-1.0, "bad"), (2.0, "zero"), (3.0, "frozen"), (4.0, "waiting"))
    )
    frozen.requires_grad = False
    with recording(), np.errstate(invalid="ignore"):
        y = bad.sqrt() * frozen + zero * 0.0
        unused = waiting * 2.0
    y.sum().backward()
    drawing = draw_graph([y, unused], grads=True)
    said = {name: node_of(drawing, name)[-1] for name in ("bad", "zero", "frozen", "waiting")}
    assert said == {
        "bad": "grad nan!",
        "zero": "grad 0 (exactly)",
        "frozen": "grad none (not needed)",
        "waiting": "grad not computed",
    }


def test_a_graph_without_a_record_says_so():
    x = leaf([1.0], "x")
    y = (x * 2.0).exp()
    drawing = draw_graph(y, values=True, grads=True)
    assert any("3 of 3 nodes were not recorded" in row and "recording()" in row for row in notes(drawing))
    assert any("2 of 3 nodes were not recorded" in row for row in notes(draw_graph(y, grads=True)))
    assert any("backward() has not run" in row for row in notes(drawing))
    y.backward()
    drawing = draw_graph(y, values=True, grads=True)
    assert node_of(drawing, "x")[-1] == f"grad [{x.grad.item():.4g}]"
    assert not any("has not run" in row for row in notes(drawing))


def test_the_legend_explains_the_figures_of_a_large_array():
    with recording():
        y = leaf([1.0, 2.0, 3.0], "x").sum()
    assert not any("standard deviation" in row for row in notes(draw_graph(y, values=True)))
    assert any("standard deviation" in row for row in notes(draw_graph(y, values=True, full=2)))


def test_the_legend_names_what_occurs_and_can_be_left_out():
    x = leaf([1.0], "x")
    assert "parameter" in "".join(notes(draw_graph(x * 2.0)))
    assert "dashed" not in "".join(notes(draw_graph(x * 2.0)))
    assert notes(draw_graph(x * 2.0, legend=False)) == []


# ---- module boxes


def test_boxes_nest_as_the_calls_did_and_hold_their_parameters():
    class Model(nn.Module):
        def __init__(self):
            self.embed = nn.Linear(3, 3)
            self.layers = [nn.Linear(3, 3), nn.Linear(3, 3)]

        def forward(self, x):
            x = self.embed(x @ self.embed.weight)
            for layer in self.layers:
                x = layer(x).relu()
            return x

    x = leaf(np.ones((2, 3), np.float32), "x", requires_grad=False)
    drawing = draw_graph(Model()(x).sum())
    dot, shown = read(drawing.source), texts(drawing)
    titles = {name: lines(attributes)[0] for name, (attributes, _) in dot.boxes.items()}
    inside = {titles[name]: {titles.get(i) or shown[i][0] for i in ids} for name, (_, ids) in dot.boxes.items()}
    assert inside == {
        "Model": {"Linear · embed", "Linear · layers.0", "Linear · layers.1", "relu", "matmul"},
        **{
            f"Linear · {path}": {"affine", "swapaxes", f"{path}.weight", f"{path}.bias"}
            for path in ("embed", "layers.0", "layers.1")
        },
    }


def test_a_module_that_is_called_twice_has_two_boxes():
    layer = nn.LayerNorm(3)
    y = layer(layer(leaf(np.ones((2, 3), np.float32)))).sum()
    assert len(read(draw_graph(y).source).boxes) == 2


# ---- any text at all


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_read_as_they_are(name):
    check_name(name)


@given(st.text())
@example("\\N&lt;\n")
def test_any_name_reads_as_it_is(name):
    check_name(name)


def check_name(name):
    x = leaf([1.0], name)
    with switched(module_frame, Frame(name, "Kind", None, 1)):
        y = x * 2.0
    drawing = draw_graph(y, names={name: y})
    dot = read(drawing.source)
    first, second = texts(drawing).values()
    want = printable(name).split("\n") if name else ["parameter"]
    assert first == [*want, "(1,)"]
    assert second == ([*want, "mul 2 · (1,) · output"] if name else ["mul 2", "(1,) · output"])
    title = lines(dot.boxes["cluster_0"][0])
    assert title == (printable(f"Kind · {name}").split("\n") if name else ["Kind"])


def test_control_characters_become_visible_signs():
    assert printable("a\x00\x1b\x7f\x85\ud800\r\nb\tc") == "a␀␛␡\ufffd\ufffd\nb\tc"


# ---- what it refuses


def test_a_tensor_without_a_graph_is_refused_with_the_reason():
    with no_grad():
        y = leaf([1.0]) * 2.0
    for tensor in (y, Tensor([1.0]), leaf([1.0]).detach(), [leaf([1.0]), y]):
        with pytest.raises(RuntimeError, match=r"no graph.*requires_grad=True.*no_grad"):
            draw_graph(tensor)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([],), {}, ValueError, "empty list"),
        (([1.0],), {}, TypeError, "float"),
        ((3,), {}, TypeError, "a Tensor, or a list of Tensors, got int"),
        ((None,), {"level": "module"}, ValueError, "level='op'"),
        ((None,), {"direction": "up"}, ValueError, "'TB'"),
        ((None,), {"names": {"x": 1}}, TypeError, "'label': tensor"),
    ],
)
def test_wrong_arguments(arguments, options, error, words):
    if arguments == (None,):
        arguments = (leaf([1.0]) * 2.0,)
    with pytest.raises(error, match=re.escape(words)):
        draw_graph(*arguments, **options)
