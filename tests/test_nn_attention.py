"""Attention against a loop in float64: masks and their combinations, rows without a key, NaN behind masks, records."""

import functools
import itertools
import math

import numpy as np
import pytest

from tinygrad_qkv import Tensor, check_grad, grad, manual_seed, nn, ops
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.ops.masked_products import masked_mix, masked_scores

B, H, T, S, D_K, D_V = 2, 3, 5, 7, 4, 6
NAN, INF = math.nan, math.inf
attention = F.scaled_dot_product_attention


@pytest.fixture(autouse=True, params=["tensor", "fused"])
def path(request, monkeypatch):
    """Every test runs on both paths."""
    on_path = functools.partial(F.scaled_dot_product_attention, path=request.param)
    monkeypatch.setitem(globals(), "attention", on_path)
    return request.param


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def qkv(lead=(B, H), t=T, s=S):
    return numbers(*lead, t, D_K, seed=1), numbers(*lead, s, D_K, seed=2), numbers(*lead, s, D_V, seed=3)


def reference(q, k, v, keep, bias, scale):
    """The definition, one query at a time: only the keys that it may look at exist for it."""
    output, weights = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros((*q.shape[:-1], k.shape[-2]))
    for place in np.ndindex(q.shape[:-1]):
        lead, seen = place[:-1], np.flatnonzero(keep[place])
        if len(seen):
            scores = np.array([q[place] @ k[lead][j] * scale + bias[place][j] for j in seen])
            e = np.exp(scores - scores.max())
            weights[place][seen] = e / e.sum()
            output[place] = sum(weights[place][j] * v[lead][j] for j in seen)
    return output, weights


