"""Layers against cases solved by hand and formulas in float64: plain ones, attention modules, the Transformer block."""

import math

import numpy as np
import pytest

from tinygrad_qkv import Tensor, check_grad, grad, manual_seed, nn
from tinygrad_qkv.nn import functional as F

B, T, S, D, H = 2, 5, 7, 6, 3


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---- plain layers


def test_linear_by_hand():
    layer = nn.Linear(2, 3)
    layer.load_state_dict({"weight": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "bias": [0.5, 0.0, -0.5]})
    x = Tensor([[1.0, -1.0], [2.0, 0.0]], requires_grad=True)
    y = layer(x)
    np.testing.assert_array_equal(y, [[-0.5, -1.0, -1.5], [2.5, 6.0, 9.5]])
    y.sum().backward()
    np.testing.assert_array_equal(layer.weight.grad, [[3.0, -1.0]] * 3)
    np.testing.assert_array_equal(layer.bias.grad, [2.0, 2.0, 2.0])
    np.testing.assert_array_equal(x.grad, [[9.0, 12.0]] * 2)


def test_linear_keeps_leading_axes_and_refuses_other_widths():
    layer = nn.Linear(3, 5, bias=False)
    assert layer.bias is None and [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer(np.ones(3, np.float32)).shape == (5,)
    assert layer(np.ones((2, 7, 3), np.float32)).shape == (2, 7, 5)
    with pytest.raises(ValueError, match=r"x \(\.\.\., in\) = \(2, 5\) does not fit weight \(out, in\) = \(5, 3\)"):
        layer(np.ones((2, 5)))
    for wrong in ((3,), (1,), ()):  # the last two would broadcast
        with pytest.raises(ValueError, match=r"bias \(.*\) does not fit weight \(out, in\) = \(5, 3\)"):
            F.linear(np.ones((2, 3)), np.ones((5, 3)), np.ones(wrong))
    with pytest.raises(ValueError, match="out_features is a size"):
        nn.Linear(3, 2.5)


def test_linear_starts_within_the_bound():
    layer = nn.Linear(100, 50)
    for p in layer.parameters():
        assert 0.09 < np.abs(p.data).max() <= 0.1 and abs(p.data.mean()) < 0.02


def test_embedding_counts_repeated_ids():
    table = nn.Embedding(5, 2)
    ids = np.array([[0, 3, 3], [3, 0, 4]])
    y = table(ids)
    np.testing.assert_array_equal(y, table.weight.data[ids])
    y.sum().backward()
    np.testing.assert_array_equal(table.weight.grad.data[:, 0], [2, 0, 0, 3, 1])
    for bad in ([5], [-1]):
        with pytest.raises(IndexError, match="ids from 0 to 4"):
            table(np.array(bad))


def test_layer_norm_by_hand():
    norm = nn.LayerNorm(4, eps=0.0)
    norm.load_state_dict({"weight": [1.0, 2.0, 1.0, 1.0], "bias": [0.0, 0.0, 10.0, 0.0]})
    third = 1 / math.sqrt(5)
    np.testing.assert_allclose(
        norm([[1.0, 2.0, 3.0, 4.0]]), [[-3 * third, -2 * third, 10 + third, 3 * third]], rtol=1e-6
    )
    np.testing.assert_allclose(nn.LayerNorm(4)([[40000.0, 40001, 40002, 40003]]).data[0, 3], 3 * third, rtol=1e-5)
    np.testing.assert_array_equal(nn.LayerNorm(3)(np.full((2, 3), 1234, np.float32)), np.zeros((2, 3)))
    check_grad(lambda x, w, b: F.layer_norm(x, w, b), numbers(2, 5), numbers(5), numbers(5))


def test_rms_norm_by_hand():
    norm = nn.RMSNorm(4, eps=0.0)
    norm.load_state_dict({"weight": [1.0, 2.0, 1.0, 10.0]})
    root = math.sqrt(7.5)
    np.testing.assert_allclose(norm([[1.0, 2.0, 3.0, 4.0]]), [[1 / root, 4 / root, 3 / root, 40 / root]], rtol=1e-6)
    np.testing.assert_array_equal(nn.RMSNorm(3)(np.zeros((2, 3), np.float32)), np.zeros((2, 3)))
    check_grad(lambda x, w: F.rms_norm(x, w), numbers(2, 5), numbers(5))


def test_dropout_in_training_and_in_evaluation():
    layer, x = nn.Dropout(0.25), Tensor(np.ones((8, 64), np.float32), requires_grad=True)
    y = layer(x)
    assert set(np.unique(y.data)) == {0, np.float32(4 / 3)} and 0.65 < (y.data > 0).mean() < 0.85
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y)
    assert (layer(x).data != y.data).any()
    np.testing.assert_array_equal(layer.eval()(x), x)
    np.testing.assert_array_equal(nn.Dropout(0.0)(x), x)
    assert not nn.Dropout(1.0)(x).data.any()
    for p in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="probability"):
            nn.Dropout(p)
        with pytest.raises(ValueError, match="probability"):
            F.dropout(x, p, training=False)


