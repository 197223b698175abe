"""The checks of derivatives, checked: right rules pass, and every kind of wrong one is caught, and its op named."""

import numpy as np
import pytest

from tinygrad_qkv import (
    OUTPUT,
    GradientError,
    Tensor,
    check_grad,
    check_grad_grad,
    check_jvp,
    draw_graph,
    grad,
    hessian,
    jvp,
    kernels,
    nn,
    ops,
    record,
)

X = np.array([0.3, 0.7, -0.2])
CHECKS = (check_grad, check_grad_grad, check_jvp)


def softsign(x):
    """The example of `record`."""
    return record(x.data / (1 + np.abs(x.data)), "softsign", (x,), (x,), (lambda g, x: g / (1 + np.abs(x)) ** 2,))


def cube(rules, saved=True):
    """A chain of ops with one of the user's own in the middle: (2 x)^3 + x, and the exponential of that."""

    def f(x):
        h = x * 2.0
        y = record(h.data**3, "cube", (h,), (h,) if saved else (), rules)
        return (y + x).exp()

    return f


# ---- ops of one's own


@pytest.mark.parametrize("check", CHECKS)
def test_an_op_of_ones_own_works_at_every_order(check):
    check(softsign, X)
    check(cube((lambda g, x: 3 * g * x**2,)), X)
    check(cube(lambda g, x: (3 * g * np.square(x),)), X)


def test_an_op_of_ones_own_works_with_everything_else():
    x = Tensor(X, requires_grad=True)
    y = softsign(x).sum()
    (first,) = grad(y, x, create_graph=True)
    np.testing.assert_allclose(first, 1 / (1 + np.abs(X)) ** 2)
    expected = np.diag(-2 * np.sign(X) / (1 + np.abs(X)) ** 3)
    np.testing.assert_allclose(hessian(lambda t: softsign(t).sum(), X), expected, atol=1e-12)
    np.testing.assert_allclose(jvp(softsign, X, np.ones(3))[1], first)
    assert "softsign" in draw_graph(y).source  # without a formula
    assert "softsign" in str(y.backward(trace=True))
    assert softsign(Tensor(X)).requires_grad is False


def test_the_example_of_record_is_the_one_tested_here():
    assert 'record(x.data / (1 + np.abs(x.data)), "softsign", (x,), (x,), (rule,))' in record.__doc__


def test_a_rule_that_calls_a_kernel_needs_a_second_form():
    def rule(g, y):
        if isinstance(g, np.ndarray):
            return kernels.softmax_pullback(g, y, -1)
        return y * (g - np.sum(g * y, axis=-1, keepdims=True))

    def fast(rule):
        return lambda x: record(kernels.softmax(x.data, -1), "fast", (x,), (OUTPUT,), (rule,))

    for check in CHECKS:
        check(fast(rule), X)
    one_form = fast(lambda g, y: kernels.softmax_pullback(g, y, -1))
    check_grad(one_form, X)
    for check in (check_grad_grad, check_jvp):
        with pytest.raises(TypeError, match=r"op 'fast' does not run on Tensors.*second form"):
            check(one_form, X)


def test_an_array_in_place_of_a_recorded_gradient_is_refused():
    captured = cube((lambda g, x: np.asarray(g) * 3 * np.asarray(x) ** 2,))
    check_grad(captured, X)
    for call in (lambda: check_grad_grad(captured, X), lambda: hessian(lambda x: captured(x).sum(), X)):
        with pytest.raises(TypeError, match=r"op 'cube' for its operand 0 returned an array for Tensors"):
            call()


# ---- wrong rules, and the op that is named


WRONG = {
    "a factor": (lambda g, x: 2 * g * x**2,),
    "a term": (lambda g, x: 3 * g * x**2 + 1e-3,),
    "a sign": (lambda g, x: 3 * g * x * np.abs(x),),
    "the order": (lambda g, x: 3 * g * x[::-1] ** 2,),
    "an axis": (lambda g, x: 3 * np.mean(g) * x**2,),
    "g forgotten": (lambda g, x: 3 * x**2,),
    "NaN": (lambda g, x: 3 * g * x**2 * np.nan,),
}


