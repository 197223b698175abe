"""Lesson 06b: one x feeds Q, K, V and the residual. Which of them did its gradient come through?

Backward adds up what comes back on all paths, and keeps the sum alone. Here the sum is taken apart again: what would
x have to change as a question, as a name to be found by, as an answer, and as itself?
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from console import Measure, check, heading, matrices, say

from tinygrad_qkv import (
    Tensor,
    draw_graph,
    explain_grad,
    explain_softmax_grad,
    grad,
    manual_seed,
    nn,
    recording,
    softmax,
)

TOKENS = ["This", "forum", "is", "awesome"]
PATHS = ["Q", "K", "V", "residual"]
rng = np.random.default_rng(5)
X = rng.normal(size=(4, 3)).round(1)  # one row for each token
WEIGHTS = [rng.normal(size=(3, 3)).round(1) for _ in range(3)]  # W_Q, W_K, W_V
TARGET = np.array([1.0, 0.0, 0.0])
ASKED = 0  # the token whose output counts: "This"

TRY_THIS = """Try this:
  - Ask "awesome" instead: ASKED = 3. Which rows of which parts move?
  - Make W_Q and W_K zero. Whose parts vanish? Could these two ever learn?
  - Add the residual twice: residual * 2. What do the other three say to that?
  - Let V be made from x.detach(): its part is 0, and the others stay.
"""


def head(q_in: Tensor, k_in: Tensor, v_in: Tensor, residual: Tensor) -> dict[str, Tensor]:
    """Attention with a residual and its loss; the four inputs are one x, or some of them cut off."""
    W_Q, W_K, W_V = map(Tensor, WEIGHTS)
    Q, K, V = q_in @ W_Q, k_in @ W_K, v_in @ W_V  # (4, 3) each
    scores = Q @ K.T / math.sqrt(3)  # (4, 4)
    weights = softmax(scores, axis=-1)
    output = residual + weights @ V  # (4, 3)
    miss = output[ASKED] - Tensor(TARGET)  # only one token is asked
    made = {"Q": Q, "K": K, "V": V, "scores": scores, "weights": weights, "output": output}
    return {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, **made, "loss": (miss * miss).sum() / 2}


def with_the_others_cut(name: str) -> np.ndarray:
    """dL/dx when three of the four inputs are detached: the experiment that each part claims to foretell."""
    x = Tensor(X, requires_grad=True)
    loss = head(*(x if name == path else x.detach() for path in PATHS))["loss"]
    return grad(loss, x)[0].numpy()


def main(out: str = "out/06b_who_gets_what") -> dict[str, np.ndarray]:
    """Tell the story and check every claim; returns the parts of dL/dx."""
    heading("One x, four readers: who gets what?")
    say("""Every token's x is read four times: as a question (Q), as a name to be found by (K), as an answer (V), and as
        itself, by the residual. The loss asks only for the output of "This". dL/dx is a sum over four paths.""")
    with recording():
        x = Tensor(X, requires_grad=True)
        n = head(x, x, x, x)
        split = explain_grad(n["loss"], x, {"Q": n["Q"], "K": n["K"], "V": n["V"], "residual": "residual"})
        n["loss"].backward(retain_graph=True)
    parts = {name: part.numpy() for name, part in split.parts.items()}

    heading("1. Who hears of it?")
    say("""Prediction: only "This" asks, so only its row comes through Q, and only its row through the residual.
        Everyone is looked at, so all four rows come through K and V.""")
    matrices(TOKENS, {f"through {name}": parts[name] for name in ("Q", "K")})
    matrices(TOKENS, {f"through {name}": parts[name] for name in ("V", "residual")})
    matrices(TOKENS, {"dL/dx by backward()": x.grad.numpy(), "sum of the parts": sum(parts.values())})
    print(f"{split}\n")
    say("""share is how far a part goes along the whole gradient, and shares add up to 100 %. A part may pull against
        the others: then its share and its cosine are negative.""")

    heading("2. What kind of message is it?")
    say("""Prediction: keys compete. A softmax does not care if all scores of a row rise together, so K can only say
        "more of you, less of you": the rows of its part add up to 0. V has no such limit: everyone gets the same
        message, as loud as "This" looks at them.""")
    A = n["weights"].numpy()[ASKED]
    loudness = np.linalg.norm(parts["V"], axis=1)
    matrices(["through K"], {"sum over the four tokens": parts["K"].sum(axis=0)})
    seen = {"weight of the token": A, "share of V's row": loudness / loudness.sum()}
    matrices(list(seen), {f"as {TOKENS[ASKED]} sees them": np.stack(list(seen.values()))}, TOKENS)

    heading("3. Inside the softmax")
    say("""A score, too, works in two ways: it raises its own weight, A * dA, and it takes from all weights of its
        row, -A * sum(A * dA), because they must add up to 1. Prediction: over the row, the two cancel.""")
    halves = explain_softmax_grad(n["loss"], n["scores"], n["weights"])
    rows = {name: part.numpy()[ASKED] for name, part in halves.parts.items()} | {"dS": halves.total.numpy()[ASKED]}
    matrices(list(rows), {f"the row of {TOKENS[ASKED]}": np.stack(list(rows.values()))}, TOKENS)

    heading("4. Is it true?")
    say("""Each part claims to be what dL/dx would be if the other three had been detached. So detach them, and look.
        And in a model one need not hold the tensors: names do.""")
    cut = {name: with_the_others_cut(name) for name in PATHS}
    manual_seed(0)
    block, z = nn.TransformerBlock(6, 2), Tensor(np.random.default_rng(1).normal(size=(1, 4, 6)), requires_grad=True)
    named = explain_grad(block(z).square().sum(), z, ["q", "k", "v", "feed", "residual"])
    print(f'explain_grad(loss, x, ["q", "k", "v", "feed", "residual"]) of a block:\n{named}\n')

    picture = Path(out) / "graph.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(draw_graph(n["loss"], values=True, grads=True, full=16, names={"x": x, **n}).pipe("svg"))
    print(f"The graph, where four arrows leave x: {picture}\n")
    others = [i for i in range(4) if i != ASKED]
    check(
        [
            Measure("parts against the sum of backward(), error", split.error, "<=", 1e-12),
            *(Measure(f"{p}: others detached, error", np.abs(cut[p] - parts[p]).max(), "<=", 1e-12) for p in PATHS),
            Measure(
                "Q and residual, rows that nobody asked", np.abs(parts["Q"] + parts["residual"])[others].max(), "<=", 0
            ),
            Measure("K: sum over the tokens", np.abs(parts["K"].sum(axis=0)).max(), "<=", 1e-12),
            Measure("V: loudness against the weights, error", np.abs(loudness / loudness.sum() - A).max(), "<=", 1e-12),
            Measure("halves of the softmax, sum over the row", abs(rows["dS"].sum()), "<=", 1e-12),
            Measure("halves of the softmax, error", halves.error, "<=", 1e-12),
            Measure("a block's parts by name, error", named.error, "<=", 1e-12),
        ]
    )
    print(TRY_THIS, end="")
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/06b_who_gets_what", help="folder for the picture")
    main(**vars(parser.parse_args()))
