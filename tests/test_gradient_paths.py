"""Gradients by path: parts that add up, each the same as a run with the other paths detached; names; refusals."""

import math
import re

import numpy as np
import pytest

from tinygrad_qkv import Tensor, explain_grad, explain_softmax_grad, grad, manual_seed, nn, no_grad, ops, recording
from tinygrad_qkv.nn import functional as F

B, T, D, H = 2, 5, 6, 3
C = np.random.default_rng(0).normal(size=(B, T, D))


def leaf(*shape, seed=1):
    return Tensor(np.random.default_rng(seed).normal(size=shape), requires_grad=True)


@pytest.fixture(autouse=True)
def seeded():
    manual_seed(0)


def in_float64(module):
    """The same layer with parameters in float64, none of them 0."""
    for i, (name, p) in enumerate(module.named_parameters()):
        place, _, last = name.rpartition(".")
        owner = module
        for part in place.split(".") if place else ():
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        values = np.random.default_rng(i).normal(size=p.shape) / math.sqrt(p.shape[-1])
        setattr(owner, last, nn.Parameter(Tensor(values)))
    return module


def assert_adds_up(split, total):
    """Within 1e-12 of the gradient of an ordinary pass."""
    np.testing.assert_allclose(split.total, total, rtol=0, atol=1e-12)
    np.testing.assert_allclose(sum(p.numpy() for p in split.parts.values()), total, rtol=0, atol=1e-12)
    assert split.error <= 1e-12 and all(p.shape == split.total.shape for p in split.parts.values())
    assert sum(split.shares.values()) == pytest.approx(1, abs=1e-12)


# ---- each part is a run with the others detached


@pytest.mark.parametrize("path", ["scalar", "tensor", "fused"])
def test_q_k_v_and_the_residual_of_attention_are_runs_with_the_others_detached(path):
    attn, x = in_float64(nn.MultiHeadAttention(D, H)), leaf(B, T, D)
    away = x.detach()

    def loss_of(residual, *inputs):
        return ((residual + attn(*inputs, is_causal=True, path=path)) * C).sum()

    loss = loss_of(x, x, x, x)
    split = explain_grad(loss, x, ["q", "k", "v", "residual"])
    runs = {
        "q": loss_of(away, x, away, away),
        "k": loss_of(away, away, x, away),
        "v": loss_of(away, away, away, x),
        "residual": loss_of(x, away, away, away),
    }
    assert list(split.parts) == list(runs) and split.nested == ()
    for name, run in runs.items():
        np.testing.assert_allclose(split.parts[name], grad(run, x)[0], rtol=0, atol=1e-12, err_msg=name)
        assert split.norms[name] > 0.1
    assert_adds_up(split, grad(loss, x)[0])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_in_a_block_the_residual_is_all_that_goes_past_attention(norm):
    block, x = in_float64(nn.TransformerBlock(D, H, norm=norm)), leaf(B, T, D)

    def loss_of(q, k, v, residual):
        into = [block.norm1(t) if norm == "pre" else t for t in (q, k, v)]
        h = residual + block.attn(*into)
        h = h + block.feed(block.norm2(h)) if norm == "pre" else block.norm1(h)
        h = h if norm == "pre" else block.norm2(h + block.feed(h))
        return (h * C).sum()

    away = x.detach()
    split = explain_grad((block(x) * C).sum(), x, ["q", "k", "v", "residual"])
    for i, name in enumerate(["q", "k", "v", "residual"]):
        run = loss_of(*(x if i == j else away for j in range(4)))
        np.testing.assert_allclose(split.parts[name], grad(run, x)[0], rtol=0, atol=1e-12, err_msg=name)
    assert_adds_up(split, grad(loss_of(x, x, x, x), x)[0])


def test_a_shared_weight_is_split_by_the_tensors_that_it_makes():
    x, W = leaf(T, D), leaf(D, D, seed=2)

    def loss_of(W_Q, W_K, W_V):
        q, k, v = x @ W_Q, x @ W_K, x @ W_V
        return (F.scaled_dot_product_attention(q, k, v) * C[0]).sum(), {"Q": q, "K": k, "V": v}

    loss, cuts = loss_of(W, W, W)
    split = explain_grad(loss, W, cuts)
    for i, name in enumerate(cuts):
        run, _ = loss_of(*(W if i == j else W.detach() for j in range(3)))
        np.testing.assert_allclose(split.parts[name], grad(run, W)[0], rtol=0, atol=1e-12)
    assert list(split.parts) == ["Q", "K", "V"]  # nothing else is left
    assert_adds_up(split, grad(loss, W)[0])
    assert set(explain_grad(loss_of(W, W, W)[0], W, []).parts) == {"other"}


