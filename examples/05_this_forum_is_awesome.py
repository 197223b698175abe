"""Lesson 05: one attention head on four tokens, every number printed, forward and backward.

The sentence is "This forum is awesome".  Three features describe a token: does it point at something, is it a thing,
is it a judgement?  The head shall answer, at the place of "This", with the value of "awesome": (2, 0).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from console import Measure, check, heading, matrices, say

from tinygrad_qkv import Tensor, draw_graph, no_grad, recording, softmax

TOKENS = ["This", "forum", "is", "awesome"]
FEATURES = ["pointer", "thing", "judgement"]
X = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]], np.float64)  # one row for each token
START = {
    "W_Q": np.array([[1, 0], [0, 1], [0, 0]], np.float64),
    "W_K": np.array([[0, 0], [1, 0], [0, 1]], np.float64),
    "W_V": np.array([[0, 1], [0, 0], [2, 0]], np.float64),
}
TARGET = np.array([2.0, 0.0])

# What a pocket calculator finds, to four places; of the 4 x 4 matrices the row of "This" alone.
CALCULATOR = {
    "scores": [0, 0.7071, 0.7071, 0],
    "weights": [0.1651, 0.3349, 0.3349, 0.1651],
    "output": [0.3302, 0.5],
    "loss": 1.5191,
    "d_output": [-1.6698, 0.5],
    "d_weights": [0.5, 0, 0.5, -3.3395],
    "d_scores": [0.1323, 0.1009, 0.2684, -0.5016],
    "d_Q": [0.2611, -0.3547],
    "d_W_Q": [[0.2611, -0.3547], [0, 0], [0, 0]],
    "d_W_K": [[0.2833, 0], [0.2611, 0], [-0.3547, 0]],
    "d_W_V": [[-0.8349, 0.25], [-1.1183, 0.3349], [-0.2757, 0.0826]],
}

TRY_THIS = """Try this:
  - Give all tokens the same value.  What becomes of dL/dW_Q and dL/dW_K?  Why?
  - Start W_Q and W_K at zero: do they ever learn?  And if only W_Q is zero?
  - Ask for (0, 1).  Who has that value, and where does "This" look then?
