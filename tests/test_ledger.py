"""The gradient ledger: every entry evaluates to its contribution, and the sums are the gradients."""

import copy
import dataclasses
import json
import math
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest
from test_ops_table import DIFFERENTIABLE, every, floats_of, leaves, outputs

from tinygrad_qkv import Ledger, Tensor, dropout, grad, logaddexp, manual_seed, nn, recording
from tinygrad_qkv.autograd import record
from tinygrad_qkv.checks.gradient_checks import GradientError
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import optim


def leaf(*shape, name=None, dtype="float64", seed=0):
    t = Tensor(np.random.default_rng(seed).normal(size=shape), dtype, requires_grad=True)
    if name:
        t.name = name
    return t


def loss_of(row, inputs):
    """A scalar that sees each number of each output with another weight."""
    ys = outputs(row, inputs)
    parts = [(y * Tensor(np.cos(np.arange(y.size)).reshape(y.shape), y.dtype)).sum() for y in ys]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_fully(ledger, tensors):
    """All that the ledger promises, found again here, without its own check()."""
    used = set()
    for i, entry in enumerate(ledger):
        assert entry.number == i
        if entry.result is not None:
            used.add(entry.result)
        assert entry.into not in used, "a gradient was used before it was complete"
        if entry.formula is not None:
            found, scale = entry.evaluate(), np.max(np.abs(entry.value), initial=1.0)
            np.testing.assert_allclose(found, entry.value, rtol=1e-12, atol=1e-12 * scale)
    for tensor in tensors:
        if tensor.grad is not None:
            contributions = ledger.for_(tensor)
            total = contributions[0].value
            for entry in contributions[1:]:
                total = entry.value if entry.effect == "replaces" else total + entry.value
            assert same(np.asarray(total), tensor.grad.numpy()) and same(ledger.total(tensor), tensor.grad.numpy())
    assert ledger.check() <= 1e-12


def check_round_trip(ledger):
    text = ledger.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"bare {word} in the JSON"))
    again = Ledger.from_json(text)
    assert again.to_json() == text and str(again) == str(ledger)
    for a, b in zip(ledger, again, strict=True):
        assert str(a) == str(b) and same(a.value, b.value)
        assert a.formula is None or same(a.evaluate(), b.evaluate())
    assert again.check() == ledger.check()


# ---- every op


@every(DIFFERENTIABLE)
def test_every_op_evaluates_to_its_contribution_and_adds_up(row):
    xs = leaves(row, "float64")
    ledger = loss_of(row, xs).backward(trace=True)
    assert all(entry.formula for entry in ledger)
    check_fully(ledger, floats_of(xs))
    check_round_trip(ledger)


@every(DIFFERENTIABLE)
def test_tracing_changes_no_bit(row):
    for dtype in ("float32", "float64"):
        plain, traced = leaves(row, dtype), leaves(row, dtype)
        assert loss_of(row, plain).backward() is None
        assert loss_of(row, traced).backward(trace=True).check() < (1e-12 if dtype == "float64" else 1e-4)
        for x, y in zip(floats_of(plain), floats_of(traced), strict=True):
            assert (x.grad is None and y.grad is None) or same(x.grad.numpy(), y.grad.numpy())


@every(DIFFERENTIABLE)
def test_the_rules_of_a_second_order_evaluate_too(row):
    xs = leaves(row, "float64")
    loss = loss_of(row, xs)
    first = loss.backward(trace=True, create_graph=True)
    check_fully(first, floats_of(xs))
    gradients = [x.grad for x in floats_of(xs) if x.grad is not None and x.grad.requires_grad]
    if gradients:
        second = sum((g * g).sum() for g in gradients).backward(trace=True)
        assert all(entry.formula for entry in second) and second.check() <= 1e-12


