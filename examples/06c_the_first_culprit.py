"""Lesson 06c: who made the NaN? The first culprit, named while it happens.

A NaN spreads: one bad number in one row, and after a matmul and a loss every number of the model is NaN. What one sees
at the end says nothing about the beginning. `detect_anomaly()` looks at every op, forward and backward, and stops at
the first one that makes a NaN or an inf out of numbers that were none.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from console import Measure, check, heading, say

from tinygrad_qkv import AnomalyError, Tensor, detect_anomaly, draw_graph, recording, softmax, where
from tinygrad_qkv.nn import functional as F

TRY_THIS = """Try this:
  - In 2., choose before the root instead of after it:
    where(x > 0, x, 1.0).sqrt(). The report is gone.
  - Write detect_anomaly(inf=False) in 3. Which op is named now, and how many
    steps later?
  - In 4., give the row that sees nothing one word to look at.
Promises about the old reports will then read WRONG.
"""


def report(f: Callable[[], Any]) -> AnomalyError:
    """Run f under detect_anomaly(), print what it says, and return it."""
    try:
        with detect_anomaly():
            f()
    except AnomalyError as error:
        print(f"{error}\n")
        return error
    raise SystemExit("This run did not keep its promise: nothing was found")


def steps_until_too_large(lr: float) -> tuple[int, AnomalyError]:
    """Gradient descent on w * w from 1: the step at which an op fails, and the report."""
    w = Tensor(1.0, requires_grad=True)  # float32
    for step in range(100):
        w.zero_grad()
        try:
            with detect_anomaly():
                (w * w).backward()
        except AnomalyError as error:
            return step, error
        w.data -= lr * w.grad
    raise SystemExit("This run did not keep its promise: w * w did not overflow")


@np.errstate(all="ignore")  # NumPy would warn of each
def main(out: str = "out/06c_the_first_culprit") -> list[AnomalyError]:
    """Tell the story, draw a graph with its NaN, and check what the reports name; returns the reports."""
    heading("1. Forward: the inner root")
    say("""sqrt(sqrt(x - 2)) for x = 3, 6, 1. Prediction: 1 - 2 = -1 has no root. The outer root only hands the NaN
        on, so the inner one is named, with -1 at index 2.""")
    x = Tensor([3.0, 6.0, 1.0], requires_grad=True)
    forward = report(lambda: (x - 2.0).sqrt().sqrt().sum())

    heading("2. Backward: a loss without a NaN")
    say("""The root of a number that may be 0, and where() to be safe. The loss is 3, a fine number. But where() gives
        the second root the gradient 0, and the slope of a root at 0 is infinite. Prediction: 0 / 0 in the rule of
        sqrt, although nothing was wrong in the forward pass.""")
    x = Tensor([9.0, 0.0], requires_grad=True)

    def safe_loss() -> Tensor:
        return where(x.data > 0, x.sqrt(), 0.0).sum()

    backward = report(lambda: safe_loss().backward())

    heading("3. A learning rate that is too large")
    say("""Gradient descent on w * w from w = 1 with learning rate 10: a step multiplies w by 1 - 2 * 10 = -19. float32
        ends at 3.4e38. Prediction: w * w overflows at the first n with 19^(2n) above that.""")
    n = math.ceil(math.log(np.finfo(np.float32).max) / (2 * math.log(19)))
    step, overflow = steps_until_too_large(10.0)
    say(f"Predicted: step {n}. Found: step {step}, in op '{overflow.op}': {overflow.cause}.")

    heading("4. A mask of one's own, and attention's")
    say("""Scores of -inf are how masks are made, and no fault. But a row with nothing else has no softmax: all of its
        exponentials are 0, and 0 / 0 follows. Prediction: softmax is named, for the row of the second word.""")
    rows = np.array([[True, True, False], [False, False, False], [True, False, True]])
    scores = Tensor(np.zeros((3, 3)), requires_grad=True)
    seen = where(rows, scores, -math.inf)
    blind = report(lambda: softmax(seen, axis=-1))
    q = Tensor(np.eye(3), requires_grad=True)
    with detect_anomaly():
        masked = F.scaled_dot_product_attention(q, q, q, attend=rows)
        masked.sum().backward()
    say(f"""Attention's own mask (attend=) gives the row that sees nothing zeros: {masked.data[1].tolist()}, and no
        alarm.""")

    heading("5. A NaN loss does not pass")
    say("""If only backward runs inside, the loss is looked at first. Under `with recording():` the graph still knows
        its values, and so who was the first.""")
    with recording():
        x = Tensor([2.0, -0.5], requires_grad=True)
        loss = x.log().exp().sum()
    late = report(loss.backward)
    picture = Path(out) / "graph.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(draw_graph(loss, values=True, names={"x": x, "loss": loss}).pipe("svg"))
    print(f"The NaN on its way from log to the loss: {picture}\n")
    check(promises([forward, backward, overflow, blind, late], n - step, masked))
    print(TRY_THIS, end="")
    return [forward, backward, overflow, blind, late]


def promises(reports: list[AnomalyError], off: int, masked: Tensor) -> list[Measure]:
    """What this lesson claims: who is named in each report, and where."""
    expected = [
        ("the inner root", "forward", "sqrt", (2,)),
        ("the rule of a root at 0", "backward", "sqrt", (1,)),
        ("the square that overflows", "forward", "mul", ()),
        ("the softmax of a row of -inf", "forward", "softmax", (1, 0)),
        ("the logarithm behind a NaN loss", "forward", "log", (1,)),
    ]
    named = [
        Measure(f"{name} is named", float((e.phase, e.op, e.index) == (phase, op, index)), ">=", 1)
        for e, (name, phase, op, index) in zip(reports, expected, strict=True)
    ]
    return [
        *named,
        Measure("steps until w * w overflows, off by", abs(off), "<=", 0),
        Measure("the row that sees nothing", float(np.abs(masked.data[1]).max()), "<=", 0),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/06c_the_first_culprit", help="folder for the picture")
    main(**vars(parser.parse_args()))