class Tied(nn.Module):
    """Tokens in and logits out by one matrix."""

    def __init__(self):
        self.embed = nn.Embedding(7, D)
        self.block = nn.TransformerBlock(D, H)

    def forward(self, ids, embed=None, head=None):
        x = F.embedding(self.embed.weight if embed is None else embed, ids)
        return self.block(x) @ (self.embed.weight if head is None else head).T


def test_a_tied_embedding_is_split_by_module_and_parameter_names():
    model, ids = in_float64(Tied()), np.array([[1, 2, 6, 1, 0]])
    loss, W = F.cross_entropy(model(ids), np.roll(ids, 1)), model.embed.weight
    split = explain_grad(loss, W, {"through the block": "block", "head": "other"})
    head = grad(F.cross_entropy(model(ids, embed=W.detach()), np.roll(ids, 1)), W)[0]
    body = grad(F.cross_entropy(model(ids, head=W.detach()), np.roll(ids, 1)), W)[0]
    deep = explain_grad(loss, W, ["block.attn.q", "K", "attn.V", "feed"])
    inner = sum(deep.parts[name].numpy() for name in ("block.attn.q", "K", "attn.V", "feed"))
    # x enters the block by its norm and by its residual: all of it but the head
    np.testing.assert_allclose(split.parts["head"], head, rtol=0, atol=1e-12)
    np.testing.assert_allclose(split.parts["through the block"], body, rtol=0, atol=1e-12)
    assert_adds_up(split, grad(loss, W, retain_graph=True)[0])
    assert_adds_up(deep, grad(loss, W)[0])
    assert list(deep.parts)[-1] == "other" and np.linalg.norm(inner) > 0.01
    assert deep.nested == (("block.attn.q", "feed"), ("K", "feed"), ("attn.V", "feed"))


# ---- paths that go through two


def test_a_path_through_two_counts_to_the_one_that_x_enters_first():
    x = leaf(3)
    a = x * 2
    b = a * 3 + x * 5  # x -> b directly, and x -> a -> b
    split = explain_grad((b * b + a).sum(), x, {"A": a, "B": b})
    g = 2 * b.numpy()
    np.testing.assert_allclose(split.parts["A"], g * 6 + 2, atol=1e-12)
    np.testing.assert_allclose(split.parts["B"], g * 5, atol=1e-12)
    assert split.nested == (("A", "B"),) and str(split).endswith("enters first: A then B")
    assert list(split.parts) == ["A", "B"]
    same = explain_grad((b * b + a).sum(), x, {"either": [a, b]})
    np.testing.assert_allclose(same.parts["either"], g * 11 + 2, atol=1e-12)
    assert same.nested == () and list(same.parts) == ["either"]
    c = b * 7 + a  # behind b and behind a: to be counted once all the same
    three = explain_grad(c.sum(), x, {"any": [a, b, c]})
    np.testing.assert_allclose(three.parts["any"], [7 * 11 + 2] * 3, atol=1e-12)


def test_in_a_stack_a_name_means_all_layers_and_a_longer_one_a_single_layer():
    stack, x = in_float64(nn.Sequential(nn.TransformerBlock(D, H), nn.TransformerBlock(D, H))), leaf(B, T, D)
    loss = (stack(x) * C).sum()
    first = explain_grad(loss, x, ["0.attn.q", "0.attn.k", "0.attn.v", "residual"])
    every = explain_grad(loss, x, ["q", "k", "v", "residual"])
    second = explain_grad(loss, x, ["1.attn.q", "1.attn.k", "1.attn.v", "residual"])
    assert first.nested == second.nested == ()
    assert ("q", "k") in every.nested and ("v", "q") in every.nested
    for split in (first, every, second):
        assert_adds_up(split, grad(loss, x, retain_graph=True)[0])
    # the first layer's own part is in both; what enters the second past the first comes on top of it
    into_second = explain_grad(loss, x, ["0.attn", "1.attn.v", "1.attn.q", "1.attn.k"])
    for name in "qkv":
        both = first.parts[f"0.attn.{name}"].numpy() + into_second.parts[f"1.attn.{name}"].numpy()
        np.testing.assert_allclose(every.parts[name], both, rtol=0, atol=1e-12)