MASKS = {
    "attend": lambda lead, t, s: numbers(*lead, t, s, seed=4) > -0.3,
    "ignore": lambda lead, t, s: numbers(t, s, seed=5) > 0.9,
    "bias": lambda lead, t, s: np.where(numbers(t, s, seed=6) > 1.0, -INF, numbers(t, s, seed=7)),
    "lengths": lambda lead, t, s: np.arange(lead[0]) * 3 % (s + 1) if lead else np.array(s // 2),
    "is_causal": lambda lead, t, s: True,
}


def meaning(words, lead, t, s):
    """keep and bias of the mask words, from their definitions."""
    shape = (*lead, t, s)
    keep, bias = np.ones(shape, bool), np.zeros(shape)
    if "attend" in words:
        keep &= words["attend"]
    if "ignore" in words:
        keep &= ~words["ignore"]
    if "bias" in words:
        keep &= words["bias"] > -INF
        bias = bias + np.where(words["bias"] > -INF, words["bias"], 0)
    for place in np.ndindex(shape):
        if "lengths" in words and place[-1] >= (words["lengths"][place[0]] if lead else words["lengths"]):
            keep[place] = False
        if "is_causal" in words and place[-2] + s - t < place[-1]:
            keep[place] = False
    return keep, bias


@pytest.mark.parametrize("words", [w for n in range(6) for w in itertools.combinations(MASKS, n)], ids="+".join)
def test_masks_and_all_their_combinations(words):
    for lead, t, s in (((B, H), T, S), ((B,), 7, 5), ((), 3, 2), ((3, 2, 2), 1, 3)):
        q, k, v = qkv(lead, t, s)
        masks = {word: MASKS[word](lead, t, s) for word in words}
        keep, bias = meaning(masks, lead, t, s)
        output, record = attention(q, k, v, **masks, need=("weights", "scores", "logsumexp"))
        expected, weights = reference(q, k, v, keep, bias, D_K**-0.5)
        np.testing.assert_allclose(output, expected, atol=1e-13)
        np.testing.assert_allclose(record.weights, weights, atol=1e-14)
        np.testing.assert_array_equal(np.isneginf(record.scores.data), ~keep)
        logsumexp = np.where(keep.any(-1), record.logsumexp.data, 0)
        np.testing.assert_array_equal(np.isneginf(record.logsumexp.data), ~keep.any(-1))
        np.testing.assert_allclose(np.exp(record.scores.data - logsumexp[..., None]), weights, atol=1e-14)


@pytest.mark.parametrize("words", [(), *((w,) for w in MASKS), tuple(MASKS)], ids="+".join)
def test_gradients(words):
    masks = {word: MASKS[word]((B, H), T, S) for word in words}
    check_grad(lambda q, k, v: attention(q, k, v, **masks, scale=0.7), *qkv())
    _, k, v = qkv()
    check_grad(lambda q: grad(attention(q, k, v, **masks).square().sum(), q, create_graph=True)[0], qkv()[0])


def test_a_bias_gets_its_gradient_and_none_at_minus_infinity():
    q, k, v = qkv()
    check_grad(lambda bias: attention(q, k, v, bias=bias, is_causal=True), numbers(H, 1, S))
    bias = Tensor(np.where(np.arange(S) == 2, -INF, 0.5), requires_grad=True)
    attention(q, k, v, bias=bias).square().sum().backward()
    assert bias.grad.data[2] == 0 and np.isfinite(bias.grad.data).all() and (bias.grad.data[3:] != 0).all()
    assert np.isnan(attention(q, k, v, bias=np.where(np.arange(S) == 2, INF, 0)).data).all()  # no mask, but a mistake


def test_integers_and_float32_keep_to_float32():
    q, k, v = (x.astype(np.float32) for x in qkv())
    masks = {"bias": numbers(T, S), "is_causal": True, "scale": np.float64(0.3)}
    output, record = attention(q, k, v, **masks, need=("weights", "scores", "logsumexp"))
    assert {output.dtype, record.weights.dtype, record.scores.dtype, record.logsumexp.dtype} == {np.dtype("f4")}
    assert attention(np.ones((2, 3), int), np.ones((5, 3), int), np.ones((5, 4), int)).dtype == np.float32
    assert attention(q, k, v.astype(np.float64)).dtype == np.float64
    with pytest.raises(TypeError, match="float16"):
        attention(q.astype(np.float16), k, v)


# ---- causality on positions


def test_by_default_the_last_query_sees_the_last_key():
    weights = attention(*qkv((), 3, 5), is_causal=True, need=("weights",))[1].weights
    np.testing.assert_array_equal(np.asarray(weights) > 0, np.tri(3, 5, 2) > 0)
    weights = attention(*qkv((), 5, 3), is_causal=True, need=("weights",))[1].weights
    np.testing.assert_array_equal(np.asarray(weights) > 0, np.tri(5, 3, -2) > 0)


def test_positions_of_each_sequence():
    q, k, v = qkv()
    starts = np.array([0, 4])
    positions = starts[:, None] + np.arange(T)
    keep = positions[:, None, :, None] >= np.arange(S)
    marked = attention(q, k, v, attend=keep)
    np.testing.assert_array_equal(attention(q, k, v, is_causal=True, q_positions=positions), marked)
    shifted = attention(q, k, v, is_causal=True, q_positions=positions + 9, k_positions=np.arange(S) + 9)
    np.testing.assert_array_equal(shifted, marked)
    shifted = attention(q, k, v, is_causal=True, k_positions=np.arange(S) + 30)
    plain = attention(q, k, v, is_causal=True)  # without positions the fused path has a kernel for few keys
    np.testing.assert_allclose(shifted, plain, rtol=0, atol=1e-14)


def test_decoding_one_position_at_a_time_equals_the_whole():
    q, k, v = qkv((B, H), S, S)
    whole = np.asarray(attention(q, k, v, is_causal=True))
    for n in range(1, S + 1):
        one = attention(q[..., n - 1 : n, :], k[..., :n, :], v[..., :n, :], is_causal=True)
        np.testing.assert_allclose(one, whole[..., n - 1 : n, :], atol=1e-14)


# ---- rows without a key


def test_a_row_without_a_key_gives_zeros_and_zero_gradients():
    q, k, v = (Tensor(x, requires_grad=True) for x in qkv())
    output, record = attention(q, k, v, lengths=[0, S], need=("weights", "logsumexp"))
    assert (output.data[0] == 0).all() and (record.weights.data[0] == 0).all()
    output.sum().backward()
    for x in (q, k, v):
        assert (x.grad.data[0] == 0).all() and np.isfinite(x.grad.data).all()
    assert (v.grad.data[1] != 0).all()


def test_an_infinite_gradient_of_a_row_without_a_key_goes_nowhere():
    q, k, v = (Tensor(np.abs(x), requires_grad=True) for x in qkv())
    attend = np.arange(T) > 1
    attention(q, k, v, attend=attend[:, None]).sqrt().sum().backward()  # the root's slope at 0 is infinite
    for x in (q, k, v):
        assert np.isfinite(x.grad.data).all()


def test_no_keys_and_no_queries_at_all():
    q, k, v = qkv((B, H), T, 0)
    for masks in ({}, {"is_causal": True}, {"lengths": [0, 0]}):
        output = attention(Tensor(q, requires_grad=True), k, v, **masks)
        np.testing.assert_array_equal(output, np.zeros((B, H, T, D_V)))
        output.sum().backward()
    assert attention(*qkv((B, H), 0, S), is_causal=True).shape == (B, H, 0, D_V)
    assert attention(*qkv((0, H), T, S), lengths=np.zeros(0, int)).shape == (0, H, T, D_V)


# ---- NaN and inf behind a mask


@pytest.mark.parametrize("seed", range(60))
def test_what_a_mask_hides_might_as_well_not_be_there(seed):
    """Random masks, NaN and inf at random places: values and gradients are those of a call on the seen keys alone."""
    random = np.random.default_rng(seed)
    t, s, d_k, d_v = random.integers(1, 6, 4)
    arrays = [random.normal(size=shape) for shape in ((t, d_k), (s, d_k), (s, d_v))]
    for x in arrays:
        for _ in range(random.integers(0, 3)):
            x[tuple(random.integers(0, n) for n in x.shape)] = random.choice([NAN, INF, -INF])
    keep, G = random.random((t, s)) < random.choice([0.3, 0.6, 0.9]), random.normal(size=(t, d_v))

    def seen_alone(q, k, v):
        rows = [attention(q[i : i + 1], k[keep[i]], v[keep[i]]) for i in range(t)]
        return ops.cat(rows, 0)

    results = []
    for f in (lambda *x: attention(*x, attend=keep), seen_alone):
        leaves = [Tensor(x, requires_grad=True) for x in arrays]
        output = f(*leaves)
        output.backward(G)
        results.append([output.data, *(x.grad.data for x in leaves)])
    for got, expected in zip(*results, strict=True):
        clean = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(got), clean)
        np.testing.assert_allclose(got[clean], expected[clean], atol=1e-12)