@pytest.mark.parametrize("rules", WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_reported_with_op_operand_index_and_numbers(rules):
    with pytest.raises(GradientError) as caught:
        check_grad(cube(rules), X)
    text = str(caught.value)
    assert "argument 0 of shape (3,), index (" in text
    assert "the rule of op 'cube' is wrong by itself: for its operand 0 of shape (3,), index (" in text
    assert text.count("expected") == text.count("got") == 2


def test_the_numbers_in_the_report_are_those_of_the_op():
    with pytest.raises(GradientError) as caught:
        check_grad(lambda x: record(x.data**3, "cube", (x,), (x,), (lambda g, x: g * x * [3, 2, 3] * x,)), X)
    whole, _, own = str(caught.value).partition("; ")
    assert "index (1,)" in whole and "index (1,)" in own
    expected, got = (float(own.split(word)[1].split()[0].rstrip(",")) for word in ("expected", "got"))
    assert expected / got == pytest.approx(3 / 2)


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_operand_with_the_wrong_rule_is_named(wrong):
    rules = [lambda g, a, b: g @ b.T, lambda g, a, b: a.T @ g]
    right = rules[wrong]
    rules[wrong] = lambda g, a, b: 1.1 * right(g, a, b)

    def f(x):
        a = x.exp()
        b = a.sin()  # has to be held when a moves
        return record(a.data @ b.data, "product", (a, b), (a, b), tuple(rules))

    with pytest.raises(GradientError, match=rf"op 'product' is wrong .* its operand {wrong} of shape \(3, 3\)"):
        check_grad(f, np.random.default_rng(0).normal(size=(3, 3)))


def test_one_tensor_as_both_operands_is_looked_at_once():
    def f(x):
        return record(x.data * x.data, "product", (x, x), (x, x), (lambda g, a, b: g * b, lambda g, a, b: g * b * 2))

    with pytest.raises(GradientError, match=r"op 'product' is wrong .* its operands \[0, 1\], one tensor, of shape"):
        check_grad(f, X)


def test_the_first_of_two_wrong_ops_is_named():
    def twice(x):
        return record(x.data * 2, "twice", (x,), (), (lambda g: g,))

    with pytest.raises(GradientError, match="op 'cube' is wrong"):
        check_grad(lambda x: twice(cube(WRONG["a factor"])(x)), X)
    with pytest.raises(GradientError, match="op 'twice' is wrong"):
        check_grad(lambda x: cube(WRONG["a factor"])(twice(x)), X)


def test_a_wrong_op_deep_in_a_model_is_named():
    block = nn.TransformerBlock(6, 2, 5).astype("float64")

    def wrong(x):
        return record(np.tanh(x.data), "squash", (x,), (OUTPUT,), (lambda g, y: g * (1 - y),))

    x = np.random.default_rng(0).normal(size=(1, 3, 6))
    check_grad(lambda x: block(block(x).tanh()), x)
    with pytest.raises(GradientError, match=r"op 'squash' is wrong by itself: for its operand 0 of shape \(1, 3, 6\)"):
        check_grad(lambda x: block(wrong(block(x))), x)


def test_two_forms_of_a_rule_that_differ_are_named():
    def rule(g, x):
        return (3 if isinstance(g, np.ndarray) else 4) * g * x**2

    check_grad(cube((rule,)), X)
    with pytest.raises(
        GradientError, match=r"op 'cube' has two forms that differ: at index \(\d,\) of an operand of shape \(3,\)"
    ):
        check_grad_grad(cube((rule,)), X)


def test_output_that_is_not_saved_first_is_an_error():
    def f(x):
        return record(np.exp(x.data), "own_exp", (x,), (x, OUTPUT), (lambda g, x, y: g * y,))

    for check in (check_grad, check_grad_grad):
        with pytest.raises(ValueError, match=r"op 'own_exp' does not save OUTPUT first: record\(.*saved=\(OUTPUT"):
            check(f, X)


def test_a_rule_that_writes_into_its_gradient_is_named():
    rule = (lambda g, x: np.multiply(g, 3 * x**2, out=g),)
    what = "a rule of op 'cube' writes into what it was given: g, the gradient of the result, changed during backward"
    with pytest.raises(GradientError, match=rf"argument 0 of shape \(3,\), index .* {what}"):
        check_grad(cube(rule), X)  # the other operand of the sum reads the same g
    with pytest.raises(GradientError, match=f"^{what}$"):
        check_grad(lambda x: record(x.data**3, "cube", (x,), (x,), rule), X)  # right where nobody else reads it


def test_a_rule_that_writes_into_what_it_saved_is_named():
    with pytest.raises(
        GradientError, match="a rule of op 'cube' writes into what it was given: the result of op 'mul'"
    ):
        check_grad(cube((lambda g, x: 3 * g * np.multiply(x, x, out=x),)), X)


def test_a_gradient_that_gets_lost_between_ops_is_not_blamed_on_one():
    for f in (lambda x: x * x.detach(), lambda x: x * Tensor(x.numpy())):
        with pytest.raises(GradientError, match=r"every op's own rule agrees .* gets lost or changed between ops"):
            check_grad(f, X)
    with pytest.raises(GradientError, match="no output of f requires grad"):
        check_grad(lambda x: x.detach() * 2.0, X)


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        (
            (lambda g, x: (3 * g * x**2)[:2],),
            ValueError,
            r"operand 0 returned shape \(2,\); the operand has shape \(3,\)",
        ),
        (
            (lambda g, x: (3 * g * x**2).astype(int),),
            TypeError,
            "operand 0 returned int64; a gradient is made of floats",
        ),
        ((lambda g, x: 3 * g * x**2 + 0j,), TypeError, "operand 0 returned complex128; .*float64"),
        ((lambda g, x: None,), TypeError, "operand 0 returned None"),
        ((lambda g, x: g,) * 2, ValueError, "has 1 operands and 2 rules"),
        ((), ValueError, "has 1 operands and 0 rules"),
        (lambda g, x: 3 * g * x**2, ValueError, "one function of rules returned a ndarray"),
        (lambda g, x: (g, g), ValueError, "one function of rules returned 2"),
        ([lambda g, x: 3 * g * x**2], ValueError, "has a list for its rules"),
        ((lambda g: g,), TypeError, r"called as rule\(g, \*saved\), here with g and 1 saved values, and takes \(g\)"),
        ((lambda g, x, y: g,), TypeError, r"and takes \(g, x, y\)"),
    ],
)
def test_a_rule_of_the_wrong_kind_is_named(rules, kind, message):
    for check in (check_grad, check_grad_grad):
        with pytest.raises(kind, match=rf"op 'cube'.*{message}" if check is check_grad else "op 'cube'"):
            check(cube(rules), X)


