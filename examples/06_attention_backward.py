"""Lesson 06: the backward pass of one attention head, read line by line from the ledger that it writes.

The sentence and the head are those of lesson 05: "This forum is awesome", and "This" shall answer with (2, 0). There
you saw what the gradients are. Here you see how each is made: which op, which formula, from which numbers, in which
order, and what it is added to.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from console import Measure, check, heading, matrices, say
from four_tokens_by_hand import CALCULATOR, by_the_formulas, worst

from tinygrad_qkv import Tensor, draw_graph, recording, softmax

TOKENS = ["This", "forum", "is", "awesome"]
FEATURES = ["pointer", "thing", "judgement"]
START = {
    "X": np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], np.float64),  # one row for each token
    "W_Q": np.array([[1, 0], [0, 1], [0, 0]], np.float64),
    "W_K": np.array([[0, 0], [1, 0], [0, 1]], np.float64),
    "W_V": np.array([[0, 1], [0, 0], [2, 0]], np.float64),
}
TARGET = np.array([2.0, 0.0])

TRY_THIS = """Try this:
  - Leave a contribution out: add up two of the three that arrive at X, and
    compare with X.grad. Engines that write = in place of += do just that.
  - Give START["W_V"] four equal rows of values (set it to zero): which lines of
    the ledger become 0, and which does not?
  - Give head() a mask: softmax(S + M) with M = -inf where the column is
    greater than the row. Which numbers of dS are exactly 0 now, and why?
START and TARGET stand at the top of the file. Promises about the old numbers
will read WRONG, but the ledger is printed all the same.
"""


def head(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> dict[str, Tensor]:
    """One attention head and its loss; every tensor gets the name that it has here, for the ledger to print."""
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V  # (4, 2) each
    K_T = K.T
    P = Q @ K_T  # (4, 4)
    S = P / math.sqrt(2)  # the scores: row looks at column
    A = softmax(S, axis=-1)  # the weights: every row sums to 1
    O = A @ V  # noqa: E741, the paper's name for the output (4, 2)
    answer = O[0]  # only "This" is asked
    miss = answer - TARGET
    square = miss * miss
    total = square.sum()
    loss = total / 2
    tensors = {"Q": Q, "K": K, "V": V, "K_T": K_T, "P": P, "S": S, "A": A, "O": O}
    tensors |= {"answer": answer, "miss": miss, "square": square, "total": total, "loss": loss}
    tensors |= {"X": X, "W_Q": W_Q, "W_K": W_K, "W_V": W_V}
    for name, tensor in tensors.items():
        tensor.name = name
    return tensors


# What is to be read in the ledger: the line (or two), what it says, and a prediction.
STEPS = [
    ("V", "A value is pushed by everyone who read it, in proportion to the weight.",
     'only "This" is asked, so row j is A("This", j) times dO("This"): all rows point the same way.'),
    ("A", "Would more of this value have helped, or hurt? Its product with dO says so.",
     'only "awesome" points against dO = (-1.67, 0.50), so its number alone is negative.'),
    ("S", "Better or worse than the present mix? The mean, weighted by A, is taken off.",
     "every row sums to 0: a score rises only at the cost of the others."),
    ("Q", "A query moves against the keys that hurt, and towards those that helped.",
     "only row 1 is not 0: nobody asked the other queries."),
    ("K_T K", "A key is moved by every query that met it: here by the query of \"This\" alone.",
     "second column 0, as in that query, which is (1, 0)."),
    ("W_V", "The sum over tokens of input times dV.", "row 3 is dV of \"awesome\", the one token that is a judgement."),
    ("W_Q", "The sum over tokens of input times dQ.", "only row 1 is not 0: \"This\" is a pointer and nothing else."),
    ("W_K", "The sum over tokens of input times dK.", "second column 0, as in dK."),
]  # fmt: skip


def main(out: str = "out/06_attention_backward") -> dict[str, np.ndarray]:
    """Tell the story, check every number, and draw the graph; returns the total of every tensor's gradient."""
    heading("1. The ledger of one backward pass")
    say("""Every line is one contribution to one gradient, in the order in which it was made. "=" starts a gradient,
        "+=" adds to one that was started. d before a name is the gradient of the loss: dQ is dL/dQ.""")
    with recording():  # keeps the values and gradients for the picture
        tensors = head(**{name: Tensor(values, requires_grad=True) for name, values in START.items()})
        ledger = tensors["loss"].backward(trace=True)
    print(ledger.table(width=78) + "\n")
    say("""The order is forced: a rule needs the whole gradient of its result, so every line that adds to dA stands
        above the line that uses dA. X is used three times, so three lines add to dX.""")

    heading("2. Line by line")
    for names, meaning, prediction in STEPS:
        for name in names.split():
            (entry,) = ledger.for_(name)
            print(f"  line {entry.number}:  {entry.named}")
        print()
        say(f"{meaning} Prediction: {prediction}")
        matrices(FEATURES if "W" in name else TOKENS, {f"d{name}": entry.value}, TOKENS if name in "AS" else None)
    say("""The ledger holds every number that a line was made of, so each line can be run again from its text alone.
        Here is the last one in full:""")
    print(f"{entry}\n\nAnd as LaTeX: {entry.latex}\n")

    heading("3. X is used three times")
    ways = {str(entry.result): entry.value for entry in ledger.for_("X")}
    say("""Prediction: each use gives a contribution, and dX is their sum. A step goes against it, so as a value "This"
        shall become more of a judgement (whose value is asked for), and as a query less of a pointer and more of a
        thing (the keys of judgements answer to things).""")
    parts = {f"via {way}": value[0] for way, value in ways.items()} | {"dX": ledger.total("X")[0]}
    matrices(list(parts), {"row of This": np.array(list(parts.values()))}, ["pointer", "thing", "judging"])

    heading("4. The way from the loss to W_Q")
    way = ledger.way_to("W_Q")
    print(way.table(width=78) + "\n")
    say(f"""{len(way)} of {len(ledger)} lines: this is the chain rule for W_Q. V stands in it (in the line of dA)
        although W_V does not: values teach queries where to look.""")

    heading("5. The picture and the promises")
    picture = Path(out) / "graph.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(draw_graph(tensors["loss"], values=True, grads=True, full=16).pipe("svg"))
    print(f"The same pass as a graph, with its values and gradients: {picture}\n")
    check(promises(ledger.totals(), ways, ledger.check()))
    print(TRY_THIS, end="")
    return ledger.totals()


