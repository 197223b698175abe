"""`detect_anomaly()`: the first op or rule that makes a NaN or an inf is named, and nothing else is."""

import asyncio
import contextlib
import threading
from pathlib import Path

import numpy as np
import op_rows_attention
import op_rows_elementwise
import op_rows_reductions
import op_rows_shapes
import pytest
from op_table import is_leaf

from tinygrad_qkv import (
    AnomalyError,
    Tensor,
    checkpoint,
    cross_entropy,
    detect_anomaly,
    exp,
    grad,
    log,
    matmul,
    nn,
    no_grad,
    record,
    recording,
    softmax,
    where,
)
from tinygrad_qkv.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


ROWS = [*op_rows_attention.ROWS, *op_rows_elementwise.ROWS, *op_rows_reductions.ROWS, *op_rows_shapes.ROWS]


def leaf(values):
    return Tensor(np.asarray(values, np.float64), requires_grad=True)


def caught(f, **options):
    """The error that f raises under detect_anomaly."""
    with pytest.raises(AnomalyError) as error, detect_anomaly(**options):
        f()
    return error.value


def words_of(error):
    """What it says, without the line breaks."""
    return " ".join(str(error).split())


# ---- forward


def test_of_two_roots_the_inner_one_is_blamed_with_its_operand():
    x = leaf([[3.0, 4, 1], [5, 6, 7]])
    error = caught(lambda: (x - 2).sqrt().sqrt().sum().backward())
    assert (error.phase, error.op, error.bad, error.operand, error.index) == ("forward", "sqrt", "NaN", 0, (0, 2))
    text = words_of(error)
    assert (
        "operand 0 (made by op 'sub' at " in text
        and f"{Path(__file__).name}:" in text
        and "is -1.0 at index (0, 2)" in text
    )
    assert "(2, 3) float64 -> (2, 3) float64, 1 of 6 elements NaN" in text
    assert "(x - 2).sqrt().sqrt()" in text  # the line itself
    assert "square root of a negative number" in error.cause
    assert x.grad is None


FORWARD = {
    "log of 0": (lambda x: log(x), [3.0, 0.0], "log", "-inf", (1,), "logarithm of 0"),
    "log of a negative number": (lambda x: log(x), [3.0, 0.0, -2.0], "log", "NaN", (2,), "negative number"),
    "0 / 0": (lambda x: 0.0 / x, [3.0, 0.0], "div", "NaN", (1,), "0 / 0"),
    "1 / 0": (lambda x: 1.0 / x, [3.0, 0.0], "div", "inf", (1,), "divided by 0"),
    "exp": (lambda x: exp(x), [3.0, 1000.0], "exp", "inf", (1,), "exp overflows"),
    "inf - inf": (lambda x: x - x, [3.0, np.inf], "sub", "NaN", (1,), "inf - inf"),
    "0 * inf": (lambda x: x * 0.0, [3.0, -np.inf], "mul", "NaN", (1,), r"0 * inf"),
    "power": (lambda x: x**0.5, [3.0, -4.0], "pow", "NaN", (1,), "not whole"),
    "arcsin": (lambda x: np.arcsin(x), [0.3, 1.5], "arcsin", "NaN", (1,), "from -1 to 1"),
    "softmax": (lambda x: softmax(x), [-np.inf, -np.inf], "softmax", "NaN", (0,), "attend="),
    "square": (lambda x: x * x, [3.0, 1e200], "mul", "inf", (1,), "too large for float64"),
    "matmul": (lambda x: matmul(x[None], x), [3.0, 1e200], "matmul", "inf", (0, 1), "too large for float64"),
    "mean of nothing": (lambda x: x[:0].mean(), [3.0], "mean", "NaN", None, "of no elements"),
}


@pytest.mark.parametrize("case", FORWARD)
@pytest.mark.parametrize("graph", [True, False])
def test_an_op_is_named_with_its_cause(case, graph):
    f, values, op, bad, index, words = FORWARD[case]
    x = leaf(values)
    with contextlib.nullcontext() if graph else no_grad():
        error = caught(lambda: f(x))
    assert (error.phase, error.op, error.bad, error.index) == ("forward", op, bad, index)
    assert words in error.cause
    if case == "0 / 0":
        assert "operand 1" in words_of(error) and "operand 0 (a number) is 0.0" in words_of(error)


def test_without_inf_only_nan_is_looked_for():
    x = leaf([0.0, -1.0])
    with detect_anomaly(inf=False):
        exp(x * 1e4 - log(x * x))
    error = caught(lambda: log(x), inf=False)
    assert error.bad == "NaN"
    with detect_anomaly(), detect_anomaly(inf=False):  # the innermost one counts
        log(x * x)