def test_padding_may_hold_anything():
    q, k, v = qkv()
    k[0, :, 3:], v[0, :, 3:], k[1, :, 5:], v[1, :, 5:] = NAN, INF, -INF, NAN
    results = []
    for spoiled in (True, False):
        leaves = [Tensor(x if spoiled else np.nan_to_num(x, posinf=0, neginf=0), requires_grad=True) for x in (q, k, v)]
        output = attention(*leaves, lengths=[3, 5])
        output.square().sum().backward()
        results.append([output.data, *(x.grad.data for x in leaves)])
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-13)


def test_one_mask_with_nan_reaches_only_the_queries_that_may_see_it():
    keep = np.tri(T, S, S - T) > 0
    q, k, v = (Tensor(x, requires_grad=True) for x in qkv())
    k.data[1, 0, 4] = NAN  # keys 4 and 5 are seen by the queries from 2 and 3 on
    v.data[1, 0, 5, 2] = INF
    output, record = attention(q, k, v, attend=keep, need=("weights",))
    fine = np.isfinite(output.data)
    assert fine[0].all() and fine[1, 1:].all()
    np.testing.assert_array_equal(fine[1, 0].all(-1), [True, True, False, False, False])
    assert (record.weights.data[~np.broadcast_to(keep, record.weights.shape)] == 0).all()
    output.square().sum().backward()  # the gradient of the spoiled rows is NaN too
    for x in (q, k, v):
        assert np.isfinite(x.grad.data[0]).all() and np.isfinite(x.grad.data[1, 1:]).all()
    assert np.isfinite(q.grad.data[1, 0, :2]).all() and np.isnan(q.grad.data[1, 0, 2:]).any(-1).all()


