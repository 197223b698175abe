"""Names, misspellings and phone numbers for lesson 08, made by NumPy for all books at once.

A name is a row of 10 small integers: 0 is an empty place, 1..26 are the letters a..z. A phone number is a row of 6
digits. Both become one-hot vectors: nothing about the inputs is learnt, so all that is learnt sits in W_Q, W_K, W_V.
"""

from __future__ import annotations

import numpy as np

LETTERS, PLACES, DIGITS = 26, 10, 6  # letters of the alphabet, places in a name, digits in a number
NAME, PHONE = PLACES * LETTERS, DIGITS * 10  # 260 numbers say the name, 60 say the phone

# Real Czech names, without accents. Training never sees one of them.
_REAL = """
alena alois andrea antonin barbora bohumil bozena dagmar dalibor daniel david denisa dusan eliska emil eva filip
frantisek hana heinrich helena hynek igor irena ivana iveta jakub jan jarmila jaromir jaroslav jindra jindrich
jindriska jiri jitka josef karel katerina klara ladislav lenka libor ludmila lukas marek marketa martin michal milan
miroslav monika oldrich ondrej pavel petr radek roman rudolf simona stanislav tereza tomas vaclav veronika viktor
vladimir vojtech zbynek zdenek zuzana
"""
REAL_NAMES = _REAL.split()

# The book of the story, and who calls.
SIZE = 16  # entries in any book, and calls about it
BOOK = ["jindrich", "jindra", "heinrich", "jindriska", "oldrich", "jaromir", "jiri", "vojtech"]
BOOK += ["zuzana", "jaroslav", "jitka", "jan", "josef", "petr", "pavel", "zdenek"]
CALLS = [  # what a caller types, who is meant, how many typos that is
    ("jindrich", "jindrich", 0),
    ("jindrch", "jindrich", 1),
    ("yindrich", "jindrich", 1),
    ("jindirch", "jindrich", 1),
    ("yindirch", "jindrich", 2),
    ("jimdrih", "jindrich", 2),
    ("jindrra", "jindra", 1),
    ("heinrch", "heinrich", 1),
]

# A made-up syllable is an onset, a vowel and a coda. What stands here more often is drawn more often.
_ONSETS = "b c d f g h j k l m n p r s t v z b d j k l m n r s t v bl br ch dr fr hr kl kr pr sl st tr vl zd"
ONSETS = ["", "", "", *_ONSETS.split()]
VOWELS = list("aaaaeeeiiioouy")
CODAS = ["", "", "", "", "", "n", "r", "l", "s", "k", "m", "v", "t", "ch", "sh", "nd"]


def encode(words: list[str]) -> np.ndarray:
    """Words as rows of places, (n, 10); a longer word is cut."""
    rows = np.zeros((len(words), PLACES), np.int8)
    for row, word in zip(rows, words, strict=True):
        row[: len(word)] = [ord(letter) - ord("a") + 1 for letter in word[:PLACES]]
    return rows


def decode(name: np.ndarray) -> str:
    """One row of places as a word."""
    return "".join(chr(ord("a") - 1 + place) for place in name if place)


def random_names(rng: np.random.Generator, count: int, never: np.ndarray) -> np.ndarray:
    """Names of two or three random syllables, (count, 10), none of which is among the rows of `never`."""
    drawn = count + count // 2 + 200  # too long and unwanted ones will drop out
    parts = [encode(ONSETS)[:, :2], encode(VOWELS)[:, :1], encode(CODAS)[:, :2]] * 3
    letters = np.concatenate([part[rng.integers(len(part), size=drawn)] for part in parts], axis=1)  # (drawn, 15)
    letters[rng.random(drawn) < 0.5, 10:] = 0  # half of the names end after the second syllable
    gaps_last = np.argsort(letters == 0, axis=1, kind="stable")
    letters = np.take_along_axis(letters, gaps_last, axis=1)
    names = letters[letters[:, PLACES] == 0, :PLACES]
    return names[~np.isin(_number(names), _number(never))][:count]


def _number(names: np.ndarray) -> np.ndarray:
    """One integer for each name, so that names can be compared."""
    return names @ 27 ** np.arange(PLACES)


def misspell(rng: np.random.Generator, names: np.ndarray, typos: int | np.ndarray) -> np.ndarray:
    """`names` (..., 10) with `typos` (...) random typos each: a letter wrong, missing, too many, or two swapped."""
    typos = np.broadcast_to(typos, names.shape[:-1])
    for done in range(typos.max(initial=0)):
        names = np.where((typos > done)[..., None], _one_typo(rng, names), names)
    return names


def _one_typo(rng: np.random.Generator, names: np.ndarray) -> np.ndarray:
    """One typo in every name: first choose which old place each new place reads, then write a new letter."""
    place = np.arange(PLACES)
    length = (names > 0).sum(axis=-1, keepdims=True)
    at = rng.integers(length)  # (..., 1): where it happens
    letter = np.take_along_axis(names, at, axis=-1)
    following = np.take_along_axis(names, np.minimum(at + 1, length - 1), axis=-1)
    kind = rng.choice(["wrong", "missing", "extra", "swapped"], size=at.shape)
    kind = np.where((kind == "swapped") & (letter == following), "wrong", kind)  # to swap equals is no typo

    reads = np.where(kind == "missing", place + (place >= at), place)
    reads = np.where(kind == "extra", place - (place > at), reads)
    reads = np.where(kind == "swapped", place + (place == at) - (place == at + 1), reads)
    with_empty_end = np.concatenate([names, np.zeros_like(letter)], axis=-1)
    typo = np.take_along_axis(with_empty_end, reads, axis=-1)

    another = (letter - 1 + rng.integers(1, LETTERS, size=at.shape)) % LETTERS + 1  # any letter but this one
    written = (place == at) & ((kind == "wrong") | (kind == "extra"))
    return np.where(written, another, typo).astype(np.int8)


def random_phones(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of six random digits, shape + (6,)."""
    return rng.integers(10, size=(*shape, DIGITS))


def entries(names: np.ndarray, phones: np.ndarray) -> np.ndarray:
    """What stands in the book, (..., 320): [name; phone]. An empty place of a name is 26 zeros."""
    name = np.eye(LETTERS + 1, dtype=np.float32)[names][..., 1:].reshape(*names.shape[:-1], NAME)
    phone = np.eye(10, dtype=np.float32)[phones].reshape(*phones.shape[:-1], PHONE)
    return np.concatenate([name, phone], axis=-1)


def calls(names: np.ndarray) -> np.ndarray:
    """What the caller knows, (..., 320): [name; nothing]."""
    asked = entries(names, np.zeros((*names.shape[:-1], DIGITS), np.int64))
    asked[..., NAME:] = 0
    return asked
