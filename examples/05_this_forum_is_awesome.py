"""Lesson 05: one attention head on four tokens, every number printed, forward and backward.

The sentence is "This forum is awesome". Three features describe a token: does it point at something, is it a thing,
is it a judgement? The head shall answer, at the place of "This", with the value of "awesome": (2, 0).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from console import Measure, check, heading, matrices, say
from four_tokens_by_hand import CALCULATOR, by_nudging, by_the_formulas, worst

from tinygrad_qkv import Tensor, draw_graph, recording, softmax

TOKENS = ["This", "forum", "is", "awesome"]
FEATURES = ["pointer", "thing", "judgement"]
X = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], np.float64)  # one row for each token
START = {
    "W_Q": np.array([[1, 0], [0, 1], [0, 0]], np.float64),
    "W_K": np.array([[0, 0], [1, 0], [0, 1]], np.float64),
    "W_V": np.array([[0, 1], [0, 0], [2, 0]], np.float64),
}
TARGET = np.array([2.0, 0.0])

TRY_THIS = """Try this:
  - Set W_V to zero, so that no token says anything.
    What becomes of dL/dW_Q and dL/dW_K? Why?
  - Start W_Q and W_K at zero: do they ever learn? And if only W_Q is zero?
  - Ask for (0, 1). Who has that value, and where does "This" look then?
