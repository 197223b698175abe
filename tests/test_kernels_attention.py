"""Fused attention and its pullback: every rule and their combinations against loops in float64, tiles, bits, memory."""

import itertools
import tracemalloc

import numpy as np
import pytest

from tinygrad_qkv.kernels import attention, attention_pullback, dropout, set_num_threads, threads
from tinygrad_qkv.kernels.attention_rules import AttentionRules

DTYPES = [np.float32, np.float64]
NAMES = ("scale", "softcap", "keep", "bias", "lengths", "causal", "window", "offset", "sink", "dropout")
# Of the largest result, relative to float64: a sum of S terms of either sign loses about sqrt(S) of these.
TOLERANCE = {np.float32: 3e-6, np.float64: 1e-14}


def inputs(B, H, H_kv, T, S, d_k, d_v, dtype, seed=0):
    """q, k, v and the gradient of the output."""
    random = np.random.default_rng(seed)
    shapes = (B, H, T, d_k), (B, H_kv, S, d_k), (B, H_kv, S, d_v), (B, H, T, d_v)
    return [random.normal(size=shape).astype(dtype) for shape in shapes]


def rules_of(names, B, H, T, S, dtype, seed=0):
    """Some value for each of the rules that are named."""
    random = np.random.default_rng(seed)
    positions = np.sort(random.integers(0, max(S, T), (B, T))), np.arange(S)[None].repeat(B, 0)
    near = {"positions": positions, "least": 0 if "causal" in names else -3}
    bias = random.normal(size=(H, T, 1)) + np.where(random.random((1, S)) < 0.2, -np.inf, random.normal(size=(1, S)))
    values = {
        "scale": {"scale": -0.8},
        "softcap": {"softcap": 0.9},
        "keep": {"keep": random.random((B, 1, T, S)) < 0.5},
        "bias": {"bias": bias.astype(dtype)},
        "lengths": {"lengths": random.integers(0, S + 1, B)},
        "causal": near,
        "window": {**near, "most": max(S // 3, 1)},
        "offset": {"offset": S - T + 1, "least": -1, "most": max(S // 3, 2)},
        "sink": {"sink": random.normal(size=H).astype(dtype)},
        "dropout": {"dropout_p": 0.4, "seed": 2**64 - 3},
    }
    return AttentionRules(**{key: value for name in names for key, value in values[name].items()})


def reference(q, k, v, g, rules):
    """out, lse, dq, dk, dv, dbias in float64, one query at a time; only the keys that it sees exist for it."""
    (B, H, T, _), S, share = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    out, lse = np.zeros((B, H, T, v.shape[3])), np.full((B, H, T), -np.inf)
    dq, dk, dv, dbias = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros((B, H, T, S))
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    bias = np.broadcast_to(0.0 if rules.bias is None else rules.bias, dbias.shape)
    keep = np.broadcast_to(True if rules.keep is None else rules.keep, dbias.shape) & ~np.isneginf(bias)
    kept = dropout(np.ones(dbias.shape), rules.dropout_p, rules.seed) if rules.dropout_p else np.ones(dbias.shape)
    for b, h, t in np.ndindex(B, H, T):
        seen = keep[b, h, t] & (np.arange(S) < (S if rules.lengths is None else rules.lengths[b]))
        if rules.positions is not None or rules.offset:
            places = rules.positions or (np.arange(T)[None] + rules.offset, np.arange(S)[None])
            distance = places[0][b % len(places[0]), t] - places[1][b % len(places[1])]
            seen &= (rules.least <= distance) & (distance <= rules.most)
        K, V, m = k[b, h // share, seen], v[b, h // share, seen], kept[b, h, t, seen]
        x = rules.scale * K @ q[b, h, t]
        slope = 1 - np.tanh(x / rules.softcap) ** 2 if rules.softcap else np.ones(len(x))
        x = (rules.softcap * np.tanh(x / rules.softcap) if rules.softcap else x) + bias[b, h, t, seen]
        every = np.append(x, [] if rules.sink is None else rules.sink[h])
        if not len(every):
            continue
        lse[b, h, t] = every.max() + np.log(np.exp(every - every.max()).sum())
        A = np.exp(x - lse[b, h, t])
        out[b, h, t] = (A * m) @ V
        dA = m * (V @ g[b, h, t])
        dS = A * (dA - A @ dA)
        dbias[b, h, t, seen] = dS
        dq[b, h, t] = rules.scale * (dS * slope) @ K
        dk[b, h // share, seen] += rules.scale * np.outer(dS * slope, q[b, h, t])
        dv[b, h // share, seen] += np.outer(A * m, g[b, h, t])
    return out, lse, dq, dk, dv, dbias


def computed(q, k, v, g, rules, bias_too=True):
    out, lse = attention(q, k, v, rules)
    return out, lse, *attention_pullback(g, q, k, v, out, lse, rules, bias_too)


def check(q, k, v, g, rules):
    """All results against the loops; sums over a row or a column may cancel, so the largest element is the measure."""
    for name, got, want in zip(
        ("out", "lse", "dq", "dk", "dv", "dbias"),
        computed(q, k, v, g, rules),
        reference(q, k, v, g, rules),
        strict=True,
    ):
        assert got.dtype == q.dtype and got.shape == want.shape
        largest = np.max(np.abs(want), where=np.isfinite(want), initial=1.0)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[q.dtype.type] * largest, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "names", [*((n,) for n in NAMES), *itertools.combinations(NAMES, 2), NAMES, NAMES[1:]], ids="+".join
)
def test_rules_alone_and_in_pairs_and_all(names, dtype):
    B, H, T, S = 2, 6, 11, 17
    check(*inputs(B, H, 2, T, S, 3, 5, dtype), rules_of(names, B, H, T, S, dtype))


# One more and one less than the tiles of 96 and 192 queries, and of 128 or 64 keys; primes; one.
SIZES = [
    (1, 1, 1, 1),
    (1, 131, 7, 2),
    (97, 1, 2, 3),
    (95, 127, 8, 8),
    (193, 65, 5, 16),
    (96, 129, 33, 1),
    (191, 63, 1, 7),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "S", "d_k", "d_v"), SIZES)
def test_sizes_around_those_of_the_tiles(T, S, d_k, d_v, dtype):
    for names in ((), ("causal",), ("offset",), ("keep", "offset", "dropout", "lengths", "bias")):
        check(*inputs(2, 2, 1, T, S, d_k, d_v, dtype), rules_of(names, 2, 2, T, S, dtype))


@pytest.mark.parametrize("names", [(), ("window",), ("offset",), NAMES], ids="+".join)
def test_many_tiles_in_threads(names):
    """T and S of several tiles each, in parts that are summed."""
    q, k, v, g = inputs(1, 2, 2, 409, 397, 24, 16, np.float32)
    assert threads.PARALLEL_FROM["attention"] < 2 * 409 * 397 * 40
    rules = rules_of(names, 1, 2, 409, 397, np.float32)
    exact = computed(*(x.astype(np.float64) for x in (q, k, v, g)), _wide(rules))
    for got, want in zip(computed(q, k, v, g, rules), exact, strict=True):
        largest = np.max(np.abs(want), where=np.isfinite(want), initial=1.0)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * largest)
    one = computed(q, k, v, g, rules)
    before = threads.get_num_threads()
    try:
        set_num_threads(1)
        for x, y in zip(one, computed(q, k, v, g, rules), strict=True):
            assert x.tobytes() == y.tobytes()
    finally:
        set_num_threads(before)


def _wide(rules):
    """The rules with their floats in float64."""
    return rules._replace(
        **{
            name: None if x is None else x.astype(np.float64)
            for name, x in (("bias", rules.bias), ("sink", rules.sink))
        }
    )


def test_scores_of_any_size():
    """A softmax of huge scores picks the largest; the results stay exact, and nothing overflows."""
    q, k, v, g = inputs(1, 1, 1, 5, 150, 4, 3, np.float32)
    for size in (1e-30, 1e4, -1e4, 1e15):
        rules = AttentionRules(scale=size)
        x = size * (q[0, 0].astype(np.float64) @ k[0, 0].astype(np.float64).T)
        results = computed(q, k, v, g, rules)
        assert all(np.isfinite(result).all() for result in results)
        if abs(size) > 1e10:
            np.testing.assert_array_equal(results[0][0, 0], v[0, 0, x.argmax(1)])
    bias = np.full((5, 150), -1e30, np.float32)
    bias[:, 7] = 1e30
    np.testing.assert_array_equal(attention(q, k, v, AttentionRules(bias=bias))[0][0, 0], v[0, 0, [7] * 5])


def test_nan_and_inf_without_a_mask_are_those_of_the_formula():
    q, k, v, _ = inputs(1, 1, 1, 6, 200, 2, 3, np.float32)
    q[0, 0, 1] = np.nan
    q[0, 0, 2] = np.inf
    k[0, 0, :, :] = np.abs(k[0, 0])
    q[0, 0, 3] = -np.inf  # all scores -inf: no softmax
    v[0, 0, 150, 1] = np.inf
    out, lse = attention(q, k, v)
    assert np.isnan(out[0, 0, 1:4]).all() and np.isnan(lse[0, 0, [1, 3]]).all()
    assert np.isposinf(out[0, 0, [0, 4, 5], 1]).all() and np.isfinite(out[0, 0, [0, 4, 5]][:, [0, 2]]).all()


def test_keys_past_the_length_are_never_read():
    q, k, v, g = inputs(2, 2, 1, 100, 150, 4, 3, np.float32)
    rules = AttentionRules(lengths=np.array([0, 131]))
    clean = computed(q, k, v, g, rules)
    for x in (k, v):
        x[0], x[1, :, 131:] = np.nan, np.inf
    for got, want in zip(computed(q, k, v, g, rules), clean, strict=True):
        np.testing.assert_array_equal(got, want)
    assert (clean[0][0] == 0).all() and np.isneginf(clean[1][0]).all() and all((d[0] == 0).all() for d in clean[2:])


def test_a_query_without_a_key_takes_no_part():
    q, k, v, g = inputs(1, 1, 1, 100, 150, 4, 3, np.float64)
    keep = np.ones((100, 150), bool)
    keep[13] = False
    results = computed(q, k, v, g, AttentionRules(keep=keep))
    rest = np.arange(100) != 13
    alone = computed(q[:, :, rest], k, v, g[:, :, rest], AttentionRules())
    assert (results[0][0, 0, 13] == 0).all() and results[1][0, 0, 13] == -np.inf and (results[2][0, 0, 13] == 0).all()
    for i in (3, 4):
        np.testing.assert_allclose(results[i], alone[i], atol=1e-13)


@pytest.mark.parametrize("reach", [{"least": 0}, {"least": -40, "most": 40}], ids=["causal", "window"])
def test_a_query_whose_near_keys_are_all_marked_as_hidden_takes_no_part(reach):
    """What is left of a tile begins to the right of all that its first queries may see."""
    T, S = 113, 127
    keep = np.broadcast_to(np.arange(S) >= 100, (1, 1, T, S))
    near = {**reach, "positions": (np.arange(T)[None], np.arange(S)[None])}
    given, rules = inputs(1, 2, 1, T, S, 3, 2, np.float64), AttentionRules(keep=keep, **reach)
    check(*given, AttentionRules(keep=keep, **near))
    for one, other in zip(computed(*given, rules), computed(*given, AttentionRules(keep=keep, **near)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)
    assert (attention(*given[:3], rules)[0][:, :, :60] == 0).all()


def test_the_sink_takes_its_share():
    q, k, v, _ = inputs(1, 2, 2, 3, 37, 4, 3, np.float64)
    plain, lse = attention(q, k, v)
    out, with_sink = attention(q, k, v, AttentionRules(sink=np.array([0.0, -np.inf])))
    np.testing.assert_allclose(with_sink[:, 0], np.log1p(np.exp(lse[:, 0])), rtol=1e-14)
    np.testing.assert_allclose(out[:, 0], plain[:, 0] * np.exp(lse - with_sink)[:, 0, :, None], rtol=1e-13)
    np.testing.assert_array_equal(out[:, 1], plain[:, 1])


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_drops_what_it_drops_of_the_weights(p):
    q, k, v, _ = inputs(2, 3, 3, 100, 140, 4, 140, np.float64)
    v[...] = np.eye(140)
    weights, lse = attention(q, k, v)
    out, same = attention(q, k, v, AttentionRules(dropout_p=p, seed=99))
    np.testing.assert_allclose(out, dropout(weights, p, 99), rtol=1e-12)
    np.testing.assert_array_equal(same, lse)


def test_strides_byte_order_and_read_only_inputs():
    q, k, v, g = inputs(2, 4, 2, 100, 131, 6, 5, np.float32)
    rules = rules_of(("keep", "bias"), 2, 4, 100, 131, np.float32)
    want = computed(q, k, v, g, rules)
    heads_last = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v, g)]
    got = computed(*heads_last, rules)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert all(got[i].strides == x.strides for i, x in ((0, heads_last[3]), (2, heads_last[0]), (3, heads_last[1])))
    odd = [np.asfortranarray(q), k.astype(">f4"), np.repeat(v, 2, 3)[..., ::2], np.repeat(g, 2, 2)[:, :, ::2]]
    for x in (*odd, rules.keep):
        x.flags.writeable = False
    turned = rules._replace(keep=np.asfortranarray(rules.keep), bias=np.asfortranarray(rules.bias))
    for x, y in zip(computed(*odd, turned), want, strict=True):
        np.testing.assert_array_equal(x, y)
    same = [np.broadcast_to(x[:1, :1], x.shape) for x in (q, k, v, g)]  # one head's numbers, seen again and again
    for x, y in zip(computed(*same, rules), computed(*(x.copy() for x in same), rules), strict=True):
        np.testing.assert_array_equal(x, y)
    g = np.broadcast_to(np.float32(1), g.shape)
    for x, y in zip(computed(q, k, v, g, rules), computed(q, k, v, g.copy(), rules), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("empty", range(7))
def test_empty_axes(empty):
    sizes = [2, 2, 2, 3, 5, 4, 3]
    sizes[empty] = 0
    if empty == 2:
        return
    if empty == 1:
        sizes[2] = 0
    q, k, v, g = inputs(*sizes, np.float32)
    out, lse, dq, dk, dv, dbias = computed(q, k, v, g, AttentionRules(scale=2.0))
    assert (out.shape, lse.shape, dq.shape, dk.shape, dv.shape) == (g.shape, q.shape[:3], q.shape, k.shape, v.shape)
    assert dbias.shape == (*q.shape[:3], k.shape[2])
    if k.shape[2] == 0:
        assert (out == 0).all() and np.isneginf(lse).all() and (dq == 0).all()
    if q.shape[2] == 0:
        assert (dk == 0).all() and (dv == 0).all()
    if k.shape[3] == 0:
        np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), out.shape), rtol=1e-6)


def test_memory_is_linear():
    """A mask that would be quadratic is passed as a broadcast view; what is allocated grows as T and S do."""
    peaks = []
    for T in (512, 2048):
        q, k, v, g = inputs(1, 1, 1, T, T, 2, 2, np.float32)
        keep = np.broadcast_to(np.arange(T) % 3 > 0, (1, 1, T, T))
        rules = AttentionRules(keep=keep, least=0, most=40)
        computed(q, k, v, g, rules, False)
        tracemalloc.start()
        computed(q, k, v, g, rules, False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 5 * peaks[0] and peaks[1] < 2048 * 2048 / 4


def test_errors():
    q, k, v, g = inputs(2, 4, 2, 3, 5, 7, 6, np.float32)
    for wrong, text in (
        ((q[0], k, v), "four axes"),
        ((q, k[:, :, :4], v), "sizes of one name"),
        ((q[..., :6], k, v), "sizes of one name"),
        ((q, k[:1], v[:1]), "sizes of one name"),
        ((q[:, :3], k, v), "multiple"),
    ):
        with pytest.raises(ValueError, match=text):
            attention(*wrong)
    with pytest.raises(TypeError, match="float64"):
        attention(q, k, v.astype(np.float64))
    with pytest.raises(TypeError, match="int"):
        attention(q.astype(int), k, v)
    out, lse = attention(q, k, v)
    with pytest.raises(ValueError, match="g must have shape"):
        attention_pullback(g[:1], q, k, v, out, lse)
    with pytest.raises(ValueError, match="lse must have shape"):
        attention_pullback(g, q, k, v, out, lse[:1])
    with pytest.raises(ValueError, match="keep"):
        attention(q, k, v, AttentionRules(keep=np.ones((2, 5), bool)))
    with pytest.raises(TypeError, match="bias"):
        attention(q, k, v, AttentionRules(bias=np.ones((3, 5))))
    with pytest.raises(ValueError, match="lengths"):
        attention(q, k, v, AttentionRules(lengths=np.array([1, 6])))
    with pytest.raises(ValueError, match="sink"):
        attention(q, k, v, AttentionRules(sink=np.ones(3, np.float32)))
    with pytest.raises(ValueError, match="positions"):
        attention(q, k, v, AttentionRules(least=0, positions=(np.zeros((1, 3), int), np.zeros((1, 4), int))))