def test_memory_enters_a_decoder_by_keys_and_values_alone():
    attn, memory, h = in_float64(nn.MultiHeadAttention(D, H)), leaf(B, 7, D, seed=3), leaf(B, T, D)
    once = attn(h, memory)
    assert explain_grad((once * C).sum(), memory, ["q", "k", "v"]).nested == ()
    split = explain_grad((attn(once, memory) * C).sum(), memory, ["q", "k", "v", "residual"])
    assert split.norms["residual"] == 0 and split.norms["k"] > 0.01 and split.norms["v"] > 0.01
    assert split.norms["q"] == 0 and set(split.nested) >= {("k", "q"), ("v", "q")}  # q of the second call, after k or v
    assert_adds_up(split, grad((attn(attn(h, memory), memory) * C).sum(), memory)[0])


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_against_all_their_paths_one_by_one(seed):
    """Each path's product of slopes goes to the first named tensor on it."""
    rng = np.random.default_rng(seed)
    tensors, edges = [leaf(1)], [[]]
    for i in range(1, 9):
        parents = rng.choice(i, size=min(i, 3) if i < 8 else 8, replace=False)  # the last one sees all
        slopes = rng.normal(size=len(parents))
        tensors.append(ops.stack([tensors[p] * w for p, w in zip(parents, slopes, strict=True)]).sum(0))
        edges.append(list(zip(parents, slopes, strict=True)))
    names = {int(i): str(rng.choice(["A", "B", "C"])) for i in rng.choice(np.arange(1, 9), size=5, replace=False)}
    expected, nested = {"A": 0.0, "B": 0.0, "C": 0.0, "other": 0.0}, set()
    ways = [(8, 1.0, [])]  # from the loss back: where it is, the product so far, the names met
    while ways:
        at, product, met = ways.pop()
        met = [names[at], *met] if at in names else met
        if at == 0:
            expected[met[0] if met else "other"] += product
            nested |= {(a, b) for i, a in enumerate(met) for b in met[i + 1 :] if a != b}
        ways += [(parent, product * slope, met) for parent, slope in edges[at]]
    paths = {name: [tensors[i] for i in names if names[i] == name] for name in "ABC"}
    split = explain_grad(tensors[-1].sum(), tensors[0], paths | {"other": "other"})
    assert {name: part.item() for name, part in split.parts.items()} == pytest.approx(expected, abs=1e-12)
    assert set(split.nested) == nested


# ---- names


def test_a_path_is_a_tensor_a_parameter_a_module_a_named_tensor_or_several():
    block, x = in_float64(nn.TransformerBlock(D, H)), leaf(B, T, D)
    h = block.norm1(x)
    h.name = "normed"
    y = block(x)
    loss = ((y + h) * C).sum()
    by = {what: explain_grad(loss, x, {"a": what}).parts["a"].numpy() for what in ("feed", "feed.up", "feed.up.weight")}
    np.testing.assert_allclose(by["feed"], by["feed.up"], atol=1e-12)  # one way in
    np.testing.assert_allclose(by["feed"], by["feed.up.weight"], atol=1e-12)  # W.T is met where x @ W.T is
    several = explain_grad(loss, x, {"a": ["W_Q", "attn.k"], "b": ("v",), "c": [h], "d": "norm2"})
    assert_adds_up(several, grad(loss, x, retain_graph=True)[0])
    tensor, name = (explain_grad(loss, x, {"a": what}).parts["a"] for what in (h, "normed"))
    np.testing.assert_array_equal(tensor, name)


def test_a_frozen_parameter_still_names_its_path_and_inner_tensors_are_explained_too():
    attn, x = in_float64(nn.MultiHeadAttention(D, H)), leaf(B, T, D)
    attn.W_Q.requires_grad = attn.W_K.requires_grad = attn.W_V.requires_grad = False
    inner = x * 2
    split = explain_grad((attn(inner) * C).sum(), inner, ["q", "k", "v"])
    assert_adds_up(split, grad((attn(inner) * C).sum(), inner)[0])
    assert list(split.parts) == ["q", "k", "v"] and min(split.norms.values()) > 0.01


