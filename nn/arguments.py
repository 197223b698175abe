"""The check of the sizes that layers are built with."""

from __future__ import annotations

import numpy as np


def sizes(kind: str, **named: int) -> tuple[int, ...]:
    """The sizes, if each is an integer that is not negative."""
    for name, n in named.items():
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 0:
            raise ValueError(f"{kind}'s {name} is a size, a non-negative integer; got {n!r}")
    return tuple(int(n) for n in named.values())
