"""Lesson 06d: why does it not learn? Three broken models, and what `diagnose()` says of each.

A gradient of 0 raises no error. The loss is finite, training runs, and some matrix stays where it started. There are
some thirty reasons for that, most of them easy to repair once they are named. `diagnose(model, loss)` runs one step,
follows each gradient that is missing to the op at which it died, and changes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from console import Measure, check, heading, say

from tinygrad_qkv import Tensor, diagnose, draw_graph, manual_seed, nn, recording
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import optim

TRY_THIS = """Try this:
  - In 1., give W_Q alone random values. Which of the two learns in the first
    step, and which only from the second on?
  - In 2., make the optimiser last. Which finding is left?
  - In 3., multiply W_Q and W_K by 10 instead of 300: still saturated?
Promises about the old findings will then read WRONG.
"""
D, T = 8, 5
X = np.random.default_rng(6).normal(size=(3, T, D)).astype(np.float32)
TARGET = np.random.default_rng(7).normal(size=(3, T, D)).astype(np.float32)


class Reader(nn.Module):
    """A projection, attention, and a projection; what attention found is handed on as fixed if `cut`."""

    def __init__(self, cut: bool):
        self.embed, self.attn, self.cut = nn.Linear(D, D), nn.MultiHeadAttention(D, 2), cut
        self.head = nn.Linear(D, D)

    def forward(self, x: Any) -> Tensor:
        found = self.attn(self.embed(x))
        return self.head(found.detach() if self.cut else found)


def told(model: nn.Module, **options: Any) -> Any:
    """The diagnosis of a model that shall give TARGET for X, printed."""
    found = diagnose(model, lambda: F.mse(model(X), TARGET), **options)
    print(f"{found}\n")
    return found


def start_at_zero() -> tuple[Any, Any]:
    """W_Q = W_K = 0: each waits for the other."""
    heading("1. W_Q and W_K start at 0")
    say("""Zero is a fine start for a bias. dW_Q is a product with the keys, and dW_K one with the queries. Prediction:
        with W_Q = W_K = 0 both are exactly 0, and both stay there for ever; W_V and W_O learn.""")
    model = nn.MultiHeadAttention(D, 2, bias=False)
    model.W_Q.data = model.W_K.data = np.zeros((D, D), np.float32)
    broken = told(model)
    say("Repaired with random values for one of them; the other begins one step later:")
    model.W_K.data = nn.init.xavier_uniform((D, D))
    return broken, told(model)


def cut_and_forgotten() -> tuple[Any, Any]:
    """A detach() in the middle, and an optimiser that was made before the last layer."""
    heading("2. A detach() in the middle, an optimiser made too early")
    say("""Prediction: all in front of detach() gets no gradient at all: the 2 parameters of the embedding and the 8 of
        the attention. The head gets one, and does not move either, since its layer came after the optimiser.""")
    model = Reader(cut=True)
    opt = optim.SGD([p for name, p in model.named_parameters() if not name.startswith("head")], lr=0.1)
    broken = told(model, optimizer=opt)
    say("Repaired, with one finding left. A bias of keys never learns, in any model, and that does no harm:")
    model.cut = False
    return broken, told(model, optimizer=optim.SGD(model.parameters(), lr=0.1))


def too_sharp() -> tuple[Any, Any]:
    """Scores so large that softmax is one-hot."""
    heading("3. Scores that are too large")
    say("""Softmax multiplies a gradient by p (1 - p), which is 0 where p is 0 or 1. W_Q and W_K times 300 make the
        scores 90,000 times larger. Prediction: the largest weight of a row is 1 to six places, and W_Q and W_K learn
        nothing from most rows.""")
    model = nn.MultiHeadAttention(D, 2, bias=False)
    model.W_Q.data *= np.float32(300)
    model.W_K.data *= np.float32(300)
    broken = told(model)
    say("Repaired by a fresh start:")
    return broken, told(nn.MultiHeadAttention(D, 2, bias=False))


def main(out: str = "out/06d_why_is_it_zero") -> list[Any]:
    """Tell the story of three models, draw the one that is cut, and check the findings; returns the six diagnoses."""
    manual_seed(6)
    pairs = [start_at_zero(), cut_and_forgotten(), too_sharp()]
    heading("4. The picture and the promises")
    with recording():
        loss = F.mse(Reader(cut=True)(X), TARGET)
    picture = Path(out) / "cut.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(draw_graph(loss).pipe("svg"))
    print(f"What is left of the graph of 2.: {picture}\n")
    check(promises(pairs))
    print(TRY_THIS, end="")
    return [found for pair in pairs for found in pair]


def promises(pairs: list[tuple[Any, Any]]) -> list[Measure]:
    """What this lesson claims of the broken models and of the repaired ones."""
    reasons = [{(f.parameter, f.reason) for f in broken.faults} for broken, _ in pairs]
    saddle = {("W_Q", "saddle"), ("W_K", "saddle")}
    detached = sum(reason == "detached" for _, reason in reasons[1])
    forgotten = {("head.weight", "not in the optimiser"), ("head.bias", "not in the optimiser")}
    sharp = {("W_Q", "saturated softmax"), ("W_K", "saturated softmax")}
    weight = pairs[2][0].for_("W_Q")[0].numbers["max weight"] if reasons[2] == sharp else 0.0
    return [
        Measure("1. the saddle, and nothing else", float(reasons[0] == saddle), ">=", 1),
        Measure("2. parameters in front of detach()", abs(detached - 10), "<=", 0),
        Measure("2. the head is not held", float(forgotten <= reasons[1]), ">=", 1),
        Measure("3. saturated, and nothing else", float(reasons[2] == sharp), ">=", 1),
        Measure("3. distance of the largest weight from 1", 1 - weight, "<=", 1e-6),
        Measure("faults of the three repaired models", sum(len(repaired.faults) for _, repaired in pairs), "<=", 0),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/06d_why_is_it_zero", help="folder for the picture")
    main(**vars(parser.parse_args()))