def test_a_parameter_and_a_tensor_inside_of_a_module_can_be_x():
    attn, x = in_float64(nn.MultiHeadAttention(D, H)), leaf(B, T, D)
    attn.W_K = attn.W_Q
    output, record = attn(x, need=("v",))
    loss = (output * C).sum()
    assert list(explain_grad(loss, record.v, ["W_O"]).parts) == ["W_O"]
    tied = explain_grad(loss, attn.W_Q, ["W_Q", "v"])
    assert tied.shares == {"W_Q": 1, "v": 0}
    block = in_float64(nn.TransformerBlock(D, H))
    output, record = block(x, need=("v",))
    assert list(explain_grad((output * C).sum(), record.v, ["attn"]).parts) == ["attn"]


# ---- the graph stays, and so do the gradients


def test_nothing_changes_and_everything_can_be_used_again():
    attn, x = in_float64(nn.MultiHeadAttention(D, H)), leaf(B, T, D)
    with recording():
        loss = (attn(x) * C).sum()
    first = explain_grad(loss, x, ["q", "k", "v"])
    again = explain_grad(loss, x, ["q", "k", "v"])
    for name in first.parts:
        np.testing.assert_array_equal(first.parts[name], again.parts[name])
    assert x.grad is None and attn.W_Q.grad is None and not first.total.requires_grad
    loss.backward()
    np.testing.assert_array_equal(x.grad, first.total)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        explain_grad(loss, x, ["q"])
    np.testing.assert_array_equal(x.grad, first.total)


def test_a_loss_that_is_no_scalar_takes_its_gradient():
    x = leaf(3)
    a, g = x * 2, np.array([1.0, -1, 4])
    np.testing.assert_allclose(explain_grad(a + x, x, {"a": a}, gradient=g).parts["other"], g)
    with pytest.raises(ValueError, match="needs a scalar"):
        explain_grad(a + x, x, {"a": a})
    whole = explain_grad(a, x, {"rest": "residual", "a": a}, gradient=g)
    assert list(whole.parts) == ["rest", "a"]
    np.testing.assert_allclose(whole.parts["a"], 2 * g)
    assert not whole.parts["rest"].numpy().any()
    itself = explain_grad(a, a, [], gradient=g)
    np.testing.assert_array_equal(itself.parts["other"], g)


def test_float32_stays_float32():
    x = Tensor([1.0, 2.0], requires_grad=True)
    a = x.exp()
    split = explain_grad((a * x).sum(), x, {"exp": a, "nowhere": []})
    assert {part.dtype for part in (split.total, *split.parts.values())} == {np.dtype(np.float32)}


# ---- the table


def test_the_table_has_a_line_for_each_part_and_says_how_well_they_add_up():
    x = Tensor([3.0, 4.0], "float64", requires_grad=True)
    a, b = x * 3, x * -1
    split = explain_grad((a + b).sum(), x, {"A": a, "B": b, "C": "other"})
    assert split.shares == {"A": 1.5, "B": -0.5, "C": 0}
    assert split.alignments["A"] == pytest.approx(1) and split.alignments["B"] == pytest.approx(-1)
    assert math.isnan(split.alignments["C"])
    assert str(split).splitlines() == [
        "path        norm     share   cosine",
        "A          4.243    150.0%    1.000",
        "B          1.414    -50.0%   -1.000",
        "C              0      0.0%       --",
        "all        2.828    100.0%    1.000   parts add up within 0.0e+00",
    ]
    assert repr(split) == str(split)
    nothing = explain_grad((a * 0).sum(), x, {"A": a})
    assert "A              0        --       --" in str(nothing)


# ---- softmax


def test_the_two_halves_of_softmax_are_its_jacobian():
    scores = leaf(3, 5)
    weights = scores.softmax(-1)
    split = explain_softmax_grad((weights * weights * 3).sum(), scores, weights)
    A, dA = weights.numpy(), 6 * weights.numpy()
    np.testing.assert_allclose(split.parts["own element"], A * dA, atol=1e-14)
    np.testing.assert_allclose(split.parts["normalisation"], -A * (A * dA).sum(-1, keepdims=True), atol=1e-14)
    assert_adds_up(split, grad((scores.softmax(-1) ** 2 * 3).sum(), scores)[0])


