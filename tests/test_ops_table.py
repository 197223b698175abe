"""Every row of the table of ops: value, gradient, second order, precision, and the formula beside the rule."""

import ast
import dis
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import op_rows_attention
import op_rows_elementwise
import op_rows_reductions
import op_rows_shapes
import pytest
from op_table import NOT_OPS, PRIVATE, Row, is_leaf, normal

from tinygrad_qkv import GradientError, Tensor, check_grad, check_grad_grad, check_jvp, grad, hvp, ops, vjp
from tinygrad_qkv.autograd import OUTPUT, Node, ancestry, record
from tinygrad_qkv.formulas import evaluate, rule_values

ROWS = [*op_rows_attention.ROWS, *op_rows_elementwise.ROWS, *op_rows_reductions.ROWS, *op_rows_shapes.ROWS]
DIFFERENTIABLE = [row for row in ROWS if row.gradient]


def every(rows: list) -> Any:
    return pytest.mark.parametrize("row", rows, ids=str)


def listed(y: Any) -> list:
    return list(y) if isinstance(y, (list, tuple)) else [y]


def leaves(row: Row, dtype: str) -> list:
    """The inputs of a row, float arrays as leaves of `dtype`."""
    return [Tensor(x, dtype, requires_grad=row.gradient) if is_leaf(x) else x for x in row.inputs]


def floats_of(inputs: list) -> list[Tensor]:
    return [x for x in inputs if isinstance(x, Tensor)]


def outputs(row: Row, inputs: list) -> list[Tensor]:
    return listed(row.call(*inputs))


def floats_only(row: Row) -> Any:
    """The outputs of a row as a function of its float inputs."""

    def f(*xs: Tensor) -> list[Tensor]:
        remaining = iter(xs)
        return outputs(row, [next(remaining) if is_leaf(x) else x for x in row.inputs])

    return f


def nodes(results: list[Tensor]) -> list[Node]:
    """The ops that made the results."""
    return [node for node in ancestry([y._node for y in results]) if not node.is_leaf]


def saved_values(node: Node) -> list[Any]:
    """What backward would hand to the rules of a node."""
    return [node.output if s is OUTPUT else s._data if isinstance(s, Tensor) else s for s in node.saved]


def incoming(node: Node) -> np.ndarray:
    """Some gradient of a node's result."""
    g = np.random.default_rng(node.shape).normal(size=node.shape)
    return np.asarray(g, dtype=node.dtype)


def pulled(node: Node) -> Iterator[tuple[int, Any, Any, np.ndarray]]:
    """For each tensor operand: its number, the rule, what the rule gives as it stands, and the gradient it got."""
    g, values = incoming(node), saved_values(node)
    with np.errstate(all="ignore"):
        together = None if isinstance(node.pullbacks, tuple) else node.pullbacks(g, *values)
        for i, parent in enumerate(node.parents):
            rule = node.pullbacks if together is not None else node.pullbacks[i]
            if isinstance(parent, Node) and parent.requires_grad and rule is not None:
                yield i, rule, together[i] if together is not None else rule(g, *values), g


def test_every_op_has_a_row_and_every_row_an_op():
    assert {row.op for row in ROWS} == set(ops.__all__) - NOT_OPS | PRIVATE
    assert len({str(row) for row in ROWS}) == len(ROWS), "two rows with one name"


