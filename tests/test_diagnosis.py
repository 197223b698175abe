"""`diagnose()`: each reason for a missing gradient is named for the right parameter, and healthy models have none."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tinygrad_qkv import (
    Tensor,
    checkpoint,
    diagnose,
    exp,
    log,
    manual_seed,
    maximum,
    nn,
    no_grad,
    recording,
    softmax,
    where,
)
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import optim

random = np.random.default_rng(3)
B, T, S, D = 3, 5, 7, 8
X = random.normal(size=(B, T, D)).astype(np.float32)
MEMORY = random.normal(size=(B, S, D)).astype(np.float32)
IDS = random.integers(0, 11, (B, T))
CLASSES = random.integers(0, 5, B)


def mlp(*sizes, activation=nn.ReLU):
    layers = []
    for m, n in pairwise(sizes):
        layers += [nn.Linear(m, n), activation()]
    return nn.Sequential(*layers[:-1])


def target_loss(model, *args, **words):
    """The squared error against a fixed target."""

    def loss():
        y = model(*args, **words)
        return ((y - np.random.default_rng(5).normal(size=y.shape).astype(np.float32)) ** 2).mean()

    return loss


def reasons(model, loss, **options):
    """parameter -> the reasons of its faults."""
    found = {}
    for f in diagnose(model, loss, **options).faults:
        found.setdefault(f.parameter, []).append(f.reason)
    return found


# ---- healthy models


class Decoder(nn.Module):
    """Token and position embeddings, blocks, a norm and a head, which may be tied to the token embedding."""

    def __init__(self, tied=False, path=None, blocks=2, **options):
        self.tokens, self.places = nn.Embedding(11, D), nn.Embedding(T, D)
        self.blocks = [nn.TransformerBlock(D, 2, **options) for _ in range(blocks)]
        self.norm, self.tied, self.path = nn.LayerNorm(D), tied, path
        if not tied:
            self.head = nn.Linear(D, 11)

    def forward(self, ids, **masks):
        x = self.tokens(ids) + self.places(np.arange(ids.shape[-1]))
        for block in self.blocks:
            x = block(x, path=self.path, is_causal=True, **masks)
        x = self.norm(x)
        return x @ self.tokens.weight.mT if self.tied else self.head(x)


class Cross(nn.Module):
    def __init__(self, **options):
        self.attention = nn.MultiHeadAttention(D, 2, **options)

    def forward(self, x, memory, **words):
        return self.attention(x, memory, **words)


class Sinks(nn.Module):
    def __init__(self, softcap=None):
        self.project = nn.QKVProjection(D, 4)
        self.sink, self.softcap = nn.Parameter(np.zeros(1, np.float32)), softcap

    def forward(self, x, path=None):
        q, k, v = self.project(x)
        return F.scaled_dot_product_attention(q, k, v, sink=self.sink, softcap=self.softcap, path=path)


class Bias(nn.Module):
    def __init__(self):
        self.project, self.bias = nn.QKVProjection(D, 4), nn.Parameter(np.zeros((T, T), np.float32))

    def forward(self, x, path):
        return F.scaled_dot_product_attention(*self.project(x), bias=self.bias, path=path)


def language_loss(model, ignored=0, **words):
    targets = IDS.copy()
    targets[:, :ignored] = -100
    return lambda: F.cross_entropy(model(IDS, **words), targets)


def healthy():
    """name -> (model, loss)"""
    manual_seed(1)
    cases = {}

    def add(name, model, make, *args, **words):
        cases[name] = (model, make(model, *args, **words))

    add("linear", nn.Linear(D, 3), target_loss, X)
    add("relu mlp", mlp(D, 32, 32, 3), target_loss, X)
    add("tanh mlp", mlp(D, 16, 16, 3, activation=nn.Tanh), target_loss, X)
    add("deep gelu mlp", mlp(D, *[16] * 8, 3, activation=nn.GELU), target_loss, X)
    add("classifier", mlp(D, 16, 5), lambda m: lambda: F.cross_entropy(m(X[:, 0]), CLASSES))
    add("dropout mlp", nn.Sequential(nn.Linear(D, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3)), target_loss, X)
    add("norms", nn.Sequential(nn.Linear(D, 16), nn.LayerNorm(16), nn.ReLU(), nn.RMSNorm(16)), target_loss, X)
    for path in ("tensor", "fused"):
        attention = nn.MultiHeadAttention(D, 2)
        add(f"self {path}", attention, target_loss, X, path=path)
        add(f"causal {path}", nn.MultiHeadAttention(D, 2), target_loss, X, path=path, is_causal=True)
        add(f"padded {path}", nn.MultiHeadAttention(D, 2), target_loss, X, path=path, lengths=[2, T, 3])
        add(f"one empty {path}", nn.MultiHeadAttention(D, 2), target_loss, X, path=path, lengths=[0, T, 3])
        add(f"cross {path}", Cross(), target_loss, X, MEMORY, path=path)
        add(f"grouped {path}", Cross(num_kv_heads=1, dropout=0.2), target_loss, X, MEMORY, path=path)
        add(f"sink {path}", Sinks(), target_loss, X, path=path)
        add(f"softcap {path}", Sinks(2.0), target_loss, X, path=path)
        add(f"bias {path}", Bias(), target_loss, X, path=path)
        add(f"decoder {path}", Decoder(path=path), language_loss)
    one = [1, 1, T]  # most queries have no choice
    add("nearly all padding", nn.MultiHeadAttention(D, 2), target_loss, X, lengths=one)
    add("post norm", Decoder(norm="post", dropout=0.1), language_loss)
    add("tied", Decoder(tied=True), language_loss)
    add("deep", Decoder(blocks=12, activation="gelu"), language_loss)
    add("ignored targets", Decoder(), language_loss, ignored=3)
    add("padded batch", Decoder(), language_loss, ignored=3, lengths=[2, T, 3])
    add("float64", Decoder().astype("float64"), language_loss)
    add("no bias", Decoder(bias=False), language_loss)
    return cases


HEALTHY = healthy()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_has_no_fault(name):
    model, loss = HEALTHY[name]
    found = diagnose(model, loss, optimizer=optim.AdamW(model.parameters()))
    assert not found.faults, found
    assert len(HEALTHY) >= 20


def test_what_is_harmless_is_told_as_such():
    model, loss = HEALTHY["decoder tensor"]
    found = diagnose(model, loss)
    facts = {(f.parameter, f.reason) for f in found.findings if f.severity == "harmless"}
    assert {("blocks.0.attn.b_K", "key bias"), ("blocks.1.attn.b_K", "key bias")} <= facts
    assert {reason for _, reason in facts} <= {"key bias", "dead relu", "unused rows"}
    idle = 11 - len(np.unique(IDS))
    assert [f.numbers["rows"] for f in found.for_("tokens.weight")] == ([idle] if idle else [])
    for name in ("sink tensor", "softcap fused"):  # there the key bias learns
        assert not [f for f in diagnose(*HEALTHY[name]).findings if f.reason == "key bias"]


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_the_key_bias_and_no_other_bias_is_provably_zero(path):
    model, loss = HEALTHY[f"self {path}"]
    assert [(f.parameter, f.reason) for f in diagnose(model, loss).findings] == [("b_K", "key bias")]


# ---- one fault per reason


def test_detached_is_told_with_its_line():
    model = mlp(D, 6, 3)
    first, _, last = model

    def loss():
        h = first(X).relu()
        return (last(h.detach() * 2.0) ** 2).mean()

    found = diagnose(model, loss)
    assert {f.parameter: f.reason for f in found.faults} == {"0.weight": "detached", "0.bias": "detached"}
    assert f"{Path(__file__).name}:{loss.__code__.co_firstlineno + 2}" in found.faults[0].words
    with recording():
        recorded = loss()
    again = diagnose(model, recorded)
    assert {f.parameter: f.reason for f in again.faults} == {"0.weight": "detached", "0.bias": "detached"}


def test_no_grad_is_told_with_its_line():
    w, u, v = (Tensor(random.normal(size=(4, 4)), requires_grad=True) for _ in range(3))

    def loss():
        with no_grad():
            h = u @ (w * 2.0)
            h = h + 1.0
        return (h @ v).sum()

    found = diagnose({"w": w, "u": u, "v": v}, loss)
    assert {f.parameter: f.reason for f in found.faults} == {"w": "no_grad", "u": "no_grad"}
    assert "op 'mul' at " in found.for_("w")[0].words
    with no_grad():
        assert reasons({"w": w}, lambda: (w * 2.0).sum()) == {"w": ["no_grad"]}
    with recording():
        recorded = loss()
    assert diagnose({"w": w, "u": u, "v": v}, recorded).for_("u")[0].reason == "no_grad"


def test_unused_parameters():
    a, b, c = (Tensor(random.normal(size=3), requires_grad=True) for _ in range(3))

    def loss():
        exp(b).sum()  # dropped
        return (a * a).sum() + Tensor(log(c * c).numpy().sum())

    found = diagnose({"a": a, "b": b, "c": c, "d": Tensor([1.0], requires_grad=True)}, loss)
    assert {f.parameter: f.reason for f in found.faults} == {"b": "unused", "c": "unused", "d": "unused"}
    assert "op 'exp'" in found.for_("b")[0].words and "No op" in found.for_("d")[0].words


def test_an_unselected_branch():
    a, b = (Tensor(random.normal(size=3), requires_grad=True) for _ in range(2))
    found = diagnose({"a": a, "b": b}, lambda: where(a > -100, a * 2.0, exp(b)).sum())
    assert {f.parameter: f.reason for f in found.faults} == {"b": "unselected branch"}


def test_requires_grad_false():
    model = mlp(D, 6, 3)
    dict(model.named_parameters())["0.weight"].requires_grad = False
    assert reasons(model, target_loss(model, X)) == {"0.weight": ["requires_grad False"]}


def test_a_dead_relu():
    model = mlp(D, 6, 3)
    dict(model.named_parameters())["0.bias"].data[:] = -100
    found = diagnose(model, target_loss(model, X))
    assert {f.parameter: f.reason for f in found.faults} == dict.fromkeys(
        ["0.weight", "0.bias", "2.weight"], "dead relu"
    )
    assert found.faults[0].numbers == {"fraction": 1.0} and "in 1 (ReLU)" in found.faults[0].words
    dict(model.named_parameters())["0.bias"].data[1:] = 0
    found = diagnose(model, target_loss(model, X))
    assert not found.faults and found.for_("0.weight")[0].numbers["fraction"] == pytest.approx(1 / 6)


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_a_saturated_softmax(path):
    manual_seed(2)
    model = nn.MultiHeadAttention(D, 2)
    model.W_Q.data[:] *= 300
    model.W_K.data[:] *= 300
    found = diagnose(model, target_loss(model, X, path=path))
    wrong = {f.parameter: f.reason for f in found.faults}
    assert wrong["W_Q"] == wrong["W_K"] == "saturated softmax", found
    numbers = found.for_("W_Q")[0].numbers
    assert numbers["max weight"] > 0.999 and numbers["sum p(1-p)"] < 1e-4
    assert not {"W_V", "W_O", "b_V", "b_O"} & set(wrong)


def test_a_saturated_softmax_is_no_fault_of_what_comes_before():
    manual_seed(2)
    model = nn.Sequential(nn.Linear(D, D), nn.MultiHeadAttention(D, 2, bias=False), nn.Linear(D, D))
    for name, p in model.named_parameters():
        if name in ("1.W_Q", "1.W_K"):
            p.data[:] *= 300
    assert reasons(model, target_loss(model, X)) == {name: ["saturated softmax"] for name in ("1.W_Q", "1.W_K")}


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_equal_values(path):
    model = nn.MultiHeadAttention(D, 2)
    same = np.repeat(X[:, :1], S, axis=1)
    found = diagnose(model, target_loss(model, X, same, path=path))
    wrong = {f.parameter: f.reason for f in found.faults}
    assert wrong.get("W_Q") == wrong.get("W_K") == "equal values", found
    assert set(wrong) <= {"W_Q", "W_K", "b_Q", "b_K"}


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_the_saddle_of_w_q_and_w_k(path):
    model = nn.MultiHeadAttention(D, 2)
    model.W_Q.data[:] = model.W_K.data[:] = 0
    found = diagnose(model, target_loss(model, X, path=path))
    wrong = {f.parameter: f.reason for f in found.faults}
    assert wrong.pop("b_Q", "saddle") == "saddle" and wrong.pop("b_K", "saddle") == "saddle"
    assert wrong == {"W_Q": "saddle", "W_K": "saddle"}, found
    assert "W_K" in found.for_("W_Q")[0].words


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_a_zero_factor_that_will_move_is_harmless(path):
    model = nn.MultiHeadAttention(D, 2)
    model.W_O.data[:] = 0
    found = diagnose(model, target_loss(model, X, path=path))
    assert not found.faults
    told = {f.parameter for f in found.findings if f.reason == "zero factor"}
    assert told == {"W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"} and "W_O" in found.for_("W_Q")[0].words


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_w_v_and_w_o_zero_are_a_saddle(path):
    model = nn.MultiHeadAttention(D, 2, bias=False)
    model.W_V.data[:] = model.W_O.data[:] = 0
    assert set(map(tuple, reasons(model, target_loss(model, X, path=path)).values())) == {("saddle",)}


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_masked_everywhere(path):
    model = nn.MultiHeadAttention(D, 2)
    found = reasons(model, target_loss(model, X, path=path, attend=np.zeros((T, T), bool)))
    assert found == {name: ["masked everywhere"] for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O")}


def test_a_mask_of_ones_own_is_found_too():
    q, k, v = (Tensor(random.normal(size=(T, 3)), requires_grad=True) for _ in range(3))

    def loss():
        return (where(np.zeros((T, T), bool), q @ k.mT, -1e9).softmax() @ v).square().sum()

    assert reasons({"q": q, "k": k, "v": v}, loss) == {name: ["masked everywhere"] for name in "qk"}


@pytest.mark.parametrize("path", ["tensor", "fused"])
def test_dropout_of_everything(path):
    model = nn.Sequential(nn.Linear(D, 6), nn.Dropout(1.0), nn.Linear(6, 3))
    assert reasons(model, target_loss(model, X)) == {name: ["dropout 1"] for name in ("0.weight", "0.bias", "2.weight")}
    model = nn.MultiHeadAttention(D, 2, dropout=1.0)
    found = reasons(model, target_loss(model, X, path=path))
    assert found == {name: ["dropout 1"] for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O")}


def test_what_the_optimiser_does_not_move():
    model = mlp(D, 6, 3)
    held = dict(model.named_parameters())
    opt = optim.SGD([{"params": [held["0.weight"], held["0.bias"]], "lr": 0.0}, {"params": [held["2.weight"]]}], lr=0.1)
    assert reasons(model, target_loss(model, X), optimizer=opt) == {
        "0.weight": ["learning rate 0"],
        "0.bias": ["learning rate 0"],
        "2.bias": ["not in the optimiser"],
    }


def test_a_loss_that_is_constant_though_its_gradient_is_not_exactly_0():
    model = mlp(D, 6, 3)
    assert set(map(tuple, reasons(model, lambda: softmax(model(X), -1).sum()).values())) == {("constant branch",)}
    assert not reasons(model, lambda: softmax(model(X), -1).square().sum())


def test_vanished_and_underflowed():
    model = mlp(D, *[D] * 40, 3, activation=nn.Sigmoid)
    found = reasons(model, target_loss(model, X))
    assert found["0.weight"] == ["vanished"] and "80.weight" not in found
    w, u = Tensor([1e-30], requires_grad=True), Tensor([1.0], requires_grad=True)
    assert reasons({"w": w, "u": u}, lambda: (w * 1e-30 * u * 1e-30).sum() + u.sum()) == {"w": ["underflow"]}


def test_other_zeros():
    w, u = Tensor(random.normal(size=(D, 3)), requires_grad=True), Tensor(np.ones(3), requires_grad=True)
    both = {"w": w, "u": u}
    assert reasons(both, lambda: (np.zeros((5, D)) @ w + u).sum()) == {"w": ["zero input"]}
    assert reasons(both, lambda: (w * 0.0 + u).sum()) == {"w": ["multiplied by 0"]}
    assert reasons(both, lambda: (w.sum().sign() + u).sum()) == {"w": ["step function"]}
    assert reasons(both, lambda: (w.clip(50, 60).sum() + u).sum()) == {"w": ["clipped"]}
    assert reasons(both, lambda: (maximum(w, 50.0).sum() + u).sum()) == {"w": ["never chosen"]}
    assert reasons(both, lambda: ((w - 2000.0).exp().sum() + u).sum()) == {"w": ["flat"]}
    fitted = diagnose(both, lambda: (w - w.data).square().sum() + u.sum())
    assert not fitted.faults and [f.reason for f in fitted.for_("w")] == ["at the minimum"]
    assert reasons(both, lambda: ((w * 0.0 + 100.0).tanh() + u).sum())["w"] == ["saturated activation"]
    model = mlp(D, 6, 5)
    found = reasons(model, lambda: F.cross_entropy(model(X[:, 0]), np.full(B, -100)))
    assert set(map(tuple, found.values())) == {("targets ignored",)} and len(found) == 4


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_that_starts_at_0_is_no_fault(norm):
    model = nn.Sequential(nn.Linear(D, 6), norm(6))
    model[1].weight.data[:] = 0
    found = diagnose(model, target_loss(model, X))
    assert not found.faults and [f.reason for f in found.for_("0.weight")] == ["zero factor"]


def test_zeros_of_an_empty_batch_of_a_checkpoint_and_of_a_hook():
    model = mlp(D, 6, 3)
    assert set(map(tuple, reasons(model, lambda: model(X[:0]).sum()).values())) == {("no elements",)}
    w, u = Tensor(random.normal(size=(D, 3)), requires_grad=True), Tensor(np.ones(3), requires_grad=True)
    both = {"w": w, "u": u}
    dead = reasons(both, lambda: checkpoint(lambda w: (w - 9.0).relu(), w).sum() + u.sum())
    assert dead == {"w": ["inside a checkpoint"]}
    with w.register_hook(lambda g: g * 0.0):
        found = diagnose(both, lambda: (w.sum() + u).sum())
    assert [f.reason for f in found.faults] == ["zero"] and "a hook" in found.faults[0].words


def test_nan_is_left_to_detect_anomaly():
    w = Tensor([0.0, 1.0], requires_grad=True)
    found = diagnose({"w": w}, lambda: w.sqrt().sum())
    assert found.faults[0].reason == "not finite" and "detect_anomaly" in found.faults[0].advice


# ---- nothing changes


def test_nothing_changes():
    model, rng = Decoder(dropout=0.5), np.random.default_rng(4)
    dropped = nn.Dropout(0.5, rng)
    (model(IDS) ** 2).mean().backward()
    before = [(p.data.copy(), p.grad, p.grad.numpy().copy()) for p in model.parameters()]
    calls = []

    def loss():
        calls.append(np.random.random())
        manual_seed(99)
        model.zero_grad()
        return (dropped(model(IDS)) ** 2).mean()

    manual_seed(7)
    np.random.seed(7)
    expected = F.dropout(np.ones(50), 0.5).tolist(), np.random.random(), rng.bit_generator.state
    manual_seed(7)
    np.random.seed(7)
    diagnose(model, loss)
    assert (F.dropout(np.ones(50), 0.5).tolist(), np.random.random(), rng.bit_generator.state) == expected
    assert len(calls) == 1 and model.training
    for p, (values, g, numbers) in zip(model.parameters(), before, strict=True):
        assert np.array_equal(p.data, values) and p.grad is g and np.array_equal(g.numpy(), numbers)
        assert p._node.value is None


def test_a_recorded_loss_can_still_be_taken_backward():
    model = mlp(D, 6, 3)
    with recording():
        loss = target_loss(model, X)()
    assert not diagnose(model, loss).faults
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- the report, and bad input


def test_the_report_is_a_table_and_sentences():
    model = mlp(D, 6, 3)
    dict(model.named_parameters())["0.bias"].data[:] = -100
    text = str(diagnose(model, target_loss(model, X)))
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "shape", "|gradient|", "finding"]
    assert lines[1].split() == ["0.weight", "(6,", "8)", "0", "dead", "relu"]
    assert lines[4].endswith("learns") and "1 of 4 parameters learn" in lines[5]
    assert (
        " ".join(text.split()).count("all of its units are dead") == 1
        and "0.weight, 0.bias, 2.weight: dead relu" in text
    )
    assert max(map(len, lines)) <= 80


def test_bad_input_is_refused():
    model = mlp(D, 6, 3)
    with pytest.raises(TypeError, match="function that computes the loss"):
        diagnose(model, 3.0)
    with pytest.raises(TypeError, match="Module"):
        diagnose([1], lambda: Tensor(1.0))
    with pytest.raises(TypeError, match="returned float"):
        diagnose(model, lambda: 1.0)
    with pytest.raises(TypeError, match=r"optimiser of nn.optim.*got int"):
        diagnose(model, target_loss(model, X), optimizer=5)
    with pytest.raises(RuntimeError, match="recording"):
        diagnose(model, target_loss(model, X)())
    with pytest.raises(ValueError, match=r"the loss has shape \(3, 5, 3\); it is one number"):
        diagnose(model, lambda: model(X))
    with pytest.raises(KeyError, match=r"there are 0\.weight"):
        diagnose(model, target_loss(model, X)).for_("nobody")
