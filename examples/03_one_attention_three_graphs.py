"""Lesson 03: the same attention as a graph of single numbers, of matrices, and as one node.

Small engines make a node of every number; large ones make a node of a whole layer. The arithmetic is the same, and so
are the gradients. What changes is how much one can see, and what it costs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import numpy as np
from console import Measure, check, heading, matrices, say, table

from tinygrad_qkv import Tensor, draw_graph, profile, recording
from tinygrad_qkv.nn import functional as F

PATHS = ("scalar", "tensor", "fused")
Q = np.array([[1.3, 0.9], [-0.7, -1.3]])  # two tokens, two numbers each
K = np.array([[-0.6, 0.2], [-2.3, -0.2]])
V = np.array([[-1.2, -0.7], [0.5, -0.3]])
MASK = {"is_causal": True}  # the first token sees itself, the second one sees both

TRY_THIS = """Try this:
  - Let the first token see the second: MASK = {}.
    How many exp nodes are there then, and where do they stand in the picture?
  - Hide all from the first token:
    MASK = {"ignore": [[True, True], [False, False]]}.
    What becomes of the scalar graph, and what of the gradient of its query?
  - Put math.nan into K[1] or V[1], which only the second token sees.
    Does the first row of the output notice? (The promises will read WRONG:
    NaN equals nothing, and matrices take another way around it.)
  - Draw 4 tokens in single numbers. When does a picture stop to help?
"""


def attend(path: str, arrays: tuple[np.ndarray, ...] = (Q, K, V), **mask: object) -> list[Tensor]:
    """The output, and q, k, v with the gradients of half of the output's squared length."""
    q, k, v = (Tensor(x, "float64", requires_grad=True) for x in arrays)
    output = F.scaled_dot_product_attention(q, k, v, path=path, **mask)
    output.backward(output.detach())
    return [output, q, k, v]


def counted(path: str) -> Counter:
    """How many nodes of each op the graph has: backward goes through each of them once, and the profiler counts."""
    with profile() as p:
        attend(path, **MASK)
    return Counter({row.name: row.backward_calls for row in p.rows() if row.backward_calls})


def by_hand(pairs: int, seeing: int, d: int) -> dict[str, int]:
    """The same by thinking: what has to be computed for so many pairs, and so many queries that see a key?"""
    return {
        "mul": pairs * d + pairs + pairs * d,  # q_i * k_i, the scale, weight * value
        "add": pairs * (d - 1) + (pairs - seeing) + (pairs - seeing) * d,  # of products, of exps, of weighted values
        "sub": pairs,  # the largest score of the row goes off all of them, so that no exp is too large
        "exp": pairs,
        "div": pairs,
    }