def test_masked_scores_have_no_part_and_other_ways_are_told_apart():
    q, k, v = leaf(B, T, D), leaf(B, T, D, seed=2), leaf(B, T, D, seed=3)
    masks = {"is_causal": True, "lengths": [0, 4]}
    output, record = F.scaled_dot_product_attention(q, k, v, path="tensor", need=("scores", "weights"), **masks)
    split = explain_softmax_grad((output * C).sum(), record.scores, record.weights)
    assert not split.parts["own element"].numpy()[0].any() and not split.parts["normalisation"].numpy()[:, 0, 1:].any()
    assert_adds_up(split, grad((output * C).sum(), record.scores, retain_graph=True)[0])
    past = explain_softmax_grad((output * C).sum() + (record.scores[1, 3, :4]).sum(), record.scores, record.weights)
    np.testing.assert_array_equal(past.parts["other"].numpy()[1, 3], [1, 1, 1, 1, 0])
    np.testing.assert_array_equal(past.parts["own element"], split.parts["own element"])


def test_what_is_no_softmax_is_refused():
    scores = leaf(3, 5)
    for weights in (scores.softmax(0), scores.exp(), scores.sum(-1)):
        with pytest.raises(ValueError, match="softmax"):
            explain_softmax_grad(weights.square().sum(), scores, weights)


def test_scores_that_the_output_was_not_made_of_are_refused_with_the_way_out():
    q = leaf(B, T, D)
    output, record = F.scaled_dot_product_attention(q, q, q, path="fused", need=("scores", "weights"))
    with pytest.raises(ValueError, match=re.escape('with path="tensor" alone')):
        explain_softmax_grad(output.sum(), record.scores, record.weights)


# ---- what it refuses


def wrong_calls():
    x = leaf(3)
    x.name = "x"
    a = x * 2
    loss = (a + x).sum()
    with no_grad():
        unseen = x * 2
    W = leaf(3, 3)
    W.name = "attn.W_Q"
    named = (x @ W).sum()
    return [
        (loss, x, {"A": x * 2}, ValueError, "path 'A': this tensor of shape (3,) is not in the graph of the loss"),
        (loss, x, {"A": unseen}, ValueError, "not in the graph"),
        (loss, x, {"A": x}, ValueError, "path 'A' is x itself"),
        (loss, x, {"A": a, "B": a}, ValueError, "paths 'A' and 'B' both go through op 'mul' (3,)"),
        (loss, x, {"A": 3}, TypeError, "path 'A' is a tensor or a name, or a list of them; got int"),
        (loss, x, [a], TypeError, "a mapping from names to tensors"),
        (loss, x, a, TypeError, "a mapping from names to tensors"),
        (loss, x, ["other", "residual"], ValueError, "'other' and 'residual' both name all other paths"),
        (loss, leaf(3), {"A": a}, ValueError, "the loss does not depend on this tensor of shape (3,)"),
        (loss, Tensor([1.0]), {"A": a}, RuntimeError, "requires_grad=True"),
        (3.0, x, {"A": a}, TypeError, "needs a Tensor"),
        (named, x, ["K"], ValueError, "nothing in the graph is called 'W_K'; it has tensors attn.W_Q, x"),
    ]


@pytest.mark.parametrize("i", range(len(wrong_calls())))
def test_a_wrong_call_says_what_is_wrong(i):
    loss, x, paths, error, text = wrong_calls()[i]
    with pytest.raises(error, match=re.escape(text)):
        explain_grad(loss, x, paths)
    if isinstance(loss, Tensor):
        loss.backward()  # nothing is lost


def test_a_hook_on_the_way_is_refused_and_one_elsewhere_is_not():
    x = leaf(3)
    a = x * 2
    loss = (a * x + ops.exp(leaf(3, seed=2))).sum()
    handle = a.register_hook(lambda g: g * 0)
    with pytest.raises(RuntimeError, match=re.escape("a hook stands on op 'mul' of shape (3,)")):
        explain_grad(loss, x, {"A": a})
    handle.remove()
    a.retain_grad()
    assert list(explain_grad(loss, x, {"A": a}).parts) == ["A", "other"]