START and TARGET stand at the top of the file. Promises about the old numbers
will read WRONG, but the graph is drawn all the same.
"""


def head(W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> dict[str, Tensor]:
    """The attention head and its loss, in float64, so that checks can be strict; everything in it by its name."""
    x, target = Tensor(X), Tensor(TARGET)
    Q, K, V = x @ W_Q, x @ W_K, x @ W_V  # (4, 2) each
    scores = Q @ K.T / math.sqrt(2)  # (4, 4): the row looks at the column
    weights = softmax(scores, axis=-1)  # (4, 4): every row sums to 1
    output = weights @ V  # (4, 2)
    miss = output[0] - target  # only "This" is asked
    loss = (miss * miss).sum() / 2
    steps = {"Q": Q, "K": K, "V": V, "scores": scores, "weights": weights, "output": output, "loss": loss}
    return {"X": x, "W_Q": W_Q, "W_K": W_K, "W_V": W_V, "target": target, **steps}


def by_the_engine() -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
    """Every number as tinygrad_qkv finds it, dL/d... under the name d_..., and the tensors with their graph."""
    with recording():  # keep the gradients of all tensors, not only those of the leaves
        tensors = head(**{name: Tensor(values, requires_grad=True) for name, values in START.items()})
        tensors["loss"].backward()
    gradients = {f"d_{name}": t.grad.numpy() for name, t in tensors.items() if t.requires_grad}
    return {name: t.numpy() for name, t in tensors.items()} | gradients, tensors


def learn(trained: list[str], steps: int, lr: float = 0.5) -> np.ndarray:
    """Gradient descent on the matrices in `trained`: (steps + 1, 5), the four weights of "This" and the loss."""
    w = {name: Tensor(values, requires_grad=name in trained) for name, values in START.items()}
    story = []
    for _ in range(steps + 1):
        tensors = head(**w)
        story.append([*tensors["weights"].numpy()[0], tensors["loss"].item()])
        tensors["loss"].backward()
        for name in trained:
            w[name].data = w[name].data - lr * w[name].grad.data
            w[name].zero_grad()
    return np.array(story)


def main(out: str = "out/05_this_forum_is_awesome", steps: int = 200) -> dict[str, np.ndarray]:
    """Tell the story, check every number, and write the graph; returns the numbers of the first step."""
    heading("This forum is awesome: one attention head, every number")
    say("Each token asks with its query Q, is found by its key K, and answers with its value V.")
    n, tensors = by_the_engine()

    heading("1. Forward: who looks at whom?")
    matrices(TOKENS, {"X": X})
    matrices(FEATURES, START)
    matrices(TOKENS, {"Q = X @ W_Q": n["Q"], "K = X @ W_K": n["K"], "V = X @ W_V": n["V"]})
    matrices(TOKENS, {"scores = Q @ K.T / sqrt(2)": n["scores"]}, TOKENS)
    matrices(TOKENS, {"weights = softmax(scores): every row sums to 1": n["weights"]}, TOKENS)
    matrices(TOKENS, {"output = weights @ V": n["output"]})
    say(f"""The loss asks for (2, 0) at "This": half of the squared distance is {n["loss"]:.4f}.
        "This" looks most at "forum" and "is", and it was to fetch the value of "awesome".""")

    heading("2. Backward: what should change?")
    say("""Prediction: looking at "awesome" would have helped, and looking at the others did harm. So one score has a
        negative gradient (it shall rise) and three have a positive one.""")
    matrices(["This"], {"dO = dL/doutput = output - target": n["d_output"][0]})
    matrices(["This"], {"dA = dL/dweights = dO @ V.T": n["d_weights"][0]}, TOKENS)
    matrices(["This"], {"dS = dL/dscores = A * (dA - sum(A * dA)): sums to 0": n["d_scores"][0]}, TOKENS)
    say("""The other rows are 0, since only "This" is asked. The scores were Q @ K.T / sqrt(2), so dS goes on to both:
        dQ = dS @ K / sqrt(2) and dK = dS.T @ Q / sqrt(2). The values hear of it directly: dV = A.T @ dO.""")
    matrices(TOKENS, {"dL/dQ": n["d_Q"], "dL/dK": n["d_K"], "dL/dV": n["d_V"]})
    say("""Q was X @ W_Q, so dL/dW_Q = X.T @ dQ: a feature collects the dQ of all tokens that have it. Here are W_Q,
        W_K and W_V in three ways: by backward(); by this formula; and with no calculus at all, by moving one number a
        little up and down and looking at the loss.""")
    hand, nudged = by_the_formulas(X=X, target=TARGET, **START), by_nudging(lambda **w: head(**w)["loss"].item(), START)
    for d, formula in {"d_W_Q": "X.T @ dQ", "d_W_K": "X.T @ dK", "d_W_V": "X.T @ dV"}.items():
        matrices(FEATURES, {f"dL/{d.replace('_', '', 1)}": n[d], formula: hand[d], "by moving it": nudged[d]})

    heading("3. Who learns?")
    say("""Prediction: whatever lowers the loss fastest. If W_V may learn, it changes what "forum" and "is" say, and
        nobody has to look at "awesome". If W_V is frozen, looking there is the only way.""")
    shown = [step for step in (0, 1, 5, 20, 60, 200) if step <= steps]
    free, frozen = learn(["W_Q", "W_K", "W_V"], steps), learn(["W_Q", "W_K"], steps)
    for title, run in {"weights of This, all three trained": free, "weights of This, W_V frozen": frozen}.items():
        matrices([f"step {step}" for step in shown], {title: run[shown]}, [*TOKENS, "loss"])
    say("""So a head need not look at the right word: where the values can absorb the error, they do. Lesson 08 gives
        every batch fresh values, and then attention has to learn.""")

    heading("4. The picture and the promises")
    picture = Path(out) / "graph.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    # full=16 writes out Q, K, V, scores and weights, the largest of which is 4 x 4
    picture.write_bytes(draw_graph(tensors["loss"], values=True, grads=True, full=16, names=tensors).pipe("svg"))
    print(f"The computation graph with its values and gradients: {picture}\n")
    check(
        [
            Measure("numbers of a pocket calculator, error", worst(CALCULATOR, n), "<=", 1e-4),
            Measure("all numbers by the formulas, error", worst(hand, n), "<=", 1e-12),
            Measure("dL/dW by moving each number, error", worst(nudged, n), "<=", 1e-8),
            Measure('weight of "awesome", all three trained', free[-1, 3], "<=", 0.35),
            Measure('weight of "awesome", W_V frozen', frozen[-1, 3], ">=", 0.98),
            Measure("loss, all three trained", free[-1, 4], "<=", 0.001),
            Measure("loss, W_V frozen", frozen[-1, 4], "<=", 0.001),
        ]
    )
    print(TRY_THIS, end="")
    return n


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/05_this_forum_is_awesome", help="folder for the picture")
    main(**vars(parser.parse_args()))