def test_the_choice_of_inf_holds_in_a_decorated_function():
    assert detect_anomaly(inf=False)(log)(leaf([0.0])).tolist() == [-np.inf]


def test_an_error_in_the_block_is_not_hidden_by_nan_that_came_in():
    kept = []
    with pytest.raises(KeyError), detect_anomaly():
        kept.append(leaf([np.nan]) * 2.0)
        raise KeyError("mine")


def test_the_module_is_named():
    model = nn.TransformerBlock(6, 2)
    model.feed.forward = lambda x: log(x * 0.0)
    error = caught(lambda: model(np.ones((5, 6))))
    assert (error.op, error.module) == ("log", "feed") and "FeedForward" in words_of(error)


def test_an_op_of_the_users_own_is_named():
    error = caught(lambda: record(np.array([np.nan]), "mine", (leaf([2.0]),), (), (lambda g: g,)))
    assert error.op == "mine"
    error = caught(lambda: record(np.array(np.nan), "div", (leaf(2.0),), (), (lambda g: g,)))  # the name of another op
    assert error.op == "div" and error.operand == 0


# ---- what comes in


def test_a_parameter_that_holds_nan_is_named_at_once():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    model.parameters()
    weight = dict(model.named_parameters())["2.weight"]
    weight.data[1, 4] = np.nan
    error = caught(lambda: model(np.ones((7, 3))))
    assert (
        "the parameter '2.weight' holds NaN" in words_of(error) and error.op is None and "learning rate" in error.cause
    )


def test_a_parameter_that_has_grown_is_named_beside_the_op():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    weight = dict(model.named_parameters())["0.weight"]
    weight.data[:] = 1.0  # of any sign, every ReLU could be shut
    x = np.full((7, 3), 1e30, np.float32)
    assert "learning rate" not in caught(lambda: model(x) * 1e30).cause
    weight.data[:] = 1e20
    error = caught(lambda: model(x))
    assert error.op == "affine" and "the parameter '0.weight' (transposed) holds numbers up to 1.0e+20" in error.cause
    w = leaf([1e300])
    w.name = "w"
    assert "the parameter 'w' holds numbers up to 1.0e+300" in caught(lambda: w * w).cause


def test_nan_in_an_input_is_named_when_it_reaches_a_number_or_the_end():
    x, w = Tensor([[1.0, np.nan]]), leaf([[2.0, 3.0]])
    assert "an input or a constant holds NaN" in words_of(caught(lambda: (x * w).exp().sum()))
    assert "whose result leaves the block" in words_of(caught(lambda: setattr(test_the_module_is_named, "kept", x * w)))


def test_nan_in_an_input_is_named_when_it_reaches_a_gradient():
    x, w = leaf([[1.0], [np.nan]]), leaf([[2.0]])
    error = caught(lambda: (x @ w)[0].sum().backward())
    assert (error.phase, error.op, error.operand) == ("backward", "matmul", 1)
    assert "it reads operand 0" in words_of(error) and "is nan at index (1, 0)" in words_of(error)
    assert x.grad is None and w.grad is None


def test_a_tensor_that_was_bad_before_the_block_says_so():
    h = leaf([-1.0, 2.0]).sqrt()
    assert "made by op 'sqrt', outside of this block" in words_of(caught(lambda: (h * 2.0).sum()))


# ---- a loss that is NaN


def test_a_nan_loss_does_not_pass_when_only_backward_runs_inside():
    x = leaf([1.0, -2.0])
    loss = log(x).sum()
    error = caught(loss.backward)
    assert (error.op, error.operand, error.index) == ("log", 0, (1,)) and "made it" in words_of(error)
    assert x.grad is None
    loss.backward()  # nothing was lost
    assert x.grad.tolist() == [1.0, -0.5]


def test_the_record_tells_the_op_and_its_line_afterwards():
    x = leaf([1.0, -2.0])
    with recording():
        loss = (x.sqrt() * 3.0).exp().sum()
    error = caught(lambda: grad(loss, x))
    assert error.op == "sqrt" and Path(__file__).name in error.line and "is -2.0 at index (1,)" in words_of(error)


def test_where_the_graph_does_not_tell_the_report_says_how_to_learn_it():
    loss = (leaf([1.0, -2.0]) + 1.0).sin().sum() + Tensor(np.nan)
    assert "forward pass inside detect_anomaly()" in caught(loss.backward).cause
    x = leaf([1.0, -2.0])
    loss = ((x + 0.0).sqrt() * 2.0).sum()  # the root has kept its result, and not its operand
    error = caught(loss.backward)
    assert error.op == "sqrt" and "is the first known to hold it" in words_of(error)
    loss = (log((x + 2.0) * (x + 2.0)) * (x + 0.0).sqrt()).sum()  # an inf elsewhere is not where the NaN comes from
    assert caught(loss.backward, inf=False).op == "sqrt"


