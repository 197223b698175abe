"""The two default random streams: one for initialisation, one for dropout. `manual_seed` resets both."""

from __future__ import annotations

import numpy as np

from tinygrad_qkv.locks import fork_safe_lock

_lock = fork_safe_lock()
_streams: dict[str, np.random.Generator] = {}


def manual_seed(seed: int) -> None:
    """Restart both default streams from `seed`: the same seed gives the same bits, with any number of threads."""
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"a seed is a non-negative integer, got {seed!r}")
    initial, dropout = np.random.SeedSequence(int(seed)).spawn(2)
    with _lock:
        _streams["init"] = np.random.Generator(np.random.PCG64(initial))
        _streams["dropout"] = np.random.Generator(np.random.PCG64(dropout))


def init_generator(generator: np.random.Generator | None = None) -> np.random.Generator:
    """The generator that was given, else the default stream for initialisation."""
    return _streams["init"] if generator is None else _checked(generator)


def dropout_seed(generator: np.random.Generator | None = None) -> int:
    """A fresh 64-bit seed for one dropout mask, from the generator that was given or the default stream."""
    with _lock:
        stream = _streams["dropout"] if generator is None else _checked(generator)
        return int(stream.integers(0, 2**64, dtype=np.uint64))


def _checked(generator: np.random.Generator) -> np.random.Generator:
    if not isinstance(generator, np.random.Generator):
        raise TypeError(
            f"expected a numpy.random.Generator, got {type(generator).__name__}; np.random.default_rng(seed)"
        )
    return generator


manual_seed(0)
