"""Our speed beside that of other libraries: `python tests/benchmarks`, or with `--quick` in under two minutes.

Each side runs in processes of its own, since the idle threads of one slow the other down. The processes take turns:
one is asked for a measurement, then the next, so that a busy moment of the machine falls on all; a pause before each
lets the other side's threads, which spin for a while after their work, go to sleep. A ratio is the peer's time / ours:
above 1 we are faster. The figure is the median of the pairs, with quartiles. Before anything is timed the sides'
results are compared.
"""

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import machine
import pairs
import report
import whole_processes
from cases import PEERS
from catalog import CASES
from pairs import Plan
from serve import serve

ROWS = [f"P{n}" for n in range(1, 17)]
BUSY = 0.5  # load average before the run
QUICK = Plan(processes=1, pairs=3, seconds=0.04, pause=0.05, alone=3)


def measure(rows: list[str], peers: list[str], quick: bool) -> tuple[list[report.Line], list[str], dict]:
    """The table's lines, the notes below it, and the data of both."""
    plan = QUICK if quick else Plan()
    numbers = [n for n, case in enumerate(CASES) if case.row in rows and (case.quick or not quick)]
    results, rates = pairs.run(numbers, peers, plan) if numbers else ([], [])
    lines = [line for result in results for line in report.paired(result, rates)]
    lines += report.products_mean(results)
    data: dict = {"peak rates": rates}
    if "P12" in rows:
        results.append(whole_processes.first_gradient(peers, plan))
        lines += report.paired(results[-1], [])
    lengths = [4096, 8192] if quick else [4096, 8192, 16384]
    for row, ask, lines_of in (
        ("P7", lambda: whole_processes.memory(peers, lengths), report.memory),
        ("P13", whole_processes.compiling, report.compiling),
        ("P15", whole_processes.growth, report.growth),
    ):
        if row in rows:
            try:
                data[row] = ask()
                lines += lines_of(data[row])
            except RuntimeError as error:
                lines.append(report.Line(row, "failed", str(error)[:60], met=False))
    lines.sort(key=lambda line: int(line.row[1:]))
    return lines, report.notes(results, rates), data | {"cases": report.data(results)}


def chosen_peers(wanted: list[str]) -> list[str]:
    """Those of the wanted peers that are installed; the others are named."""
    installed = [peer for peer in wanted if importlib.util.find_spec(peer)]
    if absent := [peer for peer in wanted if peer not in installed]:
        print(f"not installed, so not compared: {', '.join(absent)}", file=sys.stderr)
    return installed


def main() -> None:
    """Measure what the options say, and print it."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and pairs: under two minutes, rough figures")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="P3", help="rows to measure")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="libraries to compare with")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--json", metavar="FILE", help="write machine, raw times and ratios there")
    parser.add_argument("--size-rules", action="store_true", help="measure from which size on threads pay, instead")
    parser.add_argument("--serve", metavar="SIDE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    if options.size_rules:
        import size_rules

        return size_rules.main()
    start = time.perf_counter()
    where = machine.describe()
    print(machine.in_words(where), end="\n\n")
    peers = chosen_peers(options.peers)
    lines, notes, data = measure(options.only, peers, options.quick)
    if where["load"] and where["load"][0] > BUSY:
        notes.insert(
            0,
            f"The machine was busy (load {where['load'][0]:.1f}): threads that spin while they wait, those of "
            "torch and NumPy, lose far more by that than ours, so these figures flatter us.",
        )
    print(report.text(lines, peers, options.markdown), *notes, sep="\n" if not options.markdown else "\n\n")
    print(f"\nmeasured in {time.perf_counter() - start:.0f} s")
    if options.json:
        data = {"machine": where, "table": report.lines_data(lines), "notes": notes, **data}
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