KEEP = np.random.default_rng(1).random((2, 1, 5, 7)) < 0.6
KEEP[0, 0, 3] = False  # a query that may look at nothing
MASKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "attend": {"attend": KEEP},
    "lengths": {"lengths": np.array([4, 7])},
    "bias": {"bias": np.where(KEEP, 0.3, -np.inf)},
    "window": {"window": 2},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3},
    "all": {"attend": KEEP, "lengths": np.array([4, 7]), "is_causal": True, "softcap": 2.0, "dropout_p": 0.3},
}


@pytest.mark.parametrize("path", ["tensor", "fused"])
@pytest.mark.parametrize("heads", [6, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("behind", [0.0, np.nan])
def test_attention_evaluates_on_both_paths(path, heads, mask, behind):
    q, k, v = leaf(2, 6, 5, 3), leaf(2, heads, 7, 3, seed=1), leaf(2, heads, 7, 11, seed=2)
    if mask == "lengths" and behind:  # what is masked must not spoil the formulas either
        k.data[0, :, 4:], v.data[0, :, 4:] = behind, -np.inf
    out = F.scaled_dot_product_attention(q, k, v, path=path, **MASKS[mask])
    ledger = (out * out).sum().backward(trace=True)
    assert ("attention" in {entry.op for entry in ledger}) == (path == "fused")
    check_fully(ledger, [q, k, v])
    check_round_trip(ledger)


# ---- what an entry says


def head():
    """One attention head with named tensors: 0.5 * sum((softmax(Q @ K.T) @ V) ** 2)."""
    X, W_Q, W_K = leaf(5, 3, name="X"), leaf(3, 2, name="W_Q", seed=1), leaf(3, 2, name="W_K", seed=2)
    Q, K = X @ W_Q, X @ W_K
    Q.name, K.name = "Q", "K"
    A = (Q @ K.T).softmax(-1)
    return X, W_Q, W_K, ((A @ X).square()).sum() * 0.5


def test_an_entry_knows_its_op_its_tensors_and_its_numbers():
    X, W_Q, _, loss = head()
    ledger = loss.backward(trace=True)
    (entry,) = ledger.for_("W_Q")
    assert (entry.op, entry.result, entry.operand, entry.operand_name, entry.into) == ("matmul", "Q", 1, "b", "W_Q")
    assert (entry.effect, entry.formula, entry.named) == ("starts", "db = a.T @ g", "dW_Q = X.T @ dQ")
    assert entry.latex == r"\mathrm{d}W_{Q} = X^{\top} \, \mathrm{d}Q"
    assert list(entry.factors) == ["g", "a"] and entry.factors["a"].tensor == "X"
    assert np.array_equal(entry.factors["a"].value, X.numpy()) and entry.factors["a"].shape == (5, 3)
    assert same(entry.factors["g"].value, ledger.total("Q"))
    assert entry.shape == (3, 2) and entry.norm == pytest.approx(np.linalg.norm(W_Q.grad.numpy()), rel=1e-14)
    assert repr(entry) == f"<Entry {entry.number} matmul: dW_Q = X.T @ dQ, starts W_Q>"


def test_the_first_entry_is_the_gradient_that_the_pass_begins_with():
    x = leaf(2, 3, name="x")
    given = np.arange(6.0).reshape(2, 3)
    ledger = (x * 2.0).backward(given, trace=True)
    assert (ledger[0].op, ledger[0].formula, ledger[0].result) == ("backward", "dL = gradient", None)
    assert np.array_equal(ledger[0].evaluate(), given) and np.array_equal(ledger.total("x"), 2 * given)
    first = (x * x).sum().backward(trace=True)[0]
    assert (first.formula, first.evaluate()) == ("dL = 1", 1)
    x.sum().backward(trace=True)
    scalar = Tensor(3.0, requires_grad=True)
    assert len(scalar.backward(trace=True)) == 1 and scalar.grad.item() == 1


def test_three_uses_are_three_contributions_in_the_order_in_which_they_came():
    X, _, _, loss = head()
    ledger = loss.backward(trace=True)
    assert [entry.effect for entry in ledger.for_(X)] == ["starts", "accumulates into", "accumulates into"]
    assert [entry.named for entry in ledger.for_(X)] == [
        "db = a.T @ g".replace("db", "dX"),
        "dX = dK @ W_K.T",
        "dX = dQ @ W_Q.T",
    ]
    check_fully(ledger, [X])


def test_one_op_with_the_same_tensor_twice_gives_two_contributions():
    x = leaf(3, name="x")
    contributions = (x * x).sum().backward(trace=True).for_(x)
    assert [(entry.operand_name, entry.effect) for entry in contributions] == [
        ("a", "starts"),
        ("b", "accumulates into"),
    ]


def test_tensors_without_a_name_are_numbered_from_0_in_the_order_of_the_forward_pass():
    found = []
    for _ in range(2):  # whatever ran before
        x = leaf(2, 5)
        ledger = ((x * 2.0).exp() * x).sum().backward(trace=True)
        found.append(ledger.tensors)
    assert found[0] == found[1] == ("sum#4 ()", "mul#3 (2, 5)", "exp#2 (2, 5)", "leaf#0 (2, 5)", "mul#1 (2, 5)")


def test_two_tensors_of_one_name_stay_two():
    a, b = leaf(3, name="w"), leaf(3, name="w", seed=1)
    ledger = (a * b).sum().backward(trace=True)
    assert {"w#0 (3,)", "w#1 (3,)"} < set(ledger.tensors)
    assert np.array_equal(ledger.total(a), b.numpy())


def test_module_paths_and_source_lines():
    manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.MultiHeadAttention(5, 1))
    x = Tensor(np.ones((2, 3)), "float32")
    plain = model(x).sum().backward(trace=True)
    assert {entry.path for entry in plain} >= {None, "0", "1"} and {entry.line for entry in plain} == {None}
    with recording():
        ledger = model(x).sum().backward(trace=True)
    lines = {entry.line for entry in ledger if entry.result is not None}
    assert all(Path(__file__).name in line for line in lines)
    assert {entry.op for entry in ledger.in_module("0")} == {"affine"} or ledger.in_module("0")
    assert "test_ledger.py:" in str(ledger) and " module " in str(ledger).splitlines()[2]


def test_the_numbers_are_copies_one_for_each_array():
    w = nn.Parameter(np.arange(1.0, 4.0), "float64")
    x = Tensor([2.0, 3.0, 5.0], "float64")
    loss = (w * x).sum() + (w * w).sum()
    ledger = loss.backward(trace=True)
    text = ledger.to_json()
    optim.SGD([w], lr=1.0).step()
    w.grad.data[:] = 7
    x.data[:] = 0
    assert ledger.to_json() == text
    copies = {id(f.value) for e in ledger for f in e.factors.values() if np.array_equal(f.value, [1.0, 2.0, 3.0])}
    assert len(copies) == 1
    with pytest.raises(ValueError, match="read-only"):
        ledger[0].value[...] = 0


def test_a_ledger_keeps_no_graph_alive():
    x = leaf(3)
    h = x * 2.0
    ledger = h.sum().backward(trace=True, retain_graph=True)
    node = weakref.ref(h._node)
    assert np.array_equal(ledger.total(h), np.ones(3))
    del h
    assert node() is None and len(ledger) == 3


# ---- hooks


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_hook_that_changes_a_gradient_has_an_entry(create_graph):
    x = leaf(3, name="x")
    h = x * 2.0
    h.name = "h"
    h.register_hook(lambda g: None)
    h.register_hook(lambda g: g * 10.0)
    x.register_hook(lambda g: g + 1.0)
    ledger = (h * h + h).sum().backward(trace=True, create_graph=create_graph)
    (hook,) = ledger.for_("h").of_op("hook")
    assert (hook.effect, hook.formula) == ("replaces", None) and "a hook changed it" in str(ledger)
    assert np.array_equal(hook.value, 10 * hook.factors["before"].value)
    check_fully(ledger, [x])
    check_round_trip(ledger)
    assert np.array_equal(ledger.total("h"), hook.value)
    with pytest.raises(ValueError, match="a hook is code of its own"):
        hook.evaluate()
    assert "hook on h" in str(hook)


def test_hooks_of_modules_have_entries_too():
    manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[1].register_backward_hook(lambda module, grad_input, grad_output: tuple(g * 3.0 for g in grad_input))
    ledger = model(Tensor(np.ones((2, 3)), "float32")).sum().backward(trace=True)
    assert "hook" in {entry.op for entry in ledger} and ledger.check() < 1e-5
    assert same(ledger.total("0.weight"), model[0].weight.grad.numpy())


def test_a_hook_that_only_looks_on_has_none():
    x = leaf(3)
    x.register_hook(lambda g: None)
    assert "hook" not in {entry.op for entry in (x * x).sum().backward(trace=True)}


# ---- filters


def model_ledger():
    manual_seed(0)
    model = nn.Sequential(nn.MultiHeadAttention(6, 2), nn.Linear(6, 3), nn.MultiHeadAttention(3, 1))
    x = Tensor(np.random.default_rng(0).normal(size=(2, 5, 6)), "float32")
    return model, model(x).square().mean().backward(trace=True)


def test_a_name_that_two_tensors_have_means_both():
    a, b = leaf(3, name="in.w"), leaf(3, name="in.w", seed=1)
    ledger = (a * b).sum().backward(trace=True)
    assert ledger.for_("w").tensors == ledger.for_("in.w").tensors == ("in.w#0 (3,)", "in.w#1 (3,)")
    with pytest.raises(ValueError, match=r"'w' may be in.w#0 \(3,\), in.w#1 \(3,\)"):
        ledger.total("w")


def test_a_ledger_is_copied_and_pickled():
    q = Tensor(np.random.default_rng(0).normal(size=(1, 2, 3, 5)), requires_grad=True)
    q.name = "q"
    keep = np.tri(3, dtype=bool)
    ledger = F.scaled_dot_product_attention(q, q, q, attend=keep, path="fused").sum().backward(trace=True)
    again = pickle.loads(pickle.dumps(ledger))
    assert str(again) == str(ledger) and again.check() == ledger.check()
    assert same(again.total("q"), ledger.total("q"))
    assert same(copy.deepcopy(ledger).total(q), ledger.total(q))


def test_a_tensor_is_found_by_name_by_the_end_of_its_path_and_by_itself():
    model, ledger = model_ledger()
    assert [entry.into for entry in ledger.for_("0.W_Q")] == ["0.W_Q"]
    assert {entry.into for entry in ledger.for_("W_Q")} == {"0.W_Q", "2.W_Q"}
    assert [entry.into for entry in ledger.for_(model[2].W_Q)] == ["2.W_Q"]
    label = ledger[3].into
    assert " (" in label and list(ledger.for_(label.split(" ")[0])) == list(ledger.for_(label)) != []
    with pytest.raises(ValueError, match=r"'W_Q' may be 2.W_Q, 0.W_Q; total\(\) is of one tensor"):
        ledger.total("W_Q")
    assert ledger.totals().keys() == set(ledger.tensors)
    assert same(ledger.totals()["0.W_Q"], model[0].W_Q.grad.numpy())


def test_the_way_to_a_tensor_is_what_its_gradient_was_made_of():
    model, ledger = model_ledger()
    way = ledger.way_to("2.W_Q")
    assert way[0].op == "backward" and way[-1].into == "2.W_Q" and len(way) < len(ledger)
    assert not {entry.into for entry in way} & {"0.W_Q", "2.W_V", "1.weight"}
    numbers = [entry.number for entry in way]
    assert numbers == sorted(numbers)
    deep = ledger.way_to(model[0].W_K)
    assert {"2.W_Q", "2.W_K"}.isdisjoint(deep.tensors) and {e.path for e in deep} == {None, "", "0", "1", "2"} - {""}
    assert deep.check() < 1e-5


def test_by_op_by_module_and_by_slice():
    _, ledger = model_ledger()
    assert {entry.op for entry in ledger.of_op("softmax")} == {"softmax"} and len(ledger.of_op("softmax")) == 2
    assert {entry.path for entry in ledger.in_module("0")} == {"0"}
    assert len(ledger.in_module("")) == sum(entry.path is not None for entry in ledger)
    part = ledger[2:5]
    assert isinstance(part, Ledger) and [entry.number for entry in part] == [2, 3, 4]
    assert ledger[-1] is list(ledger)[-1]


def test_module_10_does_not_lie_in_module_1():
    manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
    ledger = model(Tensor([[1.0, 2.0]])).sum().backward(trace=True)
    assert {entry.path for entry in ledger.in_module("1")} == {"1"}


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda ledger: ledger.for_("W_P"), r"no tensor 'W_P' in this ledger; it has W_[QKVO], W_"),
        (lambda ledger: ledger.way_to("0.W_q"), r"no tensor '0.W_q' in this ledger; it has 0.W_Q"),
        (lambda ledger: ledger.of_op("matmull"), "no op 'matmull' in this ledger; it has matmul"),
        (lambda ledger: ledger.in_module("9"), "no module '9' in this ledger; it has , 0, 1, 2"),
        (lambda ledger: ledger.total(leaf(2, 3)), r"no gradient arrived at this tensor of shape \(2, 3\)"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_near_names(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(model_ledger()[1])


# ---- to read


def test_the_table_has_a_line_for_each_entry_and_keeps_its_width():
    ledger = head()[-1].backward(trace=True)
    lines = str(ledger).splitlines()
    assert lines[0] == f"{len(ledger)} contributions to the gradients of {len(ledger.tensors)} tensors"
    assert len(lines) == 3 + len(ledger)
    assert any(line.split()[1:8] == ["matmul", "Q", "dW_Q", "=", "X.T", "@", "dQ"] for line in lines)
    for width in (60, 78, 120):
        assert max(map(len, ledger.table(width=width).splitlines())) <= width


def test_a_long_ledger_is_shortened_and_says_so():
    x = leaf(3)
    y = x
    for _ in range(50):
        y = y * 1.01
    ledger = y.sum().backward(trace=True)
    lines = ledger.table(limit=7).splitlines()
    assert len(lines) == 3 + 7 + 1 and "... 45 more; table(limit=...) shows them" in lines[7]
    assert lines[6].split()[0] == "3" and lines[8].split()[0] == "49"
    assert len(ledger.table(limit=52).splitlines()) == 3 + 52
    assert len(ledger.table(limit=1).splitlines()) == 3 + 1 + 1


def test_an_entry_is_printed_with_every_number(capsys):
    *_, loss = head()
    (entry,) = loss.backward(trace=True).for_("W_Q")
    text = str(entry)
    for part in ("db = a.T @ g", "dW_Q = X.T @ dQ", "g (5, 2) float64, the gradient of Q", "a (5, 3) float64, X"):
        assert part in text
    assert f"{entry.value[2, 1]:.4f}" in text and f"{entry.factors['a'].value[4, 2]:.4f}" in text
    entry.show(digits=2)
    assert f"{entry.value[2, 1]:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scale", "shown"), [(1e-9, "[5.0e-10 1.5e-09]"), (1e9, "[5.0e+08 1.5e+09]"), (1.0, "[0.5 1.5]")]
)
def test_numbers_far_from_1_keep_their_digits(scale, shown):
    x = leaf(2, name="x")
    assert shown in str((x * Tensor([0.5 * scale, 1.5 * scale], "float64")).sum().backward(trace=True)[-1])