def test_every_op_that_is_recorded_anywhere_comes_up_in_a_row():
    """So that no rule and no formula goes unchecked, those of helpers inside an op included."""
    calls = (
        call
        for path in sorted(Path(ops.__file__).parent.glob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "record"
    )
    written = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    made = {node.op for row in DIFFERENTIABLE for node in nodes(outputs(row, leaves(row, "float64")))}
    assert "mul" in written and written <= made


@every(ROWS)
def test_value_is_numpys(row):
    got, expected = outputs(row, leaves(row, "float64")), listed(row.reference(*row.inputs))
    assert len(got) == len(expected)
    for y, e in zip(got, expected, strict=True):
        assert np.shape(y) == np.shape(e)
        np.testing.assert_allclose(np.asarray(y), e, rtol=1e-6 if row.inputs == () else 1e-12, atol=1e-12)
        assert row.gradient == (isinstance(y, Tensor) and y.requires_grad)


@every(DIFFERENTIABLE)
def test_gradient_by_differences(row):
    check_grad(row.call, *row.inputs)


@every(DIFFERENTIABLE)
def test_the_recorded_gradient_is_the_ordinary_one(row):
    """A rule that calls a kernel has a second form for Tensors, which must say the same."""
    found = []
    for create_graph in (False, True):
        xs = leaves(row, "float64")
        ys = outputs(row, xs)
        gs = grad(ys, floats_of(xs), [incoming(y._node) for y in ys], create_graph=create_graph)
        found.append([np.asarray(g) for g in gs])
    for ordinary, recorded in zip(*found, strict=True):
        np.testing.assert_allclose(recorded, ordinary, rtol=1e-12, atol=1e-12)


@every(DIFFERENTIABLE)
def test_second_order_by_differences(row):
    check_grad_grad(row.call, *row.inputs)


@every(DIFFERENTIABLE)
def test_third_order_by_differences(row):
    """The second order of the gradient."""
    weights = [np.sin(1 + np.arange(np.size(y))).reshape(np.shape(y)) for y in listed(row.reference(*row.inputs))]
    f = floats_only(row)

    def gradient(*xs: Tensor) -> list[Tensor]:
        return listed(vjp(f, *xs)[1](weights))

    check_grad_grad(gradient, *filter(is_leaf, row.inputs))


@every(DIFFERENTIABLE)
def test_jvp_by_differences(row):
    check_jvp(row.call, *row.inputs)


@every(DIFFERENTIABLE)
def test_the_hessian_is_symmetric(row):
    """u H v = v H u, for a weighted sum of the op's results."""
    random, f = np.random.default_rng(7), floats_only(row)
    points = [x for x in row.inputs if is_leaf(x)]
    weights = [np.cos(1 + np.arange(np.size(y))).reshape(np.shape(y)) for y in listed(row.reference(*row.inputs))]

    def loss(*xs: Tensor) -> Any:
        return sum((y * w).sum() for y, w in zip(f(*xs), weights, strict=True))

    u, v = ([random.normal(size=x.shape) for x in points] for _ in range(2))
    left, right = (
        sum(float(np.sum(a * np.asarray(b))) for a, b in zip(p, hvp(loss, points, q), strict=True))
        for p, q in ((u, v), (v, u))
    )
    assert left == pytest.approx(right, rel=1e-10, abs=1e-10)


@every(DIFFERENTIABLE)
def test_float32_stays_float32(row):
    """The result, and what each rule returns before the engine sees it."""
    results = outputs(row, leaves(row, "float32"))
    assert all(y.dtype == np.float32 for y in results)
    for node in nodes(results):
        for i, _, raw, _ in pulled(node):
            assert raw.dtype == np.float32, f"rule {i} of {node.op} returns {raw.dtype}"


@every(DIFFERENTIABLE)
def test_float32_agrees_with_float64(row):
    found = {}
    for dtype in ("float32", "float64"):
        xs = leaves(row, dtype)
        ys = outputs(row, xs)
        gs = grad(ys, floats_of(xs), [np.cos(np.arange(y.size)).reshape(y.shape) for y in ys])
        assert all(g.dtype == dtype for g in gs)
        found[dtype] = [np.asarray(t) for t in (*ys, *gs)]
    for single, double in zip(found["float32"], found["float64"], strict=True):
        scale = np.max(np.abs(double), initial=1.0)
        np.testing.assert_allclose(single, double, rtol=2e-5, atol=2e-5 * scale)
        assert np.isfinite(single).all() and np.isfinite(double).all()


@every(DIFFERENTIABLE)
def test_formula_says_what_the_rule_does(row):
    for node in nodes(outputs(row, leaves(row, "float64"))):
        assert len(node.formulas) == len(node.parents), f"{node.op} needs a formula for every operand"
        for i, rule, raw, g in pulled(node):
            shape = node.parents[i].shape
            text = evaluate(node.formulas[i], rule_values(rule, g, saved_values(node)), shape)
            fitted = evaluate("d = raw", {"raw": raw}, shape)
            np.testing.assert_allclose(text, fitted, rtol=1e-12, atol=1e-12, err_msg=f"{node.op}: {node.formulas[i]}")


@every(DIFFERENTIABLE)
def test_nothing_is_saved_in_vain(row):
    for node in nodes(outputs(row, leaves(row, "float64"))):
        rules = node.pullbacks if isinstance(node.pullbacks, tuple) else (node.pullbacks,)
        read = set().union(*(_names_read(rule) for rule in rules))
        names = list(
            dict.fromkeys(name for rule in rules for name in rule.__code__.co_varnames[1 : rule.__code__.co_argcount])
        )
        assert set(names) <= read, f"{node.op} saves {set(names) - read}, which no rule reads"


def _names_read(rule: Any) -> set[str]:
    loads = [i.argval for i in dis.get_instructions(rule) if i.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))]
    return {name for load in loads for name in (load if isinstance(load, tuple) else (load,))}


# ---- the checks themselves: each must be able to fail


def _wrong(x: Tensor, rule: Any, formula: str = "dx = 2 * g * x") -> Tensor:
    return record(np.square(x.data), "square", (x,), (x,), (rule,), (formula,))


@pytest.mark.parametrize(
    "rule",
    [
        lambda g, x: g * x,
        lambda g, x: 2 * g * x + 1e-3,
        lambda g, x: 2 * g * np.abs(x),
        lambda g, x: 2 * g * x[::-1],
        lambda g, x: 2 * np.mean(g) * x,
    ],
)
def test_a_wrong_rule_fails_the_check(rule):
    with pytest.raises(GradientError, match="argument 0"):
        check_grad(lambda x: _wrong(x, rule), normal(5))


def test_a_wrong_second_order_fails_the_check():
    """A rule that looks right once, but reads a constant where it should read its operand."""

    def square(x: Tensor) -> Tensor:
        return _wrong(x, lambda g, x: 2 * g * np.asarray(x))

    check_grad(square, normal(5))
    with pytest.raises(GradientError, match="op 'square' does not record"):
        check_grad_grad(square, normal(5))


def test_a_wrong_formula_fails_the_check():
    wrong = Row("square", (normal(5),), lambda x: _wrong(x, lambda g, x: 2 * g * x, "dx = g * x"), np.square, "", True)
    with pytest.raises(AssertionError, match="dx = g"):
        test_formula_says_what_the_rule_does(wrong)


def test_a_rule_that_leaves_float32_fails_the_check():
    wrong = Row("square", (normal(5),), lambda x: _wrong(x, lambda g, x: g * x * np.sqrt(4)), np.square, "", True)
    with pytest.raises(AssertionError, match="returns float64"):
        test_float32_stays_float32(wrong)


def test_a_rule_that_reads_less_than_was_saved_fails_the_check():
    wrong = Row("square", (normal(5),), lambda x: _wrong(x, lambda g, x: 2 * g), np.square, "", True)
    with pytest.raises(AssertionError, match="which no rule reads"):
        test_nothing_is_saved_in_vain(wrong)