def test_dropout_repeats_with_its_seed():
    x = np.ones(100, np.float32)
    masks = []
    for _ in range(2):
        manual_seed(3)
        masks.append(nn.Dropout(0.5)(x).data)
    own = [nn.Dropout(0.5, np.random.default_rng(5))(x).data for _ in range(2)]
    assert (masks[0] == masks[1]).all() and (own[0] == own[1]).all() and (own[0] != masks[0]).any()


def test_activations_and_containers():
    x = Tensor(numbers(3, 5))
    for layer, function in (
        (nn.ReLU(), F.relu),
        (nn.GELU(), F.gelu),
        (nn.GELU("tanh"), lambda x: F.gelu(x, "tanh")),
        (nn.SiLU(), F.silu),
        (nn.Tanh(), F.tanh),
        (nn.Sigmoid(), F.sigmoid),
    ):
        np.testing.assert_array_equal(layer(x), function(x))
    steps = nn.Sequential(nn.Linear(5, 2), F.relu, nn.Linear(2, 3))
    steps.append(nn.Tanh())
    y = x.astype("float32")
    for step in steps:
        y = step(y)
    np.testing.assert_array_equal(steps(x.astype("float32")), y)
    assert len(steps) == 4 and isinstance(steps[:2], nn.Sequential) and steps[-1] is list(steps)[3]
    assert len(list(steps[1:].parameters())) == 2
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert len(layers[1:]) == 2 and layers[1:][0] is layers[1]
    for bad in (nn.ReLU, 3):
        with pytest.raises(TypeError, match="a module or a function"):
            nn.Sequential(bad)
    with pytest.raises(TypeError, match="holds modules"):
        nn.ModuleList([F.relu])


def test_feed_forward_by_hand():
    feed = nn.FeedForward(1, 2)
    feed.load_state_dict(
        {"up.weight": [[1.0], [-2.0]], "up.bias": [0.0, 1.0], "down.weight": [[3.0, 5.0]], "down.bias": [7.0]}
    )
    np.testing.assert_array_equal(feed([[2.0], [-1.0]]), [[13.0], [22.0]])
    assert nn.FeedForward(3).up.weight.shape == (12, 3)
    with pytest.raises(ValueError, match="relu, gelu, gelu_tanh, silu"):
        nn.FeedForward(3, activation="swish")


# ---- projections and multi-head attention


def mha64(m, query, key, value, keep=None):
    """Multi-head attention head by head, from the columns of each matrix."""
    p = {name: np.asarray(t, np.float64) for name, t in m.named_parameters()}
    heads = []
    for h in range(m.num_heads):
        g = h // (m.num_heads // m.num_kv_heads)
        q_columns, k_columns, v_columns = (slice(i * n, (i + 1) * n) for i, n in ((h, m.d_k), (g, m.d_k), (g, m.d_v)))
        q = query @ p["W_Q"][:, q_columns] + (p["b_Q"][q_columns] if "b_Q" in p else 0)
        k = key @ p["W_K"][:, k_columns] + (p["b_K"][k_columns] if "b_K" in p else 0)
        v = value @ p["W_V"][:, v_columns] + (p["b_V"][v_columns] if "b_V" in p else 0)
        scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(m.d_k)
        heads.append(softmax(scores if keep is None else np.where(keep, scores, -np.inf)) @ v)
    return np.concatenate(heads, -1) @ p["W_O"] + p.get("b_O", 0)


def filled(module):
    """The module in float64 with every parameter drawn anew, biases too."""
    module.astype("float64")
    for i, p in enumerate(module.parameters()):
        p.data = numbers(*p.shape, seed=i)
    return module


