"""The benchmark program: its rows, how it compares and serves sides, and its table. Nothing here is timed."""

import re
from pathlib import Path

import pairs
import pytest
import report
from cases import PEERS, Case
from catalog import CASES
from serve import Process, timed

FOLDER = Path(__file__).parent / "benchmarks"
WHOLE_PROCESSES = {"P7", "P12", "P13", "P15"}


def test_every_row_is_measured():
    assert {case.row for case in CASES} | WHOLE_PROCESSES == {f"P{n}" for n in range(1, 17)}
    names = [(case.row, case.name) for case in CASES]
    assert len(set(names)) == len(names)


def test_every_case_has_our_side_and_known_peers_and_every_row_a_quick_case():
    for case in CASES:
        assert "ours" in case.sides and set(case.sides) <= {"ours", *PEERS}
        assert set(case.target) <= {"best", *case.sides}
    assert {case.row for case in CASES} == {case.row for case in CASES if case.quick}


def result(ours, torch, numpy):
    case = Case("P1", "matmul (1024, 1024) @ (1024, 1024)", {}, {}, {"torch": 1.2, "best": 0.9}, flops=2e9)
    return pairs.Result(case, {"ours": ours, "torch": torch, "numpy": numpy}, [[0.01]])


def test_ratios_are_taken_pair_by_pair_and_slow_processes_are_counted():
    found = result([[0.01, 0.02], [0.02, 0.02]], [[0.02, 0.02], [0.06, 0.02]], [[0.01, 0.02], [0.02, 0.02]])
    assert found.ratios("torch") == pytest.approx([2, 1, 3, 1])
    assert found.quartiles("torch") == pytest.approx((1, 1.5, 2.25))
    assert found.slow_share("ours") == 0 and found.slow_share("torch") == 0.5
    assert found.control() == pytest.approx(2)


def test_a_target_is_met_only_if_every_peer_is_where_it_should_be():
    fast, equal, slow = [[0.005]], [[0.01]], [[0.02]]
    for torch, numpy, met in ((slow, equal, True), (equal, slow, False), (slow, fast, False)):
        line, share = report.paired(result(equal, torch, numpy), rates=[4e11])
        assert line.met is met
        assert line.ours == "10 ms, 200 GF/s" and share.ours == "0.50" and share.met is False
    absent = result(equal, slow, slow)
    del absent.times["torch"], absent.times["numpy"]
    assert report.paired(absent, rates=[])[0].met is None


def test_a_side_that_computes_something_else_is_found():
    right = [{"shape": [2], "largest": 4.0, "elements": [1.0, -4.0]}]
    assert pairs.difference(right, right, 1e-4) is None
    assert pairs.difference(right, [{**right[0], "elements": [1.0, -4.0003]}], 1e-4) is None
    assert "differs" in pairs.difference(right, [{**right[0], "elements": [1.001, -4.0]}], 1e-4)
    assert "differs" in pairs.difference(right, [{**right[0], "elements": [float("nan"), -4.0]}], 1e-4)
    assert "shape" in pairs.difference(right, [{**right[0], "shape": [1, 2]}], 1e-4)


def test_the_table_in_columns_and_in_markdown():
    lines = [report.Line("P1", "work", "1 ms", {"torch": "2.00 (1.9-2.1)"}, "torch 1.2", True)]
    text = report.text(lines, ["torch", "jax"])
    assert text.splitlines()[1].split("  ") == ["P1", "work", "1 ms", "2.00 (1.9-2.1)", "torch 1.2", "yes"]
    markdown = report.text(lines, ["torch", "jax"], markdown=True)
    assert [line.count("|") for line in markdown.splitlines()] == [7, 7, 7] and "jax" not in markdown


def test_a_side_serves_in_a_process_of_its_own():
    small = next(n for n, case in enumerate(CASES) if case.row == "P11")
    process = Process("ours", pause=0)
    try:
        y, gradient = process.ask("check", small)
        assert y["shape"] == gradient["shape"] == [3] and len(y["elements"]) == 3
        assert 0 < process.ask("time", small, seconds=0.01) < 10
        with pytest.raises(RuntimeError, match="IndexError"):
            process.ask("check", 10_000)
        process._process.kill()
        process._process.wait()
        assert process.ask("check", small) == [y, gradient]  # a new process
    finally:
        process.close()


def test_a_time_is_that_of_one_call():
    calls = []
    assert timed(lambda: calls.append(None), seconds=0.001) < 1e-3
    assert len(calls) > 100


def test_the_readme_names_options_that_exist():
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    program = (FOLDER / "__main__.py").read_text(encoding="utf-8")
    speed = readme.partition("## Speed")[2].partition("\n## ")[0]
    options = set(re.findall(r"(--[a-z][a-z-]+)", speed)) - {"--warm"}
    assert options and all(f'"{option}"' in program for option in options)
