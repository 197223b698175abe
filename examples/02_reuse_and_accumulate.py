"""Lesson 02: what is used twice is blamed twice; why backward adds, and why it goes in one order only.

Backward is ten lines of Python: walk the graph, call each op's rule, pass on what it gives. Here they are written out,
over the library's own rules, and then broken in the two ways in which nearly everybody breaks them once: `=` instead of
`+=`, and another order. Every wrong number is predicted before it is computed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from console import Measure, check, heading, matrices, say, table

from tinygrad_qkv import Tensor, draw_graph, recording, softmax

TRY_THIS = """Try this:
  - Write `loss = c + b` instead of `b + c` in small(). Which wrong number
    becomes right, and why is that luck?
  - Write `output = weights @ V + X` in head(). Does W_E hear of the
    attention now, in the order of finding?
  - In 3., lower the learning rate to 0.05: does the run that never forgets
    still overshoot?
Promises about the old numbers will then read WRONG.
"""


def small() -> dict[str, Tensor]:
    """A graph of four nodes in which b is used three times: loss = b + b * b, where b = a * a."""
    a = Tensor(3.0, "float64", requires_grad=True)
    b = a * a
    c = b * b
    loss = b + c
    return {"a": a, "b": b, "c": c, "loss": loss}


def head() -> dict[str, Tensor]:
    """Self-attention with a residual over three words: X goes into Q, K, V and the sum, four times in all."""
    random = np.random.default_rng(2)
    W_E, W_Q, W_K, W_V = (Tensor(random.normal(size=(n, 2)), requires_grad=True) for n in (3, 2, 2, 2))
    X = Tensor(np.eye(3)) @ W_E  # (3, 2): a row for each word
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V  # (3, 2) each
    weights = softmax(Q @ K.T / math.sqrt(2), axis=-1)  # (3, 3)
    output = X + weights @ V  # (3, 2)
    loss = (output * Tensor(random.normal(size=(3, 2)))).sum()
    steps = {"Q": Q, "K": K, "V": V, "weights": weights, "output": output, "loss": loss}
    return {"W_E": W_E, "W_Q": W_Q, "W_K": W_K, "W_V": W_V, "X": X, **steps}


# ---- backward, written out. `t._node` is where a tensor keeps its place in the graph: the op, its parents, its rules.


def backward(loss: Tensor, order: list[Any], add: bool = True) -> tuple[dict[Any, Any], list[tuple[Any, Any, Any]]]:
    """The gradient of every node, and the contributions (from, to, value) in the order in which they came."""
    grads, contributions = {loss._node: np.ones(loss.shape)}, []
    for node in order:
        g = grads[node]
        for parent, part in zip(node.parents, parts(node, g), strict=True):
            if parent in order:
                grads[parent] = grads[parent] + part if add and parent in grads else part  # += or =
                contributions.append((node, parent, part))
    return grads, contributions


def parts(node: Any, g: Any) -> list[Any]:
    """What an op's rules give to its operands, called with g and with what the op saved."""
    saved = [s.data if isinstance(s, Tensor) else s for s in node.saved]
    if node.output is not None:
        saved[0] = node.output  # this op's rule reads the op's own result, as softmax's does
    rules: Any = node.pullbacks
    return [rule(g, *saved) for rule in rules] if isinstance(rules, tuple) else rules(g, *saved)


def as_found(loss: Tensor) -> list[Any]:
    """All nodes that need a gradient, in the order in which one finds them from the loss: the wrong one."""
    order = [loss._node]
    for node in order:  # grows on the way
        for parent in node.parents:
            if getattr(parent, "requires_grad", False) and parent not in order:  # a number has no gradient
                order.append(parent)
    return order


def latest_first(loss: Tensor) -> list[Any]:
    """The same nodes, the latest first: nobody comes before those who have used it. This is the engine's order."""
    return sorted(as_found(loss), key=lambda node: node.number, reverse=True)


def along_every_path(node: Any, g: Any, arrived: Callable[[Any, Any], None]) -> int:
    """Backward by recursion, which needs no order: right, but it walks each path on its own; returns the rules run."""
    arrived(node, g)
    pairs = [(p, part) for p, part in zip(node.parents, parts(node, g), strict=True) if hasattr(p, "op")]
    return len(pairs) + sum(along_every_path(parent, part, arrived) for parent, part in pairs)