def test_projections_are_x_times_w():
    projection = filled(nn.QKVProjection(D, 4, 5, kdim=3, vdim=2))
    x, key, value = numbers(B, T, D), numbers(B, S, 3), numbers(B, S, 2)
    q, k, v = projection(x, key, value)
    W = {name: t.data for name, t in projection.named_parameters()}
    np.testing.assert_allclose(q, x @ W["W_Q"] + W["b_Q"], rtol=1e-12)
    np.testing.assert_allclose(k, key @ W["W_K"] + W["b_K"], rtol=1e-12)
    np.testing.assert_allclose(v, value @ W["W_V"] + W["b_V"], rtol=1e-12)
    assert W["W_Q"].shape == (D, 4) and W["W_K"].shape == (3, 4) and W["W_V"].shape == (2, 5)
    plain = nn.QKVProjection(D, 4, bias=False)
    assert [name for name, _ in plain.named_parameters()] == ["W_Q", "W_K", "W_V"]
    assert all(t.shape == (T, 4) for t in plain(np.ones((T, D), np.float32)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias": False},
        {"d_k": 5},
        {"d_k": 4, "d_v": 7},
        {"num_kv_heads": 1},
        {"kdim": 5, "vdim": 7, "d_v": 1},
    ],
    ids=str,
)
def test_multi_head_attention_head_by_head(settings):
    m = filled(nn.MultiHeadAttention(D, H, **settings))
    assert m.W_O.shape == (H * m.d_v, D)
    query, key, value = numbers(B, T, D), numbers(B, S, m.kdim), numbers(B, S, m.vdim)
    keep = np.tri(T, S, S - T) > 0
    np.testing.assert_allclose(m(query, key, value), mha64(m, query, key, value), rtol=1e-10, atol=1e-12)
    output, record = m(query, key, value, is_causal=True, need=("weights", "q", "k", "v"))
    np.testing.assert_allclose(output, mha64(m, query, key, value, keep), rtol=1e-10, atol=1e-12)
    assert record.weights.shape == (B, H, T, S) and record.q.shape == (B, H, T, m.d_k)
    assert record.k.shape == (B, m.num_kv_heads, S, m.d_k) and record.v.shape == (B, m.num_kv_heads, S, m.d_v)
    lone, lone_record = m(query[0], key[0], value[0], is_causal=True, need=("weights",))
    np.testing.assert_allclose(lone, output.data[0], rtol=1e-12)
    np.testing.assert_allclose(lone_record.weights, record.weights.data[0], rtol=1e-12)
    names = list(dict(m.named_parameters()))

    def loss(*parameters):
        for name, p in zip(names, parameters, strict=True):
            setattr(m, name, p)
        return m(query, key, value, is_causal=True)

    check_grad(loss, *(getattr(m, name) for name in names))


def test_defaults_of_key_and_value():
    m = filled(nn.MultiHeadAttention(D, H))
    x, other = numbers(B, T, D), numbers(B, S, D)
    np.testing.assert_array_equal(m(x), m(x, x, x))
    np.testing.assert_array_equal(m(x, other), m(x, other, other))
    with pytest.raises(ValueError, match="value= without key="):
        m(x, value=other)


