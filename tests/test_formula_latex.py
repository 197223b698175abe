"""LaTeX from the text of formulas: what each construct becomes, and that all formulas of the library convert."""

import re

import pytest
from test_ops_table import DIFFERENTIABLE, every, leaves, nodes, outputs

from tinygrad_qkv.formulas import FUNCTIONS
from tinygrad_qkv.ledger.formula_latex import latex

ALIGNED = r"\begin{aligned} %s \\ %s \end{aligned}"
CASES = r"\begin{cases} %s \\ %s & \text{otherwise} \end{cases}"

COMMANDS = {
    *("mathrm", "text", "top", "odot", "cdot", "frac", "sqrt", "sum", "left", "right", "begin", "end", "hat"),
    *("exp", "log", "sin", "cos", "sinh", "cosh", "tanh", "sigma", "min", "max", "lfloor", "rfloor"),
    *("neg", "wedge", "vee", "neq", "leq", "geq", "alpha", "mu", "pi", "infty"),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("db = a.T @ g", r"\mathrm{d}b = a^{\top} \, g"),
        ("dW_Q = X.T @ dQ", r"\mathrm{d}W_{Q} = X^{\top} \, \mathrm{d}Q"),
        (
            "dx = y * (g - sum(g * y, axis))",
            r"\mathrm{d}x = y \odot \left(g - \sum_{\mathrm{axis}} \left(g \odot y\right)\right)",
        ),
        ("dx = g - mean(g, -1)", r"\mathrm{d}x = g - \mathrm{mean}_{-1} \left(g\right)"),
        ("dx = softmax(x, -1)", r"\mathrm{d}x = \mathrm{softmax}_{-1} \left(x\right)"),
        (
            "dx = where(x == 0, 0, where(x < 1, g, 2 * g))",
            r"\mathrm{d}x = " + CASES % (r"0 & \text{if } x = 0 \\ g & \text{if } x < 1", r"2 \, g"),
        ),
        ("s = sigmoid(x); dx = g * s", ALIGNED % (r"s &= \sigma\left(x\right)", r"\mathrm{d}x &= g \odot s")),
        ("dx = g / sqrt(1 - x ** 2)", r"\mathrm{d}x = \frac{g}{\sqrt{1 - x^{2}}}"),
        ("dx = (g + x) ** (n - 1)", r"\mathrm{d}x = \left(g + x\right)^{n - 1}"),
        ("dx = g * exp(-x)", r"\mathrm{d}x = g \odot \exp\left(-x\right)"),
        ("dx = abs(x) + floor(x)", r"\mathrm{d}x = \left|x\right| + \left\lfloor x \right\rfloor"),
        ("dx = exp(S - column(lse))", r"\mathrm{d}x = \exp\left(S - \mathrm{lse}\right)"),
        ("dx0 = split(g, cuts)[0]", r"\mathrm{d}x_{0} = \mathrm{split}\left(g, \mathrm{cuts}\right)[0]"),
        (
            "dx = where((a | ~b) & (a != inf), g, 0)",
            r"\mathrm{d}x = " + CASES % (r"g & \text{if } \left(a \vee \neg b\right) \wedge a \neq \infty", "0"),
        ),
        ("dx = 1e-05 * label_smoothing", r"\mathrm{d}x = 1 \cdot 10^{-5} \, \mathrm{label}_{\mathrm{smoothing}}"),
        (
            "decay = mu; dx0 = decay * dS",
            ALIGNED % (r"\mathrm{decay} &= \mu", r"\mathrm{d}x_{0} &= \mathrm{decay} \odot \mathrm{d}S"),
        ),
        ("dx = sum(g, (0, 2))", r"\mathrm{d}x = \sum_{\left(0, 2\right)} \left(g\right)"),
    ],
)
def test_what_a_formula_becomes(text, expected):
    assert latex(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d = a - (b - c)", r"d = a - \left(b - c\right)"),
        ("d = a - b - c", "d = a - b - c"),
        ("d = a + (b + c)", r"d = a + \left(b + c\right)"),
        ("d = (a + b) * c", r"d = \left(a + b\right) \odot c"),
        ("d = a + b * c", r"d = a + b \odot c"),
        ("d = a * b @ c", r"d = \left(a \odot b\right) \, c"),
        ("d = a * (b @ c)", r"d = a \odot b \, c"),
        ("d = 2 * a @ b", r"d = 2 \, a \, b"),
        ("d = (a @ b).T", r"d = \left(a \, b\right)^{\top}"),
        ("d = (a ** 2) ** 3", r"d = \left(a^{2}\right)^{3}"),
        ("d = -a * b", r"d = -a \odot b"),
        ("d = a * -b", r"d = a \odot \left(-b\right)"),
        ("d = a - -b", r"d = a - \left(-b\right)"),
        ("d = (-a) ** 2", r"d = \left(-a\right)^{2}"),
        ("d = (a / b) ** 2", r"d = \left(\frac{a}{b}\right)^{2}"),
        ("d = where(a, b, c) @ x", r"d = \left(" + CASES % (r"b & \text{if } a", "c") + r"\right) \, x"),
    ],
)
def test_brackets_stand_where_they_are_needed(text, expected):
    assert latex(text) == expected


@every(DIFFERENTIABLE)
def test_every_formula_of_the_library_converts(row):
    for node in nodes(outputs(row, leaves(row, "float64"))):
        for formula in node.formulas:
            check_latex(latex(formula))


def check_latex(text: str) -> None:
    """Braces and brackets are in pairs, only known commands, and no words that would be set as products of letters."""
    depth = 0
    for sign in text:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    opened = []
    for command, environment in re.findall(r"\\(left|right|begin|end)(?![a-z])(\{\w+\})?", text):
        if command in ("left", "begin"):
            opened.append(("right" if command == "left" else "end", environment))
        else:
            assert opened.pop() == (command, environment)
    assert not opened
    assert set(re.findall(r"\\([a-z]+)", text)) <= COMMANDS
    bare = re.sub(r"\\(mathrm|text|begin|end)\{[^{}]*\}|\\[a-z]+", " ", text)
    assert not re.search(r"[A-Za-z]{2}", bare), bare


@pytest.mark.parametrize("text", [r"\left(a", r"{a", r"a}", r"\begin{cases} a \right)", r"axis", r"\foo"])
def test_wrong_latex_fails_the_check(text):
    with pytest.raises((AssertionError, IndexError)):
        check_latex(text)


def test_every_function_of_the_language_converts():
    for name in FUNCTIONS:
        check_latex(latex(f"dx = {name}(x, y)"))


@pytest.mark.parametrize(
    "text", ["dx = x.real", "dx = x[1:2]", "dx = f(x, axis=1)", "dx = x // 2", "dx = [x]", "dx", "import os"]
)
def test_what_is_not_in_the_language_is_refused(text):
    with pytest.raises(ValueError):
        latex(text)