def doubled(times: int) -> tuple[int, int]:
    """Rules run for y = y + y + ... + y by doubling: in order, and along every path."""
    y = Tensor(1.0, "float64", requires_grad=True)
    for _ in range(times):
        y = y + y
    _, contributions = backward(y, latest_first(y))
    return len(contributions), along_every_path(y._node, np.ones(()), lambda node, g: None)


def train(forget: bool, steps: int = 6, lr: float = 0.2) -> list[float]:
    """Gradient descent on w * w from 1, with or without zero_grad() before each step: w after each step."""
    w = Tensor(1.0, "float64", requires_grad=True)
    path = [w.item()]
    for _ in range(steps):
        if forget:
            w.zero_grad()
        (w * w).backward()
        w.data -= lr * w.grad
        path.append(w.item())
    return path


def distance(a: Any, b: Any) -> float:
    """The largest difference between two arrays."""
    return float(np.abs(a - b).max())


def what_is_used_twice(t: dict[str, Tensor]) -> list[Measure]:
    """Parts 0 to 2 of the story: the right numbers, and those without `+=` and in another order."""
    heading("What is used twice is blamed twice")
    say("""b = a * a, c = b * b, loss = b + c, and a = 3. So loss = a^2 + a^4 and its slope is 2a + 4a^3. Prediction:
        6 + 108 = 114.""")
    a, b, loss = t["a"]._node, t["b"]._node, t["loss"]
    right, contributions = backward(loss, latest_first(loss))
    names = {node._node: name for name, node in t.items()}
    table(["from", "to", "adds"], [[f"{names[n]} ({n.op})", names[p], float(part)] for n, p, part in contributions])
    nudged = ((3 + 1e-5) ** 2 + (3 + 1e-5) ** 4 - (3 - 1e-5) ** 2 - (3 - 1e-5) ** 4) / 2e-5
    say(f"""b hears from loss once and from c twice: 1 + 9 + 9 = {right[b]:.0f}. a hears from b twice, since a * a has
        two operands: 57 + 57 = {right[a]:.0f}. By moving a a little: {nudged:.4f}.""")

    heading("1. Setting instead of adding")
    say("""Prediction: of several contributions the last one is left. b keeps 9 of 1 + 9 + 9, and a keeps one half of
        9 * 2a: 27. An error of 87.""")
    set_only, _ = backward(loss, latest_first(loss), add=False)
    say(f"With `=` in place of `+=`: dL/db = {set_only[b]:.0f}, dL/da = {set_only[a]:.0f}.")

    heading("2. Another order")
    say("""From the loss one finds its operands b and c, and then a: loss, b, c, a. Prediction: when it is b's turn,
        only the 1 from the loss has arrived, and b passes on 1 * 3 + 1 * 3 = 6. The 18 from c come too late.""")
    too_early, _ = backward(loss, as_found(loss))
    say(f"""dL/da = {too_early[a]:.0f}, an error of {114 - too_early[a]:.0f}. dL/db is {too_early[b]:.0f}, which is
        right, but b had spoken before it was. The engine numbers its nodes as they are made, and goes from the
        latest to the earliest: whoever used b was made after b.""")
    say("""Recursion needs no order: whenever something arrives, pass it on at once. Prediction: 114 too, but along
        every path on its own, and doubling n times has 2^n paths: 2^(n+1) - 2 rules instead of 2n.""")
    arrived: list[float] = []
    along_every_path(loss._node, np.ones(()), lambda node, g: arrived.append(float(g)) if node is a else None)
    counts = {n: doubled(n) for n in (2, 6, 10)}
    table(["doublings", "rules in order", "rules along every path"], [[n, *pair] for n, pair in counts.items()])
    too_many = sum(abs(run - (2 ** (n + 1) - 2)) for n, (_, run) in counts.items())
    return [
        Measure("dL/da in order, distance from 114", abs(right[a] - 114), "<=", 0),
        Measure("dL/da with =, distance from 27", abs(set_only[a] - 27), "<=", 0),
        Measure("dL/da as found, distance from 6", abs(too_early[a] - 6), "<=", 0),
        Measure("dL/da along every path, distance from 114", abs(sum(arrived) - 114), "<=", 0),
        Measure("rules in order, off 2n", sum(abs(run - 2 * n) for n, (run, _) in counts.items()), "<=", 0),
        Measure("rules along every path, off 2^(n+1) - 2", too_many, "<=", 0),
    ]


