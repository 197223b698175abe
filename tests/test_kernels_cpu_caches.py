"""Cache sizes: what Linux and macOS tell, and what holds where nothing is told."""

import ctypes

import pytest

from tinygrad_qkv.kernels import cpu_caches
from tinygrad_qkv.kernels.cpu_caches import USUAL, _from_sysctl, _from_sysfs, cache_sizes


def write(folder, *caches):
    for i, (level, kind, size) in enumerate(caches):
        (folder / f"index{i}").mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / f"index{i}" / name).write_text(f"{text}\n")


def test_linux_tells_the_size_of_each_level(tmp_path):
    write(tmp_path, (1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "1M"), (3, "Unified", "32768K"))
    assert _from_sysfs(tmp_path) == {1: 48 * 2**10, 2: 2**20, 3: 32 * 2**20}


@pytest.mark.parametrize("caches", [(), [(1, "Data", "much")], [("?", "Data", "32K")]])
def test_without_a_sensible_answer_the_usual_sizes_hold(tmp_path, caches, monkeypatch):
    write(tmp_path, *caches)
    assert _from_sysfs(tmp_path) == {}
    monkeypatch.setattr(cpu_caches, "FOLDER", tmp_path)
    monkeypatch.setattr(cpu_caches.sys, "platform", "linux")
    assert cache_sizes.__wrapped__() == USUAL


def test_macos_tells_through_sysctl(monkeypatch):
    answers = {b"hw.perflevel0.l1dcachesize": 128 * 2**10, b"hw.perflevel0.l2cachesize": 12 * 2**20}

    class Library:
        @staticmethod
        def sysctlbyname(name, value, *rest):
            value._obj.value = answers.get(name, 0)
            return 0 if name in answers else -1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    assert _from_sysctl() == {1: 128 * 2**10, 2: 3 * 2**20}
    answers.clear()
    assert _from_sysctl() == {}


def test_this_machine():
    l1, l2 = cache_sizes()
    assert 2**13 <= l1 < l2 <= 2**28