def test_an_infinite_loss_does_not_pass_either():
    logits = leaf([[1.0, -np.inf]])
    loss = cross_entropy(logits, np.array([1]))
    assert caught(loss.backward).bad == "inf"
    error = caught(lambda: cross_entropy(logits, np.array([1])))  # the -inf came from outside
    assert (error.op, error.bad, error.index) == ("cross_entropy", "inf", (0, 1)) and "closes the one" in error.cause
    with detect_anomaly():
        cross_entropy(logits, np.array([0])).backward()


# ---- backward


def test_the_rule_of_a_root_at_0_is_named_with_its_numbers():
    x = leaf([4.0, 0.0, 9.0])
    x.grad = np.ones(3)
    error = caught(lambda: (x * 1.0).sqrt().sum().backward())
    assert (error.phase, error.op, error.operand, error.bad, error.index) == ("backward", "sqrt", 0, "inf", (1,))
    text = words_of(error)
    assert "the rule of op 'sqrt' for its operand 0" in text and "dx = g / (2 * y)" in text
    assert "g = 1.0, y = 0.0 (the result)" in text and "made by op 'mul'" in text
    assert Path(__file__).name in error.line and "slope of sqrt at 0" in error.cause
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_where_after_the_root_is_the_classic_nan():
    x = leaf([4.0, 0.0])
    error = caught(lambda: where(np.array([True, False]), x.sqrt(), 0.0).sum().backward())
    assert (error.op, error.bad, error.index) == ("sqrt", "NaN", (1,)) and "g = 0.0, y = 0.0" in words_of(error)


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_accumulation_that_overflows_is_named(create_graph):
    x = leaf([2.0, 3.0])
    h = x * 1e-300
    with detect_anomaly():
        total = (h * 1e308).sum() + (h * 1e308).sum()
    error = caught(lambda: total.backward(create_graph=create_graph))
    assert "the sum of the contributions to one gradient overflows to inf" in words_of(error)
    assert error.phase == "backward" and "1e+308 had arrived" in words_of(error)
    assert x.grad is None


def test_the_sum_at_a_leaf_is_judged_too():
    x = leaf([2.0e-300])
    with detect_anomaly():
        total = (x * 1e308 + x * 1e308).sum()
    assert "sum of the contributions" in words_of(caught(total.backward))


def test_a_rule_is_named_under_create_graph_too_and_not_the_ops_in_it():
    x = leaf([4.0, 0.0])
    error = caught(lambda: x.sqrt().sum().backward(create_graph=True))
    assert (error.phase, error.op, error.bad) == ("backward", "sqrt", "inf")


def test_the_second_backward_is_judged():
    x = leaf([0.0])
    with detect_anomaly():
        (dx,) = grad((x**1.5).sum(), x, create_graph=True)
    error = caught(lambda: dx.sum().backward())
    assert (error.phase, error.op) == ("backward", "pow")


def test_a_hook_and_a_seed_are_named():
    x = leaf([1.0, 2.0])
    h = x * 2.0
    with h.register_hook(lambda g: g * np.nan):
        assert "a hook returned" in words_of(caught(lambda: h.sum().backward()))
    assert "was given" in words_of(caught(lambda: (x * 3.0).backward(np.array([1.0, np.nan]))))
    assert x.grad is None
    h.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_an_op_inside_a_checkpoint_is_named_in_backward_too():
    x = leaf([0.0, 4.0])

    def root(x):
        return (x * 2.0).sqrt()

    for f in (root, lambda x: (x, root(x))[1], lambda x: checkpoint(root, x)):
        error = caught(lambda f=f: checkpoint(f, x).sum().backward())
        assert (error.phase, error.op, error.index, error.bad) == ("backward", "sqrt", (0,), "inf")
        assert Path(__file__).name in error.line and "made by op 'mul'" in words_of(error)
    y = checkpoint(root, x).sum()
    assert caught(y.backward).op == "sqrt"  # only backward inside
    y.backward()
    assert x.grad.tolist() == [np.inf, pytest.approx(np.sqrt(2) / 4)]
    assert caught(lambda: checkpoint(lambda x: log(x), x)).op == "log"


# ---- no false alarm


@pytest.mark.parametrize("row", [r for r in ROWS if r.gradient], ids=str)
def test_the_table_of_ops_gives_no_alarm(row):
    inputs = [Tensor(x, requires_grad=True) if is_leaf(x) else x for x in row.inputs]
    with detect_anomaly():
        out = row.call(*inputs)
        outs = out if isinstance(out, (tuple, list)) else [out]
        outs[0].sum().backward()