def test_large_arrays_are_summarised():
    x = leaf(200, 30, name="x")
    y = leaf(7, 11, 13, seed=1)
    text = str((x * x).sum().backward(trace=True)[-1]) + str((y * y).sum().backward(trace=True)[-1])
    assert len(text.splitlines()) < 45 and text.count("from -") >= 4 and "mean" in text


# ---- JSON


def test_every_kind_of_factor_survives_json():
    def op(x):
        saved = (x, np.array([True, False, True]), np.array([1, -(2**62)]), (1, slice(None, 3, 2), ...), None)
        more = (
            [2.5, float("nan")],
            float("-inf"),
            2**63 + 5,
            True,
            np.float32(0.1),
            np.array(-0.0, np.float32),
            object,
        )
        rule = lambda g, x, a, b, c, d, e, f, h, i, j, k, l: g * x  # noqa: E731, E741
        return record(x.data * 2.0, "op", (x,), (*saved, *more), (rule,))

    x = Tensor([1.0, math.nan, -math.inf], "float64", requires_grad=True)
    ledger = op(x).backward(np.ones(3), trace=True)
    again = Ledger.from_json(ledger.to_json())
    for name, factor in ledger[1].factors.items():
        other = again[1].factors[name].value
        assert type(other) is type(factor.value) and repr(other) == repr(factor.value)
    np.testing.assert_array_equal(again.total("leaf#0"), [1.0, math.nan, -math.inf])
    assert np.signbit(again[1].factors["k"].value)


