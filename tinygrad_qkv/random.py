"""The two default random streams: one for initialisation, one for dropout. `manual_seed` resets both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from tinygrad_qkv.locks import fork_safe_lock
from tinygrad_qkv.modes import switched

# Generators, each under itself, the default streams under their names.
Generators = dict[np.random.Generator | str, np.random.Generator]

_lock = fork_safe_lock()
_streams: dict[str, np.random.Generator] = {}
_noting: ContextVar[tuple[Generators, ...]] = ContextVar("noting_draws", default=())
_repeating: ContextVar[Generators | None] = ContextVar("repeating_draws", default=None)


def manual_seed(seed: int) -> None:
    """Restart both default streams from `seed`: the same seed gives the same bits, with any number of threads."""
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"a seed is a non-negative integer, got {seed!r}")
    initial, dropout = np.random.SeedSequence(int(seed)).spawn(2)
    repeating = _repeating.get()
    streams = _streams if repeating is None else repeating
    with _lock:
        streams["init"] = np.random.Generator(np.random.PCG64(initial))
        streams["dropout"] = np.random.Generator(np.random.PCG64(dropout))


def init_generator(generator: np.random.Generator | None = None) -> np.random.Generator:
    """The generator that was given, else the default stream for initialisation."""
    with _lock:
        return _source(generator, "init")


def dropout_seed(generator: np.random.Generator | None = None) -> int:
    """A fresh 64-bit seed for one dropout mask, from the generator that was given or the default stream."""
    with _lock:
        return int(_source(generator, "dropout").integers(0, 2**64, dtype=np.uint64))


@contextmanager
def noted_draws() -> Iterator[Generators]:
    """Gives the generators that are drawn from inside, as copies in the state before their first draw."""
    before: Generators = {}
    with switched(_noting, (*_noting.get(), before)):
        yield before


@contextmanager
def repeated_draws(before: Generators) -> Iterator[None]:
    """Draws inside come from copies of `before`, so that they are the noted ones again; nobody else's draws change."""
    with switched(_repeating, {key: copy.deepcopy(generator) for key, generator in before.items()}):
        yield


@contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Draws inside change nothing for those after: the default streams, generators given to ops, and NumPy's own."""
    streams, legacy = _repeating.get() or _streams, np.random.get_state()
    with _lock:
        former = {name: copy.deepcopy(streams[name]) for name in ("init", "dropout") if name in streams}
    with noted_draws() as before:
        try:
            yield
        finally:
            with _lock:
                streams.update(former)
            for key, generator in before.items():
                if not isinstance(key, str):
                    key.bit_generator.state = generator.bit_generator.state
            np.random.set_state(legacy)


def _source(generator: np.random.Generator | None, stream: str) -> np.random.Generator:
    """The generator to draw from: the one that was given, else a default stream; its copy where draws are repeated."""
    if generator is not None and not isinstance(generator, np.random.Generator):
        raise TypeError(
            f"expected a numpy.random.Generator, got {type(generator).__name__}; np.random.default_rng(seed)"
        )
    key = stream if generator is None else generator
    source = (_repeating.get() or {}).get(key) or (_streams[stream] if generator is None else generator)
    for before in _noting.get():
        if key not in before:
            before[key] = copy.deepcopy(source)
    return source


manual_seed(0)