random = np.random.default_rng(7)
B, H, T, S, D = 2, 4, 5, 7, 3
BIAS = np.where(random.random((H, T, S)) < 0.4, -np.inf, random.normal(size=(H, T, S)))
BIAS[:, 1] = -np.inf  # a row that sees nothing
WORDS = {
    "none": {},
    "attend": {"attend": random.random((B, 1, T, S)) < 0.4},
    "nothing": {"attend": np.zeros((T, S), bool)},
    "ignore": {"ignore": random.random((T, S)) < 0.7},
    "bias": {"bias": BIAS},
    "lengths": {"lengths": np.array([0, 4])},
    "causal": {"is_causal": True},
    "window": {"window": 1, "is_causal": True},
    "positions": {"is_causal": True, "q_positions": np.arange(T) - 2, "k_positions": np.arange(S)},
    "sink": {"sink": np.zeros(H), "lengths": np.array([0, 4])},
    "softcap": {"softcap": 2.0, "is_causal": True},
    "dropout": {"dropout_p": 0.5, "is_causal": True},
}


@pytest.mark.parametrize("path", ["tensor", "fused"])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_no_mask_of_attention_gives_an_alarm(word, path, create_graph):
    q, k, v = (leaf(random.normal(size=(B, heads, n, D))) for heads, n in ((H, T), (2, S), (2, S)))
    words = {name: leaf(x) if name in ("bias", "sink") else x for name, x in WORDS[word].items()}
    with detect_anomaly():
        out, _ = F.scaled_dot_product_attention(q, k, v, path=path, need=("weights", "scores", "logsumexp"), **words)
        (out * out).sum().backward(create_graph=create_graph)


@pytest.mark.parametrize("path", ["scalar", "tensor", "fused"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_behind_a_mask_gives_no_alarm(path, value):
    q, k, v = (random.normal(size=(B, H, n, D)) for n in (T, S, S))
    k[1, :, 4:] = v[1, :, 4:] = value
    q, k, v = leaf(q), leaf(k), leaf(v)
    with detect_anomaly():
        out = F.scaled_dot_product_attention(q, k, v, lengths=np.array([S, 4]), path=path)
        (out * out).sum().backward()
    attention = nn.MultiHeadAttention(6, 2)
    memory = random.normal(size=(B, S, 6))
    memory[1, 4:] = value
    with detect_anomaly():
        out = attention(random.normal(size=(B, T, 6)), memory, lengths=np.array([S, 4]), path=path)
        (out * out).sum().backward()


def test_nan_that_is_not_behind_the_mask_gives_one():
    q, k, v = (random.normal(size=(B, H, n, D)) for n in (T, S, S))
    v[0, 0, 0, 0] = np.nan
    error = caught(lambda: F.scaled_dot_product_attention(leaf(q), leaf(k), leaf(v), lengths=[S, 4]).sum())
    assert "holds NaN" in words_of(error)


def test_the_bits_are_those_of_an_ordinary_pass():
    model, x = nn.TransformerBlock(6, 2), random.normal(size=(3, 5, 6))
    grads = []
    for context in (contextlib.nullcontext(), detect_anomaly()):
        model.zero_grad()
        with context:
            (model(x, is_causal=True) ** 2).sum().backward()
        grads.append([p.grad.numpy().copy() for p in model.parameters()])
    assert all(np.array_equal(a, b) for a, b in zip(*grads, strict=True))


# ---- threads, tasks, generators


def test_it_is_a_decorator_of_functions_and_generators():
    @detect_anomaly()
    def bad(x):
        return log(x)

    @detect_anomaly
    def good(x):
        yield log(x)
        yield log(x - 1.0)

    with pytest.raises(AnomalyError):
        bad(leaf([0.0]))
    items = good(leaf([1.0]))
    assert next(items).tolist() == [0.0]
    log(leaf([0.0]))  # between two items the caller is on its own
    with pytest.raises(AnomalyError):
        next(items)
    log(leaf([0.0]))


def test_it_holds_for_its_own_thread_and_task():
    results = []
    with detect_anomaly():
        thread = threading.Thread(target=lambda: results.append(log(leaf([0.0])).tolist()))
        thread.start()
        thread.join()
    assert results == [[-np.inf]]

    async def one(inside):
        with detect_anomaly() if inside else contextlib.nullcontext():
            await asyncio.sleep(0)
            return log(leaf([0.0])).tolist()

    async def both():
        return await asyncio.gather(one(True), one(False), return_exceptions=True)

    first, second = asyncio.run(both())
    assert isinstance(first, AnomalyError) and second == [-np.inf]


def test_nothing_is_kept_alive():
    watch = detect_anomaly()
    with watch:
        for _ in range(10):
            x = leaf([1.0])
            (x * 2.0).sum().backward()
            with no_grad():
                x + 1.0
    assert len(watch._made) <= 1


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="decorates a function"):
        detect_anomaly(3)