def test_a_finite_number_behind_a_mask_contributes_exactly_nothing():
    v = np.array([[1.0, 2.0], [1e6, -1e6], [3.0, 4.0]])
    output = attention(np.zeros((1, 2)), np.zeros((3, 2)), v, attend=[True, False, True])
    np.testing.assert_array_equal(output, [[2.0, 3.0]])


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_an_infinite_product_behind_a_mask_and_a_soft_cap_goes_nowhere(path):
    """The cap makes its score finite, but in the products of the gradient it would still meet weights of 0."""
    q, k, v = ([[INF], [1.0]], [[1.0], [2.0], [-INF]], np.ones((3, 1)))  # the first query sees nothing, nobody the last
    q, k, v = (Tensor(x, requires_grad=True) for x in (q, k, v))
    attention(q, k, v, attend=[[False] * 3, [True, True, False]], softcap=3, path=path).sum().backward()
    for x in (q, k, v):
        assert np.isfinite(x.grad.data).all()


def test_a_nan_bias_behind_a_mask_goes_nowhere():
    q, k, v = qkv()
    bias = Tensor(np.where(np.arange(S) == 4, NAN, 0.5), requires_grad=True)
    output = attention(q, k, v, bias=bias, ignore=np.arange(S) == 4)
    np.testing.assert_allclose(output, attention(q, k, v, ignore=np.arange(S) == 4), atol=1e-14)
    output.sum().backward()
    assert np.isfinite(bias.grad.data).all()


def test_the_masked_products_and_their_derivatives():
    keep = numbers(3, T, S) > 0
    q, k, w, x = numbers(2, 1, T, D_K), numbers(3, S, D_K), numbers(3, T, S), numbers(2, 1, S, D_V)
    np.testing.assert_allclose(masked_scores(q, k, keep), np.where(keep, q @ np.swapaxes(k, -1, -2), 0), atol=1e-14)
    np.testing.assert_allclose(masked_mix(w, x, keep), np.where(keep, w, 0) @ x, atol=1e-14)
    check_grad(lambda q, k: masked_scores(q, k, keep), q, k)
    check_grad(lambda w, x: masked_mix(w, x, keep), w, x)

    def second(a, b):
        return grad(
            (masked_mix(masked_scores(a, b, keep), a[..., :1, :] * x, keep) ** 2).sum(), (a, b), create_graph=True
        )

    a, b, x = numbers(3, T, D_K), numbers(3, S, D_K), numbers(S, D_K)
    check_grad(lambda a, b: list(second(a, b)), a, b)


def test_derivatives_of_any_order_are_clean():
    q, k, v = (Tensor(x, requires_grad=True) for x in qkv())
    k.data[:, :, 6] = NAN
    (g,) = grad(attention(q, k, v, lengths=[3, 6]).square().sum(), q, create_graph=True)
    (second,) = grad(g.square().sum(), v)
    assert np.isfinite(g.data).all() and np.isfinite(second.data).all()


# ---- heads


def test_neighbouring_heads_share_keys_and_values():
    q, k, v = numbers(B, 6, T, D_K), numbers(B, 2, S, D_K), numbers(B, 3, S, D_V)
    expected = attention(q, np.repeat(k, 3, 1), np.repeat(v, 2, 1), is_causal=True)
    np.testing.assert_array_equal(attention(q, k, v, is_causal=True), expected)
    check_grad(lambda q, k, v: attention(q, k, v), q, k, v)
    assert attention(q, k[:, :1], v).shape == (B, 6, T, D_V)
    with pytest.raises(ValueError, match=r"q has 6 heads .* k has 4"):
        attention(q, numbers(B, 4, S, D_K), v)


def test_three_axes_broadcast_and_never_group():
    q, k, v = numbers(6, T, D_K), numbers(2, S, D_K), numbers(2, S, D_V)
    with pytest.raises(ValueError, match="do not broadcast"):
        attention(q, k, v)
    one = attention(q, k[0], v[:1])
    np.testing.assert_array_equal(one, attention(q, np.stack([k[0]] * 6), np.stack([v[0]] * 6)))