def worst(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference between outputs, and between gradients."""
    found = [
        (a[0].numpy(), b[0].numpy()),
        *((x.grad.numpy(), y.grad.numpy()) for x, y in zip(a[1:], b[1:], strict=True)),
    ]
    return max(float(np.abs(x - y).max()) for x, y in found)


def growth(sizes: list[int]) -> list[list]:
    """For n tokens of 4 numbers: the nodes as foretold, and the time of forward and backward, on every path."""
    rows = []
    for n in sizes:
        arrays = tuple(np.random.default_rng(i).normal(size=(n, 4)) for i in range(3))
        row: list = [n]
        for path in PATHS:
            nodes = sum(F.attention_node_count((n, n), 4, 4, path=path).values())
            attend(path, arrays)
            start = time.perf_counter()
            attend(path, arrays)
            row += [nodes, f"{(time.perf_counter() - start) * 1e3:.1f}"]
        rows.append(row)
    return rows


def main(out: str = "out/03_one_attention_three_graphs", largest: int = 32) -> dict[str, Counter]:
    """Tell the story, count every node, and draw the three graphs; returns the counts."""
    heading("One attention, three graphs")
    say("""Two tokens, two numbers each, and a causal mask: the first token sees itself, the second one sees both. The
        same call runs three times; only path= differs.""")
    matrices(["token 1", "token 2"], {"Q": Q, "K": K, "V": V})
    with recording():  # keep values and gradients for the pictures
        results = {path: attend(path, **MASK) for path in PATHS}
    counts = {path: counted(path) for path in PATHS}

    heading("1. How many nodes?")
    _, record = F.scaled_dot_product_attention(Q, K, V, need=("scores",), **MASK)
    may_meet = record.scores.numpy() != -np.inf
    pairs, seeing = int(may_meet.sum()), int(may_meet.any(axis=1).sum())
    thought = by_hand(pairs, seeing, 2)
    say(f"""Prediction: {pairs} pairs of a query and a key may meet. Each has a score of 2 products, 1 sum and the
        scale, then an exp and a division, and weighs 2 numbers of its value: {thought["mul"]} mul, {thought["add"]}
        add, {pairs} each of sub, exp and div. A pair behind the mask has no node at all: nothing of it can leak.""")
    ops = sorted({op for found in counts.values() for op in found}, key=lambda op: (op not in thought, op))
    table(["op", *PATHS], [[op, *(counts[path][op] for path in PATHS)] for op in ops])
    say(f"""In all {sum(counts["scalar"].values())}, {sum(counts["tensor"].values())} and
        {sum(counts["fused"].values())}. getitem takes the numbers out of Q, K and V, stack puts the results together:
        all else is arithmetic that one could do on paper.""")

    heading("2. The same numbers?")
    say("Prediction: to the last bits, in the output and in the gradients, for it is the same arithmetic.")
    rows = ["token 1", "token 2"]
    for path in PATHS:
        output, q, k, v = results[path]
        matrices(rows, {f"output, {path}": output.numpy(), "dL/dQ": q.grad.numpy(), "dL/dK": k.grad.numpy()})
    say("""The first token sees one key, so its weight is 1 whatever the score: its query gets no gradient. In the
        scalar graph one can see why: its exp is divided by itself.""")

    heading("3. What does it cost?")
    say("""Prediction: twice as many tokens are four times as many numbers. Nodes, then milliseconds for forward and
        backward, without a mask:""")
    sizes = [n for n in (2, 4, 8, 16, 32) if n <= largest]
    grown = growth(sizes)
    table(["tokens", *(word for path in PATHS for word in (path, "ms"))], grown)
    try:
        attend("scalar", tuple(np.zeros((1000, 4)) for _ in range(3)))
        refused = 0
    except ValueError as error:
        refused = 1
        say(f"And a thousand tokens: {error}.")

    heading("4. The pictures and the promises")
    Path(out).mkdir(parents=True, exist_ok=True)
    for path, (output, q, k, v) in results.items():
        picture = Path(out) / f"{path}.svg"
        names = {"Q": q, "K": k, "V": v, "output": output}
        picture.write_bytes(draw_graph(output, values=True, grads=True, names=names).pipe("svg"))
        print(f"The {path} graph: {picture}")
    print()
    foretold = {path: F.attention_node_count((2, 2), 2, 2, path=path, **MASK) for path in PATHS}
    check(
        [
            Measure("arithmetic nodes by hand, difference", _distance(counts["scalar"], thought), "<=", 0),
            *(
                Measure(f"nodes as foretold, {p}, difference", _distance(counts[p], foretold[p]), "<=", 0)
                for p in PATHS
            ),
            *(Measure(f"scalar against {p}", worst(results["scalar"], results[p]), "<=", 1e-12) for p in PATHS[1:]),
            Measure("nodes, twice the tokens: how many times", grown[-1][1] / grown[-2][1], ">=", 3.5),
            Measure("too many nodes are refused", refused, ">=", 1),
        ]
    )
    print(TRY_THIS, end="")
    return counts


def _distance(counts: Counter, expected: dict[str, int]) -> int:
    return sum(abs(counts[op] - n) for op, n in expected.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="out/03_one_attention_three_graphs", help="folder for the pictures")
    parser.add_argument("--largest", type=int, default=32, help="tokens at most in the table of costs")
    main(**vars(parser.parse_args()))