def promises(g: dict[str, np.ndarray], ways: dict[str, np.ndarray], text: float) -> list[Measure]:
    """What this lesson claims of the totals `g`, of the three parts of dX, and of the error of the formulas' text."""
    hand = by_the_formulas(target=TARGET, **START)
    names = {"d_scores": "S", "d_weights": "A", "d_output": "O"}
    names |= {f"d_{name}": name for name in ("Q", "K", "V", "W_Q", "W_K", "W_V")}
    found = {d: g[name] for d, name in names.items()}
    on_paper = {d: hand[d] for d in found}
    calculator = {d: numbers for d, numbers in CALCULATOR.items() if d in found}
    A, dA = hand["weights"], g["O"] @ hand["V"].T
    identity = A * (dA - np.sum(g["O"] * hand["output"], axis=1, keepdims=True))  # A_ij dO_i . (v_j - o_i)
    return [
        Measure("each line's text against its numbers", text, "<=", 1e-12),
        Measure("all gradients by the formulas on paper, error", worst(on_paper, found), "<=", 1e-12),
        Measure("numbers of a pocket calculator, error", worst(calculator, found), "<=", 1e-4),
        Measure("rows of dS sum to 0, error", np.abs(g["S"].sum(axis=1)).max(), "<=", 1e-12),
        Measure("dS = A * dO . (v - o), error", np.abs(g["S"] - identity).max(), "<=", 1e-12),
        Measure("ways to X", len(ways), ">=", 3),
        Measure("the ways add up to dX, error", np.abs(sum(ways.values()) - g["X"]).max(), "<=", 1e-12),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/06_attention_backward", help="folder for the picture")
    main(**vars(parser.parse_args()))