# ---- what a call refuses


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"attn_mask": np.ones((T, S), bool)}, TypeError, "attend=mask .* ignore=mask"),
        ({"mask": np.ones((T, S), bool)}, TypeError, "attend=mask"),
        ({"key_padding_mask": np.ones((B, S), bool)}, TypeError, "lengths="),
        ({"colour": 1}, TypeError, "colour.*attend, ignore, bias"),
        ({"attend": np.ones((T, S))}, TypeError, "attend is boolean, got float64.*bias="),
        ({"ignore": np.ones((T, S), int)}, TypeError, "ignore=mask != 0"),
        ({"bias": np.ones((T, S), bool)}, TypeError, "attend="),
        ({"bias": np.ones((T, S), "f2")}, TypeError, "float16 is for storage only"),
        ({"is_causal": np.ones((T, S), bool)}, TypeError, "True or False, got ndarray.*attend="),
        (
            {"attend": np.ones((B, S), bool)},
            ValueError,
            r"attend \(2, 7\) .* scores \(B, H, T, S\) = \(2, 3, 5, 7\); .*None",
        ),
        ({"ignore": np.zeros((B, T, S), bool)}, ValueError, r"ignore \(2, 5, 7\) does not .* ignore\[:, None\]"),
        ({"bias": np.ones((4, B, H, T, S))}, ValueError, "bias .* does not broadcast"),
        ({"lengths": [1, 8]}, ValueError, "between 0 and S = 7 keys, got 1 to 8"),
        ({"lengths": [1.5, 2]}, TypeError, "lengths are integers"),
        ({"lengths": [1, 2, 3]}, ValueError, r"lengths \(3,\) does not fit scores"),
        ({"q_positions": np.arange(T)}, ValueError, "is_causal=True"),
        ({"is_causal": True, "q_positions": np.arange(S)}, ValueError, r"q_positions have shape \(T,\) or \(B, T\)"),
        ({"scale": Tensor(1.0)}, TypeError, "multiply q"),
        ({"dropout_p": 1.5}, ValueError, "probability"),
        ({"path": "fast"}, ValueError, "None or one of .*tensor.*fused"),
        ({"need": "weights"}, TypeError, "tuple"),
        ({"need": True}, TypeError, "tuple.*got True.*need=.'weights',."),
        ({"need": ("weigths",)}, ValueError, "weigths.*weights"),
    ],
)
def test_what_is_refused(words, error, text):
    with pytest.raises(error, match=text):
        attention(*qkv(), **words)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((3, 4), (5, 6), (5, 4)), "width d_k, 4 and 6"),
        (((3, 4), (5, 4), (6, 4)), "number S, 5 and 6"),
        (((4,), (5, 4), (5, 4)), "at least two axes"),
        (((2, 3, 4), (3, 5, 4), (3, 5, 4)), "do not broadcast"),
    ],
)
def test_shapes_that_do_not_fit(shapes, text):
    with pytest.raises(ValueError, match=text):
        attention(*(np.ones(shape) for shape in shapes))


def test_a_mask_is_never_positional():
    with pytest.raises(TypeError, match="positional"):
        attention(*qkv(), np.ones((T, S), bool))


# ---- records


def test_asking_for_a_record_does_not_change_one_bit():
    everything = nn.AttentionRecord._fields
    q, k, v = qkv()
    k[0, 0, 1] = NAN
    for masks in ({}, {"is_causal": True}, {"lengths": [0, 1]}, {"attend": np.arange(S) != 1}):
        for p in (0.0, 0.5):
            manual_seed(3)
            plain = attention(q, k, v, **masks, dropout_p=p)
            manual_seed(3)
            output, record = attention(q, k, v, **masks, dropout_p=p, need=everything)
            assert plain.data.tobytes() == output.data.tobytes()
            assert all(isinstance(item, Tensor) for item in record)
    assert attention(q, k, v, need=("scores",))[1].weights is None


def test_a_loss_may_use_the_record():
    for name in ("weights", "scores", "logsumexp", "q", "k", "v"):
        check_grad(lambda q, k, v, name=name: getattr(attention(q, k, v, need=(name,))[1], name), *qkv())


def test_weights_are_recorded_before_dropout():
    weights = attention(*qkv(), dropout_p=0.9, need=("weights",))[1].weights
    np.testing.assert_allclose(weights.data.sum(-1), 1)


def test_dropout_works_on_the_weights():
    output = attention(np.zeros((1, 2)), np.zeros((1000, 2)), np.eye(1000), dropout_p=0.25)
    kept = output.data[output.data != 0]
    np.testing.assert_allclose(kept, 1 / 1000 / 0.75, rtol=1e-6)
    assert 700 < len(kept) < 800
