"""The fused path of attention beside the tensor path: the same numbers, whatever the axes, masks, heads and dropout."""

import itertools
import tracemalloc

import numpy as np
import pytest

from tinygrad_qkv import Tensor, check_grad, grad, manual_seed, nn
from tinygrad_qkv.nn import functional as F

NAN = float("nan")
attention = F.scaled_dot_product_attention
BOUND = {"float32": 2e-6, "float64": 4e-15}  # of the largest |v| or gradient, as the docstring states
FIELDS = ("weights", "scores", "logsumexp")


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def on_both_paths(shapes, dtype, words, extra=()):
    """The output and the gradients of q, k, v and what else is learned, on either path."""
    results = []
    for path in ("tensor", "fused"):
        manual_seed(5)
        leaves = [Tensor(numbers(*s, seed=i), dtype, requires_grad=True) for i, s in enumerate(shapes)]
        learned = {word: Tensor(x, dtype, requires_grad=True) for word, x in extra}
        output = attention(*leaves, path=path, **words, **learned)
        g = numbers(*output.shape, seed=9).astype(dtype)
        output.backward(g)
        results.append([output.numpy(), *(x.grad.numpy() for x in (*leaves, *learned.values()))])
        assert (output._node.op == "attention" or output._node.parents[0].op == "attention") == (path == "fused")
    return results


def assert_close(results, dtype):
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=BOUND[dtype] * max(np.abs(one).max(initial=0), 1))


B, H, T, S = 2, 6, 13, 17
ATTEND = numbers(B, 1, T, S, seed=4) > -0.7
WORDS = {
    "attend": {"attend": ATTEND},
    "causal": {"is_causal": True},
    "window": {"window": 4},
    "causal window": {"window": 4, "is_causal": True},
    "positions": {"is_causal": True, "window": 9, "q_positions": np.array([[3], [5]]) + np.arange(T)},
    "lengths": {"lengths": [0, 11]},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.4},
    "dropout": {"dropout_p": 0.25},
}
EVERY = {name: value for words in WORDS.values() for name, value in words.items()}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("words", [*WORDS.values(), EVERY], ids=[*WORDS, "all"])
def test_both_paths_agree(words, dtype):
    """Shared heads, a bias and a sink with gradients are in every case."""
    extra = (("bias", numbers(H, 1, S, seed=7)), ("sink", numbers(H, seed=8)))
    shapes = (B, H, T, 5), (B, 2, S, 5), (B, 3, S, 7)
    assert_close(on_both_paths(shapes, dtype, words, extra), dtype)


@pytest.mark.parametrize(("T", "S"), [(100, 300), (256, 256)])
def test_both_paths_agree_over_many_tiles(T, S):
    shapes = (1, 2, T, 16), (1, 2, S, 16), (1, 2, S, 16)
    for words in ({"is_causal": True}, {"window": 40}, {"dropout_p": 0.5}):
        assert_close(on_both_paths(shapes, "float32", words), "float32")


@pytest.mark.parametrize(
    "leads",
    [
        ((), (), ()),
        ((3,), (), (3,)),
        ((3,), (1,), ()),
        ((2, 6), (6,), (2, 1)),
        ((6,), (2, 6), (2, 6)),
        ((3, 2, 4), (3, 2, 2), (2, 2)),
        ((3, 2, 4), (1, 2, 1), (3, 1, 4)),
        ((2, 3), (2, 3), (5, 2, 3)),
    ],
    ids=str,
)
def test_leading_axes(leads):
    shapes = [(*lead, n, d) for lead, (n, d) in zip(leads, ((T, 5), (S, 5), (S, 7)), strict=True)]
    lead = np.broadcast_shapes(*(x[:-1] for x in leads if x)) if any(leads) else ()
    for words in ({}, {"is_causal": True, "attend": numbers(T, S, seed=4) > -0.7}):
        assert_close(on_both_paths(shapes, "float64", words), "float64")
    if len(lead) == 1 and leads[0] == (2, 3):
        assert_close(on_both_paths(shapes, "float64", {"lengths": [4, 9]}), "float64")


def test_masks_with_every_leading_axis():
    shapes = (2, 3, 4, T, 5), (2, 3, 4, S, 5), (2, 3, 4, S, 5)
    for words in (
        {"lengths": [4, 9]},
        {"lengths": numbers(2, 3, 4).argsort(-1)},
        {"is_causal": True, "k_positions": np.arange(S) + np.arange(24).reshape(2, 3, 4, 1)},
        {"attend": numbers(3, 1, T, S) > 0},
    ):
        bias = (("bias", numbers(3, 1, T, 1)),)
        assert_close(on_both_paths(shapes, "float64", words, bias), "float64")
    shapes = (3, T, 5), (3, S, 5), (3, S, 5)
    assert_close(on_both_paths(shapes, "float64", {"lengths": [0, 4, 9], "attend": numbers(3, T, S) > 0}), "float64")
    assert_close(on_both_paths(shapes, "float64", {}, (("bias", numbers(3, 1, S)),)), "float64")