"""


def head(W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> dict[str, Tensor]:
    """The attention head and its loss; every intermediate result by its name."""
    x = Tensor(X)
    x.name = "X"
    Q, K, V = x @ W_Q, x @ W_K, x @ W_V  # (4, 2) each
    scores = Q @ K.T / math.sqrt(2)  # (4, 4): the row looks at the column
    weights = softmax(scores, axis=-1)  # (4, 4): every row sums to 1
    output = weights @ V  # (4, 2)
    target = Tensor(TARGET)
    target.name = "target"
    miss = output[0] - target  # only "This" is asked
    loss = (miss * miss).sum() / 2
    return {"Q": Q, "K": K, "V": V, "scores": scores, "weights": weights, "output": output, "loss": loss}


def parameters() -> dict[str, Tensor]:
    """Fresh W_Q, W_K and W_V; in float64, so that the checks can be strict."""
    tensors = {name: Tensor(values, requires_grad=True) for name, values in START.items()}
    for name, tensor in tensors.items():
        tensor.name = name
    return tensors


def by_the_engine() -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
    """Every number as tinygrad_qkv finds it, dL/d... under the name d_..., and the results with their graph."""
    w = parameters()
    with recording():  # keep the gradients of all results, not only those of the leaves
        results = head(**w)
        results["loss"].backward()
    numbers = {name: tensor.numpy() for name, tensor in results.items()}
    return numbers | {f"d_{name}": t.grad.numpy() for name, t in (results | w).items()}, results


def by_the_formulas(W_Q: np.ndarray, W_K: np.ndarray, W_V: np.ndarray) -> dict[str, np.ndarray]:
    """The same numbers by the formulas on paper, in NumPy."""
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V
    S = Q @ K.T / np.sqrt(2)
    A = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    O = A @ V  # noqa: E741, the paper's name
    loss = ((O[0] - TARGET) ** 2).sum() / 2

    dO = np.zeros_like(O)
    dO[0] = O[0] - TARGET  # the loss sees the row of "This" alone
    dV = A.T @ dO  # a value is pushed by everyone who read it, in proportion
    dA = dO @ V.T  # would more of this value have helped, or hurt?
    dS = A * (dA - (A * dA).sum(axis=1, keepdims=True))  # hurt more than the present mix?
    dQ = dS @ K / np.sqrt(2)
    dK = dS.T @ Q / np.sqrt(2)
    return {
        "Q": Q, "K": K, "V": V, "scores": S, "weights": A, "output": O, "loss": loss,
        "d_output": dO, "d_V": dV, "d_weights": dA, "d_scores": dS, "d_Q": dQ, "d_K": dK,
        "d_W_Q": X.T @ dQ, "d_W_K": X.T @ dK, "d_W_V": X.T @ dV, "d_loss": np.array(1.0),
    }  # fmt: skip


def by_nudging(name: str, h: float = 1e-6) -> np.ndarray:
    """dL/dW with no calculus at all: move one number a little up and down, and look at the loss."""
    slope = np.zeros(START[name].shape)
    for index in np.ndindex(slope.shape):
        nudge = np.zeros(slope.shape)
        nudge[index] = h
        with no_grad():
            up = head(**parameters() | {name: Tensor(START[name] + nudge)})["loss"].item()
            down = head(**parameters() | {name: Tensor(START[name] - nudge)})["loss"].item()
        slope[index] = (up - down) / (2 * h)
    return slope


def learn(trained: list[str], steps: int, lr: float = 0.5) -> np.ndarray:
    """Gradient descent on the matrices in `trained`: (steps + 1, 5), the four weights of "This" and the loss."""
    w = parameters()
    story = []
    for _ in range(steps + 1):
        results = head(**w)
        story.append([*results["weights"].numpy()[0], results["loss"].item()])
        results["loss"].backward()
        for name, tensor in w.items():
            if name in trained:
                tensor.data = tensor.data - lr * tensor.grad.data
            tensor.zero_grad()
    return np.array(story)


def worst(expected: dict, found: dict[str, np.ndarray]) -> float:
    """The largest difference; where one row is expected, it is the row of "This"."""
    differences = []
    for name, value in expected.items():
        row = found[name] if np.ndim(value) == found[name].ndim else found[name][0]
        differences.append(np.abs(row - value).max())
    return float(max(differences))


def main(out: str = "out/05_this_forum_is_awesome", steps: int = 200) -> dict[str, np.ndarray]:
    """Tell the story, check every number, and write the graph; returns the numbers of the first step."""
    heading("This forum is awesome: one attention head, every number")
    say("Each token asks with its query Q, is found by its key K, and answers with its value V.")
    n, results = by_the_engine()

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
    say("""Prediction: looking at "awesome" would have helped, and looking at the others did harm.  So one score has a
        negative gradient (it shall rise) and three have a positive one.""")
    matrices(["This"], {"dL/dweights = dO @ V.T": n["d_weights"][0]}, TOKENS)
    matrices(["This"], {"dL/dscores = A * (dA - sum(A * dA)): sums to 0": n["d_scores"][0]}, TOKENS)
    matrices(TOKENS, {"dL/dQ": n["d_Q"], "dL/dK": n["d_K"], "dL/dV": n["d_V"]})
    say("""W_Q, W_K and W_V in three ways: by backward(); by the formula; and with no calculus at all, by moving one
        number a little up and down and looking at the loss.""")
    hand, nudged = by_the_formulas(**START), {name: by_nudging(name) for name in START}
    for name, formula in {"W_Q": "X.T @ dQ", "W_K": "X.T @ dK", "W_V": "X.T @ dV"}.items():
        d = f"d_{name}"
        matrices(FEATURES, {f"dL/d{name}": n[d], formula: hand[d], "by moving it": nudged[name]})

    heading("3. Who learns?")
    say("""Prediction: whatever lowers the loss fastest.  If W_V may learn, it changes what "forum" and "is" say, and
        nobody has to look at "awesome".  If W_V is frozen, looking there is the only way.""")
    shown = [step for step in (0, 1, 5, 20, 60, 200) if step <= steps]
    free, frozen = learn(["W_Q", "W_K", "W_V"], steps), learn(["W_Q", "W_K"], steps)
    for title, run in {"weights of This, all three trained": free, "weights of This, W_V frozen": frozen}.items():
        matrices([f"step {step}" for step in shown], {title: run[shown]}, [*TOKENS, "loss"])
    say("""So a head need not look at the right word: where the values can absorb the error, they do.  Lesson 08 gives
        every batch fresh values, and then attention has to learn.""")

    heading("4. The promises")
    check(
        [
            Measure("numbers of the calculator, error", worst(CALCULATOR, n), "<=", 1e-4),
            Measure("all numbers by the formulas, error", worst(hand, n), "<=", 1e-12),
            Measure("dL/dW by moving each number, error", worst({f"d_{k}": nudged[k] for k in nudged}, n), "<=", 1e-8),
            Measure('weight of "awesome", all three trained', free[-1, 3], "<=", 0.35),
            Measure('weight of "awesome", W_V frozen', frozen[-1, 3], ">=", 0.98),
            Measure("loss, all three trained", free[-1, 4], "<=", 0.001),
            Measure("loss, W_V frozen", frozen[-1, 4], "<=", 0.001),
        ]
    )
    picture = Path(out) / "graph.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(draw_graph(results["loss"], values=True, grads=True, names=results).pipe("svg"))
    print(f"The computation graph with its values and gradients: {picture}\n")
    print(TRY_THIS, end="")
    return n


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/05_this_forum_is_awesome", help="folder for the picture")
    main(**vars(parser.parse_args()))