def twice_and_forgetting(t: dict[str, Tensor]) -> list[Measure]:
    """Part 3: what a second backward does, and training with and without zero_grad()."""
    heading("3. Twice, and forgetting")
    t["loss"].backward(retain_graph=True)
    once = t["a"].grad.item()
    t["loss"].backward()
    twice = t["a"].grad.item()
    refusal = ""
    try:
        t["loss"].backward()
    except RuntimeError as error:
        refusal = str(error)
    say(f"""loss.backward() puts {once:.0f} into a.grad; a second time, with retain_graph=True at the first, it adds
        another 114: {twice:.0f}. That is `+=` again, across calls: a large batch may come in parts. A third time says:
        "{refusal}".""")
    say("""So who trains has to forget: zero_grad() before each step. Prediction for w * w, learning rate 0.2: w shrinks
        by 0.6 a step; without forgetting, old slopes push on, and w swings through 0.""")
    forgetting, remembering = train(True), train(False)
    runs = np.array([forgetting, remembering])
    matrices(["zero_grad()", "never"], {f"w after 0 to {len(forgetting) - 1} steps": runs})
    return [
        Measure("second backward, distance from 2 * 114", abs(twice - 228), "<=", 0),
        Measure("third backward refused", float("retain_graph=True" in refusal), ">=", 1),
        Measure("w with zero_grad, distance from 0.6^6", abs(forgetting[-1] - 0.6**6), "<=", 1e-12),
        Measure("smallest w without zero_grad", min(remembering), "<=", -0.5),
    ]


def in_attention(t: dict[str, Tensor]) -> list[Measure]:
    """Part 4: the same two mistakes on an attention head."""
    heading("4. The same in attention")
    say("""X, the rows of W_E, goes into Q, K, V and the residual. Prediction: four contributions. With `=` the last one
        alone is left: that of Q, the first product that was made. In the order of finding the residual leads from the
        output to X at once, so X passes on that part alone, and W_E never hears of the attention.""")
    X, W_E, loss = t["X"]._node, t["W_E"]._node, t["loss"]
    names = {node._node: name for name, node in t.items()}
    _, found = backward(loss, latest_first(loss))
    to_X = {names[n]: part for n, p, part in found if p is X}
    words = ["word 1", "word 2", "word 3"]
    for pair in (("output", "V"), ("K", "Q")):
        matrices(words, {f"from {name} to X": to_X[name] for name in pair})
    wrong, _ = backward(loss, latest_first(loss), add=False)
    early, _ = backward(loss, as_found(loss))
    loss.backward()
    true = t["W_E"].grad.numpy()
    matrices(words, {"dL/dW_E": true, "with =": wrong[W_E], "as found": early[W_E]})
    length = np.linalg.norm(true)
    off = {name: float(np.linalg.norm(g[W_E] - true) / length) for name, g in {"=": wrong, "found": early}.items()}
    say(f"""With `=` the gradient is off by {off["="]:.0%} of its length, in the order of finding by
        {off["found"]:.0%}. Neither raises an error, and both still point somewhere: a model that trains a little is no
        proof.""")
    return [
        Measure("four contributions to X, sum off by", distance(sum(to_X.values()), true), "<=", 1e-12),
        Measure("with = only Q's is left, off by", distance(wrong[W_E], to_X["Q"]), "<=", 0),
        Measure("as found only the residual's, off by", distance(early[W_E], to_X["output"]), "<=", 0),
        Measure("dL/dW_E with =, share that is wrong", off["="], ">=", 0.5),
        Measure("dL/dW_E as found, share that is wrong", off["found"], ">=", 0.2),
    ]


def main(out: str = "out/02_reuse_and_accumulate") -> dict[str, float]:
    """Tell the story, write the two graphs, and check every number; returns the numbers that were promised."""
    with recording():  # so that the pictures show every gradient
        graphs = {"small": small(), "attention": head()}
    promises = [
        *what_is_used_twice(graphs["small"]),
        *twice_and_forgetting(graphs["small"]),
        *in_attention(graphs["attention"]),
    ]
    heading("5. The pictures and the promises")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in graphs.items():
        picture = folder / f"{name}.svg"
        picture.write_bytes(draw_graph(tensors["loss"], values=True, grads=True, names=tensors).pipe("svg"))
        print(f"The graph with its values and gradients: {picture}")
    print()
    say("""In small.svg the leaf a holds what both backward passes of 3. added up,
        228; b and c, which are no leaves, show the last pass alone.""")
    check(promises)
    print(TRY_THIS, end="")
    return {promise.name: promise.value for promise in promises}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/02_reuse_and_accumulate", help="folder for the pictures")
    main(**vars(parser.parse_args()))