def test_gradients_of_the_projections_are_the_hand_formulas():
    """One head, no biases, loss = sum(G * output): dW_V = X^T A^T G, dW_Q = X^T dS K, dW_K = X^T dS^T Q."""
    m = filled(nn.MultiHeadAttention(D, 1, d_k=3, d_v=D, bias=False))
    m.W_O.data = np.eye(D)
    x, G = numbers(T, D, seed=8), numbers(T, D, seed=9)
    output, r = m(x, need=("weights", "q", "k", "v"))
    (output * G).sum().backward()
    A, q, k, v = (np.asarray(t)[0] for t in (r.weights, r.q, r.k, r.v))
    dA = G @ v.T
    dS = A * (dA - (dA * A).sum(-1, keepdims=True)) / math.sqrt(3)
    np.testing.assert_allclose(m.W_V.grad, x.T @ A.T @ G, rtol=1e-10)
    np.testing.assert_allclose(m.W_Q.grad, x.T @ dS @ k, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(m.W_K.grad, x.T @ dS.T @ q, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(m.W_O.grad, (A @ v).T @ G, rtol=1e-10)


def test_nan_in_padded_inputs_reaches_no_output_and_no_parameter():
    m = filled(nn.MultiHeadAttention(D, H))
    results = []
    for padding in (0.0, math.nan):
        key = numbers(B, S, D)
        key[0, 3:] = key[1, 5:] = padding
        m.zero_grad()
        output = m(numbers(B, T, D, seed=1), key, lengths=[3, 5])
        output.square().sum().backward()
        results.append([output.data, *(p.grad.data for p in m.parameters())])
    for clean, spoiled in zip(*results, strict=True):
        np.testing.assert_allclose(spoiled, clean, rtol=1e-12, atol=1e-12)
    lone = m(numbers(B, T, D, seed=1)[0], key[0], lengths=3)  # key is spoiled, here without a batch axis
    np.testing.assert_allclose(lone, results[0][0][0], rtol=1e-12, atol=1e-12)
    m(numbers(T, D), key[0], attend=np.ones((1, H, T, S), bool), lengths=3).sum().backward()
    assert all(np.isfinite(p.grad.data).all() for p in m.parameters())


def test_dropout_of_weights_only_in_training():
    m, x = nn.MultiHeadAttention(D, H, dropout=0.5), np.ones((B, T, D), np.float32)
    assert (m(x).data != m(x).data).any()
    m.eval()
    np.testing.assert_array_equal(m(x), m(x))


def test_matrices_start_xavier_uniform_each_for_itself():
    m = nn.MultiHeadAttention(64, 4, kdim=16)
    for W in (m.W_Q, m.W_K, m.W_V, m.W_O):
        bound = math.sqrt(6 / sum(W.shape))
        assert 0.97 * bound < np.abs(W.data).max() <= bound
    assert not any(b.data.any() for b in (m.b_Q, m.b_K, m.b_V, m.b_O))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.MultiHeadAttention(5, 2), "d_model=5 does not divide into num_heads=2"),
        (lambda: nn.MultiHeadAttention(4, 0), "num_heads=0"),
        (lambda: nn.MultiHeadAttention(6, 3, num_kv_heads=2), "num_heads=3 query heads .* num_kv_heads=2"),
        (lambda: nn.MultiHeadAttention(6, 3, dropout=2.0), "probability"),
        (lambda: nn.MultiHeadAttention(6, 3)(np.ones((2, 5))), r"query .* d_model = 6, got \(2, 5\)"),
        (lambda: nn.MultiHeadAttention(6, 3)(np.ones((5, 6)), np.ones((2, 5, 6))), "same number of axes"),
        (lambda: nn.MultiHeadAttention(6, 3)(*(np.ones((1, n, 6)) for n in (3, 4, 5))), "key and value the same S"),
    ],
)
def test_what_attention_modules_refuse(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_unknown_keywords_of_the_module():
    m, x = nn.MultiHeadAttention(6, 3), np.ones((1, 2, 6), np.float32)
    for words, text in (({"attn_mask": np.ones((2, 2), bool)}, "attend="), ({"scale": 1.0}, "k_positions, path, need")):
        with pytest.raises(TypeError, match=text):
            m(x, **words)


# ---- Transformer


def test_a_block_is_its_parts():
    x = numbers(B, T, D)
    for norm in ("pre", "post"):
        block = filled(nn.TransformerBlock(D, H, 7, norm=norm))
        if norm == "pre":
            middle = x + block.attn(block.norm1(Tensor(x)), is_causal=True)
            expected = middle + block.feed(block.norm2(middle))
        else:
            middle = block.norm1(x + block.attn(x, is_causal=True))
            expected = block.norm2(middle + block.feed(middle))
        output, record = block(x, is_causal=True, need=("weights",))
        np.testing.assert_allclose(output, expected, rtol=1e-12)
        assert record.weights.shape == (B, H, T, T)
        check_grad(lambda x, block=block: block(x, is_causal=True), x)
    with pytest.raises(ValueError, match="'pre' or 'post'"):
        nn.TransformerBlock(D, H, norm="both")


def test_a_causal_block_does_not_look_ahead():
    block, x = filled(nn.TransformerBlock(D, H, 7)), Tensor(numbers(1, T, D), requires_grad=True)
    (g,) = grad(block(x, is_causal=True)[0, 2].sum(), x)
    assert (g.data[0, :3] != 0).all() and not g.data[0, 3:].any()


def test_dropout_of_a_block():
    block, x = nn.TransformerBlock(D, H, dropout=0.5), numbers(B, T, D).astype(np.float32)
    assert (block(x).data != block(x).data).any()
    block.eval()
    np.testing.assert_array_equal(block(x), block(x))


def test_a_block_drops_in_four_places():
    """With p = 1 each place is told apart by what is left: biases, which are not 0."""
    block, x = filled(nn.TransformerBlock(D, H, 7, dropout=1.0)), numbers(B, T, D)
    np.testing.assert_array_equal(block(x), x)  # both parts' results
    np.testing.assert_array_equal(block.attn(x), np.broadcast_to(block.attn.b_O, x.shape))  # the weights
    np.testing.assert_array_equal(block.feed(x), np.broadcast_to(block.feed.down.bias, x.shape))  # the hidden layer


def test_sinusoidal_positions_by_hand():
    positions = nn.SinusoidalPositions(4)
    x = Tensor(np.ones((2, 3, 4), np.float32), requires_grad=True)
    y = positions(x)
    waves = [[math.sin(t), math.cos(t), math.sin(t / 100), math.cos(t / 100)] for t in range(3)]
    np.testing.assert_allclose(y, 1 + np.array([waves, waves]), rtol=1e-6)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(positions(x[:, 2:], offset=2), y[:, 2:])
    assert nn.SinusoidalPositions(5)(np.zeros((2, 5))).shape == (2, 5) and not positions.state_dict()
    with pytest.raises(ValueError, match="d_model = 4"):
        positions(np.ones((3, 5)))