def test_window_and_softcap_and_sink_by_hand():
    weights = attention(np.zeros((4, 1)), np.zeros((4, 1)), np.eye(4), window=1, path="fused").numpy()
    np.testing.assert_allclose(weights[[0, 1]], [[1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0]], rtol=1e-6)
    for path in ("tensor", "fused"):
        words = {"path": path, "need": FIELDS}
        output, record = attention(np.zeros((4, 1)), np.zeros((3, 1)), np.ones((3, 2)), sink=0.0, **words)
        np.testing.assert_allclose(output, 3 / 4, rtol=1e-6)
        np.testing.assert_allclose(record.weights, 1 / 4, rtol=1e-6)
        np.testing.assert_allclose(record.logsumexp, np.log(4), rtol=1e-6)
        scores = attention([[10.0]], [[10.0], [1.0]], np.ones((2, 1)), scale=1, softcap=20, **words)[1].scores
        np.testing.assert_allclose(scores, [[20 * np.tanh(5), 20 * np.tanh(0.5)]], rtol=1e-6)


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_a_window_of_any_size(path):
    q = numbers(5, 3)
    np.testing.assert_array_equal(attention(q, q, q, window=10**30, path=path), attention(q, q, q, path=path))


def test_derivatives_of_every_order():
    sink, bias = numbers(2), numbers(2, 1, 5)
    q, k, v = numbers(2, 2, 3, 4), numbers(2, 1, 5, 4), numbers(2, 1, 5, 4)
    words = {"is_causal": True, "softcap": 2.0, "lengths": [4, 5], "path": "fused"}

    def f(q, k, v, bias, sink):
        return attention(q, k, v, bias=bias, sink=sink, **words)

    check_grad(f, q, k, v, bias, sink)

    def slope(*inputs):
        inputs = [x if x.requires_grad else Tensor(x.data, requires_grad=True) for x in inputs]
        return list(grad(f(*inputs).square().sum(), inputs, create_graph=True))

    check_grad(slope, q, k, v, bias, sink, directions=1)


def test_what_is_needed_does_not_change_one_bit():
    q, k, v = (numbers(2, 3, 150, 8, seed=i).astype("f4") for i in range(3))
    for words in ({}, {"is_causal": True}, {"dropout_p": 0.5, "window": 9}, {"sink": np.ones(3), "softcap": 3.0}):
        manual_seed(3)
        plain = attention(q, k, v, **words)
        manual_seed(3)
        output, record = attention(q, k, v, need=nn.AttentionRecord._fields, **words)
        assert plain.data.tobytes() == output.data.tobytes()
        if "dropout_p" not in words:
            np.testing.assert_allclose(record.weights.data @ v, output, atol=2e-6)


def test_sizes_and_the_rules_that_there_are_choose_the_path():
    """Where all sizes suffice, or with a causal mask alone; never the numbers, nor how many heads there are."""
    bare, keep = {}, {"attend": np.ones((1, 1), bool)}
    others = ({"lengths": [16, 9]}, {"softcap": 2.0}, {"dropout_p": 0.5}, {"sink": np.zeros(2)}, {"bias": np.zeros(1)})
    positions = {"is_causal": True, "q_positions": np.arange(16)}
    for t, s, words, is_fused in (
        (32, 32, keep, True),
        (31, 33, keep, False),
        (1, 1024, keep, True),
        (128, 31, keep, False),
        (16, 16, bare, True),
        (16, 16, {"is_causal": True}, True),
        (16, 16, {"window": 5}, True),
        (16, 16, keep, False),
        (16, 16, positions, False),
        *((16, 16, words, False) for words in others),
        (15, 17, bare, False),
        (128, 15, bare, False),
        (8, 8, bare, False),
    ):
        output = attention(*(Tensor(numbers(2, 2, n, 4), requires_grad=True) for n in (t, s, s)), **words)
        assert (output._node.op == "attention") == is_fused, (t, s, words)


def test_padding_with_nan_stays_on_the_fused_path_in_linear_memory():
    q, k, v = (Tensor(numbers(1, 1, 1024, 4, seed=i), "float32", requires_grad=True) for i in range(3))
    k.data[:, :, 700:], v.data[:, :, 700:] = NAN, np.inf
    words = {"lengths": [700], "is_causal": True, "path": "fused"}
    attention(q, k, v, **words).sum().backward()
    tracemalloc.start()
    output = attention(q, k, v, **words)
    output.sum().backward()
    assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    tracemalloc.stop()
    assert np.isfinite(output.data).all()
    for x in (q, k, v):
        assert np.isfinite(x.grad.data).all()
    assert (k.grad.data[:, :, 700:] == 0).all()


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"window": -1}, ValueError, "integer from 0"),
        ({"window": True}, ValueError, "integer from 0"),
        ({"softcap": 0}, ValueError, "positive"),
        ({"softcap": np.inf}, ValueError, "positive"),
        ({"scale": NAN}, ValueError, "finite"),
        ({"sink": np.ones(4)}, ValueError, r"shape \(3,\), got \(4,\)"),
    ],
)
def test_what_is_refused(words, error, text):
    with pytest.raises(error, match=text):
        attention(*(numbers(2, 3, 5, 4) for _ in range(3)), **words)


MASKS: tuple[dict, ...] = ({}, {"is_causal": True, "window": 5, "lengths": [9, 0, 40]})


def test_the_layer_on_either_path():
    manual_seed(0)
    layer = nn.MultiHeadAttention(32, 4, num_kv_heads=2)
    x = numbers(3, 40, 32).astype("f4")
    results = []
    for path, masks in itertools.product(("tensor", "fused"), MASKS):
        layer.zero_grad()
        output = layer(x, path=path, **masks)
        output.square().sum().backward()
        results.append([output.numpy(), *(p.grad.numpy().copy() for p in layer.parameters())])
    for tensor, fused in zip(results[:2], results[2:], strict=True):
        for one, other in zip(tensor, fused, strict=True):
            np.testing.assert_allclose(one, other, atol=4e-5 * max(1, np.abs(one).max()))