def test_too_many_gradients_of_one_function_are_noticed_in_an_ordinary_pass_too():
    x = Tensor(X, requires_grad=True)
    with pytest.raises(ValueError, match="op 'cube' has 1 operands, and its one function of rules returned a ndarray"):
        cube(lambda g, x: 3 * g * x**2)(x).sum().backward()
    with pytest.raises(ValueError, match="op 'cube' has 1 operands and 0 rules"):
        cube(())(x).sum().backward()
    assert x.grad is None


def test_an_array_for_an_operand_is_named():
    def scaled(x):
        c = np.ones(3)
        return record(x.data * c, "scaled", (x, c), (c,), (lambda g, c: g * c, lambda g, c: None))

    for call in (lambda: check_grad(scaled, X), lambda: scaled(Tensor(X, requires_grad=True)).sum().backward()):
        with pytest.raises(ValueError, match=r"op 'scaled' has a ndarray for its operand 1; .* list it in saved only"):
            call()
    check_grad(lambda x: record(x.data * 2, "twice", (x, 2), (), (lambda g: 2 * g, None)), X)  # numbers need no rule


@pytest.mark.parametrize("create_graph", [False, True])
def test_an_error_inside_a_rule_says_which_op_it_was(create_graph):
    def rule(g, x):
        raise ArithmeticError("no luck")

    x = Tensor(X, requires_grad=True)
    with pytest.raises(ArithmeticError, match="no luck") as caught:
        cube((rule,))(x).sum().backward(create_graph=create_graph)
    assert caught.value.__notes__ == ["This came from a rule of op 'cube', whose result has shape (3,)."]
    assert x.grad is None


# ---- wrong at the second order only


@pytest.mark.parametrize(
    "rule",
    [
        lambda g, x: 3 * g * np.asarray(x) ** 2,
        lambda g, x: 3 * g * (x.data if isinstance(x, Tensor) else x) ** 2,
        lambda g, x: 3 * g * x * (x.detach() if isinstance(x, Tensor) else x),
    ],
)
def test_a_rule_that_hides_what_it_reads_is_named_at_the_second_order(rule):
    check_grad(cube((rule,)), X)
    with pytest.raises(
        GradientError, match=r"second order.*op 'cube' does not record .*its argument 'x' of shape \(3,\)"
    ):
        check_grad_grad(cube((rule,)), X)


def test_a_rule_that_captures_what_it_should_save_is_refused():
    def f(x):
        h = x * 2.0
        return record(h.data**3, "cube", (h,), (), (lambda g: 3 * g * h.data**2,))

    check_grad(f, X)
    with pytest.raises(GradientError, match="second order"):
        check_grad_grad(f, X)


def test_another_form_for_tensors_that_is_wrong_is_named():
    def rule(g, x):
        return 3 * g * x**2 if isinstance(g, np.ndarray) else 2 * g * x**2

    check_grad(cube((rule,)), X)
    with pytest.raises(GradientError, match=r"jvp, output 0 of shape \(3,\), index \(.*expected .* got"):
        check_jvp(cube((rule,)), X)


# ---- what the checks ask for


@pytest.mark.parametrize("check", CHECKS)
def test_chance_is_no_wrong_gradient(check):
    with pytest.raises(ValueError, match="two calls of f gave two values of output 0: fix its seed"):
        check(lambda x: ops.dropout(x, 0.5), np.ones(50))


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_needs_floats_and_changes_nothing(check):
    with pytest.raises(ValueError, match=f"{check.__name__} needs at least one float input"):
        check(lambda i: i, np.array([1]))
    x = Tensor(X, requires_grad=True)
    x.grad = np.ones(3)
    check(lambda x, n: [x**n, (x * x).sum()], x, 3)
    assert x.grad.tolist() == [1, 1, 1] and x.tolist() == X.tolist()
