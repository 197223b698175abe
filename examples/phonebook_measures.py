"""What can be measured of a head that searches the phone book of lesson 08.

A head is called as in the lesson: head(call, book, values_from=None) -> logits and attention weights.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import phonebook_data as data
from phonebook_data import BOOK, CALLS, LETTERS, NAME, PLACES, SIZE

from tinygrad_qkv import Tensor, no_grad
from tinygrad_qkv.nn import functional as F


def right(answers: np.ndarray, phones: np.ndarray) -> float:
    """The share of numbers (..., 6) with all six digits right."""
    return float((answers == phones).all(axis=-1).mean())


def found(weights: np.ndarray) -> float:
    """The share of calls whose largest weight is on the right entry; caller i wants entry i.  weights (..., T, S)."""
    return float((weights.argmax(axis=-1) == np.arange(weights.shape[-2])).mean())


def name_share(book: np.ndarray, W: np.ndarray) -> float:
    """How much of the variance of book @ W comes from the names; the rest comes from the numbers.

    Exact, because names and numbers are drawn independently: their variances add up.  book (n, 320), W (320, d).
    """
    name = np.var(book[:, :NAME] @ W[:NAME], axis=0).sum()
    phone = np.var(book[:, NAME:] @ W[NAME:], axis=0).sum()
    return float(name / (name + phone))


def same_letter_bonus(W_Q: np.ndarray, W_K: np.ndarray) -> np.ndarray:
    """(10, 10): what a score gains if place p of the question and place q of the entry hold the same letter.

    W_Q W_K^T is all that scores depend on; its block for two places is a table of letter against letter.
    """
    circuit = W_Q[:NAME] @ W_K[:NAME].T / math.sqrt(W_Q.shape[1])
    circuit = circuit.reshape(PLACES, LETTERS, PLACES, LETTERS)
    same = np.einsum("pcqc->pq", circuit) / LETTERS
    other = (circuit.sum(axis=(1, 3)) - LETTERS * same) / (LETTERS * (LETTERS - 1))
    return same - other


def mean_at_distance(bonus: np.ndarray, places: int) -> float:
    """The mean of the two diagonals that lie so many places off the main one."""
    return float(np.concatenate([np.diagonal(bonus, places), np.diagonal(bonus, -places)]).mean())


@no_grad()
def search(head: Any, names: np.ndarray, typed: np.ndarray, phones: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Logits (..., T, 6, 10) and attention weights (..., T, S) of calls `typed` about books of `names` and `phones`."""
    logits, weights = head(Tensor(data.calls(typed)), Tensor(data.entries(names, phones)))
    return logits, weights.numpy()


def exam(head: Any, rng: np.random.Generator, pool: np.ndarray, typos: int, books: int = 400) -> dict[str, float]:
    """Many books of 16 names out of `pool`, one call for each entry, with so many typos."""
    names = pool[rng.permuted(np.tile(np.arange(len(pool)), (books, 1)), axis=1)[:, :SIZE]]  # (books, 16, 10)
    phones = data.random_phones(rng, names.shape[:-1])
    logits, weights = search(head, names, data.misspell(rng, names, typos), phones)
    answers = logits.numpy().argmax(-1)
    return {"loss": F.cross_entropy(logits, phones).item(), "found": found(weights), "right": right(answers, phones)}


def circuits(head: Any, book: np.ndarray) -> dict[str, Any]:
    """What the matrices pick out: share of keys and values that comes from the names, bonus for the same letter."""
    W_Q, W_K, W_V = head.attn.W_Q, head.attn.W_K, head.attn.W_V
    if head.W_O is not None:
        W_V = W_V @ head.W_O  # a value on its way to the answer
    return {
        "keys": name_share(book, W_K.numpy()),
        "values": name_share(book, W_V.numpy()),
        "bonus": same_letter_bonus(W_Q.numpy(), W_K.numpy()),
    }


@no_grad()
def swap_two_numbers(head: Any, phones: np.ndarray) -> dict[str, float]:
    """Ask for jindrich and heinrich after their numbers were swapped, first for the values alone: what changes?"""
    names, pair = data.encode(BOOK), [BOOK.index("jindrich"), BOOK.index("heinrich")]
    swapped = phones.copy()
    swapped[pair] = phones[pair[::-1]]
    call, book = Tensor(data.calls(names[pair])), Tensor(data.entries(names, phones))
    other = Tensor(data.entries(names, swapped))
    (_, weights), (_, weights_with_new_keys) = head(call, book), head(call, other)
    logits, weights_then = head(call, book, values_from=other)
    return {
        "sum": np.abs(weights.numpy().sum(axis=-1) - 1).max(),
        "values": np.abs(weights_then.numpy() - weights.numpy()).max(),
        "keys": np.abs(weights_with_new_keys.numpy() - weights.numpy()).max(),
        "follow": right(logits.numpy().argmax(-1), swapped[pair]),
    }


def answers(told: np.ndarray, weights: np.ndarray, phones: np.ndarray) -> list[list[Any]]:
    """A row for each call: what was typed, its typos, where the head looked most, the number it gave, and a verdict.

    told (calls, 6), weights (calls, 16), phones (16, 6).
    """
    rows = []
    for (typed, meant, typos), answer, row in zip(CALLS, told, weights, strict=True):
        first, second = np.argsort(row)[:-3:-1]
        said, wanted = ("".join(map(str, number)) for number in (answer, phones[BOOK.index(meant)]))
        verdict = "right" if said == wanted else f"wrong, it is {wanted}"
        rows.append([typed, typos, f"{BOOK[first]} {row[first]:.2f}, {BOOK[second]} {row[second]:.2f}", said, verdict])
    return rows


def shares(before: dict[str, Any], after: dict[str, Any]) -> list[list[Any]]:
    """A row for keys and values, before and after training: the shares from the name and from the number."""
    stages = {"before": before, "after": after}
    return [
        [f"{what}, {when} training", found[what], 1 - found[what]]
        for what in ("keys", "values")
        for when, found in stages.items()
    ]


def training_line(head: Any, step: int, loss: float, weights: np.ndarray) -> str:
    """How training stands: the loss, the share of calls that look most at the right entry, and the gradients' sizes."""
    matrices = {"W_Q": head.attn.W_Q, "W_K": head.attn.W_K, "W_V": head.attn.W_V}
    sizes = [f"|d{name}| {np.linalg.norm(matrix.grad.numpy()):.0e}" for name, matrix in matrices.items()]
    return f"  step {step:>4}  loss {loss:.3f}  found {found(weights):.2f}  {'  '.join(sizes)}"
