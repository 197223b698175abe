"""Locks that a forked child can take too."""

from __future__ import annotations

import os
import threading


def fork_safe_lock() -> threading.RLock:
    """A lock for module-level state: a fork waits until no other thread holds it.

    Without that, a child forked at the wrong moment would inherit a lock that nobody can release any more, and state
    that was changed by half.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
