"""Lesson 08: a phone book that one attention head learns to search, misspelt names included.

Every entry of the book is [name; number]. A caller gives a name, with typos, and wants the number. Queries are made
from the calls, keys and values from the entries. Nobody tells the head which entry is the right one, nor which part of
an entry is its name: all that it hears is the loss on the six digits of its answer.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import console
import numpy as np
import phonebook_data as data
import phonebook_measures as measures
from phonebook_data import BOOK, CALLS, SIZE

from tinygrad_qkv import Tensor, draw_graph, manual_seed, nn, recording
from tinygrad_qkv.nn import functional as F
from tinygrad_qkv.nn import init, optim
from tinygrad_qkv.viz import attention_map, attention_text

BOOKS = 16  # in a batch
WIDTH = data.NAME + data.PHONE  # 260 numbers for the name and 60 for the phone make a token

TYPED = [typed for typed, _, _ in CALLS]

TRY_THIS = """Try this:
  --seed 1                 other names and another beginning: the same end?
  --with-output-matrix     a W_O after the values, as in the Transformer
  --steps 100              too few: which promise breaks first?
  In the code: leave W_V out of Adam's groups. Who can still learn, and why?
"""


class SearchHead(nn.Module):
    """One attention head without biases. Its output is the answer: 6 digits, 10 logits each."""

    def __init__(self, with_output_matrix: bool = False):
        self.attn = nn.QKVProjection(WIDTH, d_k=32, d_v=data.PHONE, bias=False)  # W_Q, W_K 320 x 32; W_V 320 x 60
        self.W_O = nn.Parameter(init.xavier_uniform((data.PHONE, data.PHONE))) if with_output_matrix else None

    def forward(self, call: Tensor, book: Tensor, values_from: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """call (..., T, 320), book (..., S, 320) -> logits (..., T, 6, 10) and attention weights (..., T, S)."""
        q, k, v = self.attn(call, book, values_from)  # (..., T, 32), (..., S, 32), (..., S, 60)
        answer, record = F.scaled_dot_product_attention(q, k, v, need=("weights",))  # (..., T, 60)
        if self.W_O is not None:
            answer = answer @ self.W_O
        return answer.reshape(*answer.shape[:-1], data.DIGITS, 10), record.weights


def learning_rate(step: int, steps: int) -> float:
    """Twenty steps of warm-up, then half a cosine wave from 0.01 down to 5 % of it."""
    return 0.01 * min(1, (step + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def train(head: SearchHead, rng: np.random.Generator, steps: int) -> np.ndarray:
    """New names and new numbers in every batch, so that nothing can be learnt by heart; returns the names, (n, 10)."""
    names = data.random_names(rng, steps * BOOKS * SIZE, never=data.encode(data.REAL_NAMES))
    names = names.reshape(steps, BOOKS, SIZE, data.PLACES)
    typed = data.misspell(rng, names, rng.integers(3, size=names.shape[:-1]))  # no typo, one or two
    phones = data.random_phones(rng, names.shape[:-1])
    # Adam; decay lets the names fade from the values, where chance put them and no loss asks for them.
    addresses = [head.attn.W_Q, head.attn.W_K]
    contents = [head.attn.W_V] if head.W_O is None else [head.attn.W_V, head.W_O]
    groups = [{"params": addresses, "weight_decay": 0.0}, {"params": contents, "weight_decay": 0.4}]
    adam = optim.AdamW(groups, betas=(0.9, 0.98))
    with console.progress(steps) as report:
        for step in range(steps):
            # Caller i wants entry i. That betrays nothing: attention cannot see in which place an entry stands.
            logits, weights = head(Tensor(data.calls(typed[step])), Tensor(data.entries(names[step], phones[step])))
            loss = F.cross_entropy(logits, phones[step])
            head.zero_grad()
            loss.backward()
            for group in adam.param_groups:
                group["lr"] = learning_rate(step, steps)
            adam.step()
            shown = step % max(1, steps // 10) == 0 or step == steps - 1
            report(step, measures.training_line(head, step, loss.item(), weights.numpy()) if shown else "")
    return names.reshape(-1, data.PLACES)


def draw_one_step(head: SearchHead, rng: np.random.Generator, path: Path) -> None:
    """The computation graph of one training step on one book of three entries, with its values and gradients."""
    names, phones = data.encode(BOOK[:3]), data.random_phones(rng, (3,))
    call, book = Tensor(data.calls(data.misspell(rng, names, 1))), Tensor(data.entries(names, phones))
    with recording():
        logits, weights = head(call, book)
        loss = F.cross_entropy(logits, phones)
        loss.backward()
    named = {"call": call, "book": book, "weights": weights, "logits": logits, "loss": loss}
    path.write_bytes(draw_graph(loss, values=True, grads=True, names=named).pipe("svg"))
    head.zero_grad()


def main(
    steps: int = 1000, seed: int = 0, with_output_matrix: bool = False, out: str = "out/08_phonebook"
) -> dict[str, float]:
    """Tell the story, write the pictures and check the promises; returns the numbers that were promised."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    manual_seed(seed)
    head = SearchHead(with_output_matrix)
    real, phones = data.encode(data.REAL_NAMES), data.random_phones(rng, (SIZE,))
    story = data.encode(BOOK), data.encode(TYPED), phones
    sample = data.entries(data.random_names(rng, 2000, never=real), data.random_phones(rng, (2000,)))

    console.heading(f"The phone book: one attention head learns to search it (seed {seed})")
    console.say("""A caller gives a name, with typos, and wants the number. W_Q makes a query of the call, W_K a key
        and W_V a value of every entry. The softmax of query times key says where to look, and the value what
        stands there. The head starts with random matrices, and all it hears is the loss on its six digits.""")
    console.say("""Prediction: keys become names and values become numbers, though nobody says so. And since callers
        mistype, a query will match names that are only similar.""")

    console.heading("1. Training, on new names and numbers in every step")
    _, weights_before = measures.search(head, *story)
    before = measures.circuits(head, sample)
    draw_one_step(head, rng, folder / "graph_of_one_step.svg")
    trained_on = train(head, rng, steps)
    logits, weights = measures.search(head, *story)
    after = measures.circuits(head, sample)

    console.heading("2. What callers are told")
    rows = measures.answers(logits.numpy().argmax(-1), weights, phones)
    console.table(["the caller types", "typos", "the head looks at", "and says", ""], rows)

    console.heading("3. Where the head looks: the first 8 of 16 entries")
    maps = {"before training": weights_before, "after training": weights}
    first = {when: w[:, :8] for when, w in maps.items()}
    print(attention_text(first, TYPED, BOOK[:8], ascii=not console.speaks_unicode()), end="\n\n")
    attention_map(maps, TYPED, BOOK).save(folder / "attention.svg")

    console.heading("4. Names that it never saw")
    pools = {"made up": data.random_names(rng, 3000, never=np.concatenate([real, trained_on])), "real": real}
    exams = {(pool, typos): measures.exam(head, rng, pools[pool], typos) for pool in pools for typos in (0, 1, 2)}
    rows = [[*names, *result.values()] for names, result in exams.items()]
    console.table(["names", "typos", "loss", "entry found", "number right"], rows)

    console.heading("5. What W_K and W_V pick out of an entry")
    rows = measures.shares(before, after)
    console.table(["share of the variance", "from the name", "from the number"], rows)

    console.heading("6. How typos are forgiven")
    console.say(f"""What a score gains if a place of the call (row) and a place of the entry (column) hold the same
        letter; a dot is less than 0.15. Before training the largest was {before["bonus"].max():.3f}.  The band beside
        the diagonal forgives a letter too few or too many, which moves all later letters by one place.""")
    console.grid(after["bonus"])
    off = [measures.mean_at_distance(after["bonus"], places) for places in range(4)]
    print("  mean 0, 1, 2 and 3 places off the diagonal: " + ", ".join(f"{x:.2f}" for x in off) + "\n")

    console.heading("7. Weights say where, values say what")
    swap = measures.swap_two_numbers(head, phones)
    console.say(f"""The weights of every call sum to 1 (to {swap["sum"]:.1g}). Now jindrich and heinrich swap their
        numbers. If only the values see it, the weights change by {swap["values"]:g}, exactly, and
        {swap["follow"]:.0%} of the answers are the swapped ones. If the keys see it too, a weight changes by up to
        {swap["keys"]:.3f}: W_K has learnt to overlook numbers almost, not wholly.""")

    console.heading("8. Pictures and promises")
    print(f"  {folder / 'graph_of_one_step.svg'}\n  {folder / 'attention.svg'}\n")
    promised = [
        console.Measure("number right, made-up names, 1 typo", exams["made up", 1]["right"], ">=", 0.97),
        console.Measure("number right, real names, 1 typo", exams["real", 1]["right"], ">=", 0.85),
        console.Measure("share of key variance from the name", after["keys"], ">=", 0.95),
        console.Measure("share of value variance from the number", 1 - after["values"], ">=", 0.98),
        console.Measure("same letter: bonus at 0 places off less at 1", off[0] - off[1], ">=", 0.0),
        console.Measure("same letter: bonus at 1 place off less at 2", off[1] - off[2], ">=", 0.0),
        console.Measure("same letter: bonus at 2 places off", off[2], ">=", 0.1),
        console.Measure("change of the weights when values swap", swap["values"], "<=", 0.0),
        console.Measure("answers that follow the swap", swap["follow"], ">=", 1.0),
    ]
    console.check(promised)
    print(TRY_THIS, end="")
    return {measure.name: measure.value for measure in promised}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="training steps; default 1000")
    parser.add_argument("--seed", type=int, default=0, help="of names, typos, numbers and matrices; default 0")
    parser.add_argument("--with-output-matrix", action="store_true", help="add a W_O, as the Transformer has")
    parser.add_argument("--out", default="out/08_phonebook", help="folder for the pictures")
    main(**vars(parser.parse_args()))
