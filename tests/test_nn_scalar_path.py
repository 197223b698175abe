"""Attention as a scalar graph: the numbers of the other paths, as many nodes as foretold, and what it refuses."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from tinygrad_qkv import Tensor, check_grad, explain_grad, explain_softmax_grad, grad, nn
from tinygrad_qkv.autograd import ancestry
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import scalar_path

T, S, D_K, D_V = 3, 5, 2, 7
attention = F.scaled_dot_product_attention
LEADS = [(), (2,), (2, 3)]
MASKS = {
    "no mask": lambda lead: {},
    "causal": lambda lead: {"is_causal": True},
    "positions": lambda lead: {"is_causal": True, "k_positions": np.arange(S) + 2, "q_positions": range(T)},
    "attend": lambda lead: {"attend": numbers(*lead, T, S, seed=4) > -0.3},
    "a row that sees nothing": lambda lead: {"ignore": np.arange(T)[:, None] == 1},
    "lengths": lambda lead: {"lengths": np.arange(lead[0]) * 3 if lead else 3},
    "bias": lambda lead: {"bias": np.where(numbers(T, S, seed=6) > 1, -math.inf, numbers(T, S, seed=7))},
    "window and scale": lambda lead: {"window": 1, "scale": 0.3},
}
CASES = [pytest.param(lead, name, id=f"{lead} {name}") for lead, name in itertools.product(LEADS, MASKS)]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def qkv(lead=(), t=T, s=S):
    return numbers(*lead, t, D_K, seed=1), numbers(*lead, s, D_K, seed=2), numbers(*lead, s, D_V, seed=3)


def run(path, arrays, dtype=np.float64, **words):
    """The output, and the gradients of q, k and v for a fixed gradient of the output."""
    leaves = [Tensor(x, dtype, requires_grad=True) for x in arrays]
    output = attention(*leaves, path=path, **words)
    output.backward(numbers(*output.shape, seed=9).astype(dtype))
    return [output.numpy(), *(x.grad.numpy() for x in leaves)]


def assert_close(found, expected, bound):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * np.max(np.abs(b), initial=1))


def op_counts(tensor):
    """How many nodes of each op made a tensor."""
    return dict(Counter(node.op for node in ancestry([tensor._node]) if not node.is_leaf))


# ---- the same numbers


@pytest.mark.parametrize(("lead", "name"), CASES)
@pytest.mark.parametrize("other", ["tensor", "fused"])
def test_outputs_and_gradients_agree_with_the_other_paths(lead, name, other):
    words = MASKS[name](lead)
    assert_close(run("scalar", qkv(lead), **words), run(other, qkv(lead), **words), 4e-15)
    in_float32 = [run(path, qkv(lead), np.float32, **words) for path in ("scalar", other)]
    assert_close(*in_float32, 2e-6)


def test_shared_heads_and_broadcast_axes_agree():
    q, k, v = numbers(2, 6, T, D_K), numbers(2, 3, S, D_K, seed=1), numbers(2, 2, S, D_V, seed=2)
    for arrays in (
        (q, k, v),
        (q, k[0, :1], v[:1]),
        (q[0, 0], k, v[:, :1]),
        (q, k[0, 0], v[0, 0]),
        (q[0], k[:, :1], v[0, :1]),
    ):
        assert_close(run("scalar", arrays, is_causal=True), run("tensor", arrays, is_causal=True), 4e-15)


def test_a_learnt_bias_gets_its_gradient_and_each_of_its_numbers_is_taken_out_once():
    for shape, used in {(T, S): 12, (3, 1, S): 15, (2, 1, T, 1): 6, (): 1}.items():
        found = []
        for path in ("scalar", "tensor"):
            bias = Tensor(numbers(*shape, seed=5), requires_grad=True)
            output = attention(*qkv((2, 3)), bias=bias, is_causal=True, path=path)
            assert op_counts(output).get("getitem", used) == used
            output.square().sum().backward()
            found.append(bias.grad.numpy())
        np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


def test_rows_that_see_nothing_give_zeros_and_zero_gradients():
    for words in ({"lengths": 0}, {"attend": np.zeros((T, S), bool)}, {"ignore": np.arange(T)[:, None] < 2}):
        output, *gradients = run("scalar", qkv(), **words)
        assert not output[:2].any() and not gradients[0][:2].any()
        if "ignore" not in words:
            assert not any(g.any() for g in [output, *gradients])
    k = numbers(2, D_K)  # T > S: the first query sees nothing
    output, *gradients = run("scalar", (qkv()[0], k, k), is_causal=True)
    assert not output[0].any() and output[1:].all() and not gradients[0][0].any()


def test_nan_and_inf_behind_a_mask_reach_nothing():
    for wrong in (math.nan, math.inf):
        q, k, v = qkv((2,))
        clean = run("scalar", (q, k, v), lengths=[3, 4])
        k[:, 4], v[:, 4], k[0, 3], v[0, 3] = wrong, wrong, wrong, wrong
        for a, b in zip(run("scalar", (q, k, v), lengths=[3, 4]), clean, strict=True):
            np.testing.assert_array_equal(a, b)
    q, k, v = qkv()
    k[4, 0] = math.nan
    found, expected = (run(path, (q, k, v), is_causal=True) for path in ("scalar", "tensor"))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a, b, atol=1e-14)
    assert np.isnan(found[0][2]).all() and not np.isnan(found[0][:2]).any()


def test_large_scores_are_safe_and_empty_inputs_are_empty():
    q, k, v = qkv()
    assert_close(run("scalar", (q * 1e3, k * 1e3, v)), run("tensor", (q * 1e3, k * 1e3, v)), 1e-12)
    for t, s in ((0, S), (T, 0)):
        output, *gradients = run("scalar", qkv((2,), t, s))
        assert output.shape == (2, t, D_V) and not output.any() and not any(g.any() for g in gradients)


def test_higher_derivatives_pass_through_it():
    def slope(q, k, v):
        return grad(attention(q, k, v, is_causal=True, path="scalar").square().sum(), q, create_graph=True)[0]

    check_grad(slope, *qkv((), 2, 3))


def test_the_record_is_that_of_the_call_and_changes_no_bit():
    everything = ("weights", "scores", "q", "k", "v", "logsumexp")
    output, record = attention(*qkv(), path="scalar", is_causal=True, need=everything)
    np.testing.assert_array_equal(output, attention(*qkv(), path="scalar", is_causal=True))
    np.testing.assert_allclose(record.weights @ record.v, output, atol=1e-15)


def test_a_layer_takes_the_path_too():
    attn = nn.MultiHeadAttention(6, 2, num_kv_heads=1)
    x = Tensor(numbers(2, 5, 6), "float32")
    found = {path: attn(x, path=path, is_causal=True) for path in ("scalar", "tensor")}
    np.testing.assert_allclose(found["scalar"], found["tensor"], atol=2e-6)
    counts = op_counts(found["scalar"])
    pairs = 2 * 2 * (5 * 5 - 5 * 4 // 2)
    assert counts["exp"] == counts["div"] == counts["sub"] == pairs and "softmax" not in counts
    np.testing.assert_allclose(attn(x[0], path="scalar"), attn(x[0], path="tensor"), atol=2e-6)
    block = nn.TransformerBlock(6, 2)
    np.testing.assert_allclose(block(x, path="scalar"), block(x, path="tensor"), atol=1e-5)


# ---- as many nodes as foretold


@pytest.mark.parametrize(("lead", "name"), CASES)
@pytest.mark.parametrize("path", ["scalar", "tensor", "fused"])
def test_the_closed_form_counts_every_node_of_the_real_graph(lead, name, path):
    words = MASKS[name](lead)
    output = attention(*(Tensor(x, requires_grad=True) for x in qkv(lead)), path=path, **words)
    without_scale = {word: value for word, value in words.items() if word != "scale"}
    assert op_counts(output) == F.attention_node_count((*lead, T, S), D_K, D_V, path=path, **without_scale)


def test_the_formulas_that_the_docs_print_are_the_ones_that_count():
    text = F.attention_node_count.__doc__
    for words, P in (({}, T * S), ({"is_causal": True}, T * T - T * (T - 1) // 2)):
        s = S if not words else T
        R, K, d_k, d_v = T, s, D_K, D_V
        counts = F.attention_node_count((T, s), d_k, d_v, **words)
        for op, n in counts.items():
            line = next(line for line in text.splitlines() if line.split()[:1] == [op])
            formula = line.split(None, 1)[1].split("  ")[0]
            assert eval(formula, {"P": P, "R": R, "K": K, "d_k": d_k, "d_v": d_v}) == n, op
    assert sum(F.attention_node_count((4, 4), 3, 3, path="tensor").values()) == 5
    with pytest.raises(ValueError, match="'scalar', 'tensor' or 'fused', got 'graph'"):
        F.attention_node_count((T, S), D_K, D_V, path="graph")


def test_every_op_of_the_arithmetic_is_a_node_of_one_number():
    output = attention(*(Tensor(x, requires_grad=True) for x in qkv((2,))), path="scalar")
    for node in ancestry([output._node]):
        if node.op in ("mul", "add", "sub", "exp", "div"):
            assert node.shape == ()
        else:
            assert node.op in ("leaf", "getitem", "stack", "reshape")


# ---- the two halves of softmax, as paths of the scalar graph


def test_own_element_and_normalisation_are_two_ways_through_the_scalar_graph():
    q, k, v = (Tensor(x, requires_grad=True) for x in qkv())
    output, record = attention(q, k, v, path="tensor", need=("scores", "weights"))
    split = explain_softmax_grad(output.square().sum(), record.scores, record.weights)
    scores = Tensor(record.scores.numpy(), requires_grad=True)
    exps = (scores - scores.numpy().max(-1, keepdims=True)).exp()
    total = exps.sum(-1, keepdims=True)
    ways = explain_grad((exps / total @ v).square().sum(), scores, {"normalisation": total, "own element": "other"})
    for name in ("own element", "normalisation"):
        np.testing.assert_allclose(split.parts[name], ways.parts[name], atol=1e-14)


# ---- what it refuses


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"softcap": 3.0}, "takes no softcap="),
        ({"sink": np.zeros(1)}, "takes no sink="),
        ({"dropout_p": 0.1}, "takes no dropout_p="),
    ],
)
def test_what_it_does_not_take_is_refused_with_the_way_out(words, text):
    with pytest.raises(ValueError, match=text) as raised:
        attention(*qkv(), path="scalar", **words)
    assert 'path="tensor"' in str(raised.value)


def test_a_graph_that_nobody_could_look_at_is_refused_before_it_is_made(monkeypatch):
    x = np.zeros((300, 8))
    with pytest.raises(ValueError, match=r"would make 3,245,701 nodes, .* stops at 1,000,000; path=\"tensor\""):
        attention(x, x, x, path="scalar")
    assert sum(F.attention_node_count((300, 300), 8, 8).values()) == 3_245_701
    with pytest.raises(ValueError, match="here d_k is 0"):
        attention(np.zeros((2, 0)), np.zeros((3, 0)), np.zeros((3, 1)), path="scalar")
    allowed = sum(F.attention_node_count((T, S), D_K, D_V).values())
    monkeypatch.setattr(scalar_path, "LARGEST", allowed)
    attention(*qkv(), path="scalar")
    monkeypatch.setattr(scalar_path, "LARGEST", allowed - 1)
    with pytest.raises(ValueError, match="would make"):
        attention(*qkv(), path="scalar")
