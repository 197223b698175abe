"""Locks of the library under fork."""

import os
import subprocess
import sys

import pytest

HELD_DURING_FORK = """
import os, threading, time
from tinygrad_qkv import backward, memory, random
from tinygrad_qkv.kernels import compile

def hold(lock):
    with lock:
        held.set()
        time.sleep(0.2)

for lock in (backward._deposit, memory._changing, random._lock, compile._compiling):
    held = threading.Event()
    thread = threading.Thread(target=hold, args=(lock,))
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    print(os.waitpid(child, 0)[1])
    thread.join()
    assert lock.acquire(timeout=5)
    lock.release()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_forked_while_another_thread_holds_a_lock_can_take_it():
    process = subprocess.run([sys.executable, "-c", HELD_DURING_FORK], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout.split()) == (0, ["0"] * 4), process.stderr