def test_an_array_stands_in_the_json_once():
    ledger = head()[-1].backward(trace=True)
    used = [e.value for e in ledger] + [f.value for e in ledger for f in e.factors.values() if f.shape is not None]
    distinct = len({id(array) for array in used})
    assert len(json.loads(ledger.to_json())["arrays"]) == distinct < len(used)


def test_nan_and_inf_evaluate_to_nan_and_inf():
    x = Tensor([0.0, 4.0, -1.0], "float64", requires_grad=True)
    with np.errstate(invalid="ignore"):
        ledger = x.sqrt().sum().backward(trace=True)
    assert ledger.check() == 0
    np.testing.assert_array_equal(ledger.total(x), [np.inf, 0.25, np.nan])
    check_round_trip(ledger)


def test_the_formula_of_logaddexp_holds_where_both_operands_are_minus_inf():
    a, b = Tensor([-np.inf, 0.0, -np.inf], requires_grad=True), Tensor([-np.inf, -np.inf, 2.0], requires_grad=True)
    ledger = logaddexp(a, b).sum().backward(trace=True)
    ledger.check()
    assert a.grad.tolist() == [0, 1, 0] and b.grad.tolist() == [0, 0, 1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', '{"format": "gradient ledger 1"}', "nonsense"])
def test_other_text_is_no_ledger(text):
    with pytest.raises(ValueError, match="not a gradient ledger as to_json"):
        Ledger.from_json(text)


def test_a_ledger_from_json_is_filtered_by_name_only():
    X, *_, loss = head()
    ledger = Ledger.from_json(loss.backward(trace=True).to_json())
    assert len(ledger.for_("X")) == 3 and len(ledger.way_to("W_Q")) > 5
    with pytest.raises(ValueError, match="knows tensors by their labels only"):
        ledger.for_(X)


# ---- ops of users


def test_an_op_without_a_formula_says_so():
    x = leaf(3, name="x")
    y = record(x.data**3, "cube", (x,), (x, 3), (lambda g, *saved: 3 * g * saved[0] ** 2,))
    ledger = y.sum().backward(trace=True)
    entry = ledger[-1]
    assert (entry.formula, entry.latex, entry.named, entry.operand_name) == (None, None, None, None)
    assert list(entry.factors) == ["g", "saved1", "saved2"] and np.array_equal(entry.factors["saved1"].value, x.numpy())
    with pytest.raises(ValueError, match="op 'cube' states no formula"):
        entry.evaluate()
    assert ledger.check() == 0 and "(none stated)" in str(ledger) and "states no formula" in str(entry)
    check_round_trip(ledger)


def test_a_formula_need_not_read_g_and_may_name_the_gradient_as_it_likes():
    x = leaf(3, name="x")
    y = record(x.data * 2.0, "op", (x,), (x,), (lambda g, x: x * 2,), ("grad_x = 2 * x",))
    ledger = y.sum().backward(trace=True)
    assert ledger.check() == 0 and list(ledger[-1].factors) == ["g", "x"]
    assert (ledger[-1].target, ledger[-1].operand_name, ledger[-1].named) == ("grad_x", "grad_x", "dx = 2 * x")


# ---- the checks can fail


def test_a_wrong_formula_is_found():
    x = leaf(3)
    y = record(x.data**3, "cube", (x,), (x,), (lambda g, x: 3 * g * x**2,), ("dx = 3 * g * x",))
    with pytest.raises(GradientError, match=r"cube: dx = 3 \* g \* x.*numbers that differ by"):
        y.sum().backward(trace=True).check()


def test_a_formula_that_is_almost_right_is_found():
    x = leaf(3)
    y = record(x.data * 3.0, "triple", (x,), (), (lambda g: g * (3 + 1e-10),), ("dx = 3 * g",))
    with pytest.raises(GradientError, match="triple"):
        y.sum().backward(trace=True).check()


def test_a_formula_that_is_finite_where_the_rule_is_not_is_found():
    x = Tensor([0.0], "float64", requires_grad=True)
    y = record(np.sqrt(x.data), "root", (x,), (x,), (lambda g, x: g / (2 * np.sqrt(x)),), ("dx = g * x",))
    with pytest.raises(GradientError, match="differ by inf"):
        y.sum().backward(trace=True).check()


def test_a_rule_that_writes_into_its_gradient_is_found():
    def doubled(g):
        g *= 2
        return g

    x = leaf(3)
    y = record(x.data * 2.0, "twice", (x,), (), (doubled,), ("dx = g",))
    with pytest.raises(GradientError, match=r"twice: dx = g.*: its g is not the sum of what had arrived at twice"):
        (y * 3.0).sum().backward(trace=True).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries[:3] + entries[4:], "is not the sum of what had arrived"),
        (lambda entries: [*entries[:-3], entries[-1], *entries[-3:-1]], "is not the sum of what|was used"),
        (lambda entries: [*entries, dataclasses.replace(entries[1], number=99)], "comes after the gradient of"),
    ],
)
def test_a_missing_or_misplaced_entry_is_found(change, message):
    x = leaf(3)
    h = x * 2.0
    ledger = (h * h + h.exp()).sum().backward(trace=True)
    assert ledger.check() <= 1e-12
    with pytest.raises(GradientError, match=message):
        Ledger(change(list(ledger))).check()


def test_without_trace_nobody_looks_on(monkeypatch):
    monkeypatch.setattr("tinygrad_qkv.ledger.keeper.LedgerKeeper.__init__", lambda self: pytest.fail("looked on"))
    assert leaf(3).sum().backward() is None


def test_nothing_is_lost_when_the_pass_is_refused():
    x = leaf(3)
    y = (x * x).sum()
    with pytest.raises(ValueError, match="gradient of shape"):
        y.backward(np.ones(3), trace=True)
    assert x.grad is None and len(y.backward(trace=True)) == 4


def test_gradients_add_up_over_passes_and_each_ledger_has_its_own():
    x = leaf(3)
    for k in (1, 2):
        ledger = (x * x).sum().backward(trace=True)
        assert np.array_equal(ledger.total(x), 2 * x.numpy()) and np.array_equal(x.grad.numpy(), k * 2 * x.numpy())


def test_dropout_shows_its_mask_in_the_formula():
    manual_seed(0)
    x = leaf(5, 7)
    ledger = dropout(x, 0.5).sum().backward(trace=True)
    assert "kept(g, p, seed)" in ledger[-1].formula and ledger.check() == 0
    assert grad(x.sum(), x)[0].numpy().all()
