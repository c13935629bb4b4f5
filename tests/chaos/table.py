"""The tables of docs/reliability.md from results.jsonl.

python -m tests.chaos.table /tmp/slime-chaos/results.jsonl --write docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

BEGIN, END = "<!-- chaos results -->", "<!-- end of chaos results -->"
Rows = list[dict[str, Any]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="+", help="of tests.chaos.run; later ones count"
    )
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this file")
    options = parser.parse_args(argv)
    latest: dict[int, dict[str, Any]] = {}
    for path in options.results:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            latest[row["seed"]] = row
    text = tables([latest[seed] for seed in sorted(latest)])
    if options.write is None:
        print(text)
        return
    before, _, rest = options.write.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def tables(rows: Rows) -> str:
    commits = sorted({row["commit"] for row in rows})
    dates = sorted({row["date"] for row in rows})
    starts = sum(len(row["starts"]) for row in rows)
    head = (
        f"{len(rows)} seeds, {starts} starts, {dates[0]} to {dates[-1]}, commits "
        f"{', '.join(commits)}. {sum(bool(row['deviations']) for row in rows)} deviated."
    )
    return "\n\n".join([head, _by_mode(rows), _by_fault(rows)])


def print_row(row: dict[str, Any]) -> None:
    """One line per seed while they run."""
    statuses = " ".join(str(start["status"]) for start in row["starts"])
    first = row["starts"][0] if row["starts"] else {}
    print(
        f"{row['seed']:>5} {row['mode']:<10} {row['schedule']:<60} [{statuses}] {row['outcome']}; "
        f"told {first.get('told_s')} s, ended {first.get('ended_s')} s, in all {row['seconds']} s",
        flush=True,
    )
    for line in row["deviations"]:
        print(f"      - {line}", flush=True)


def _by_mode(rows: Rows) -> str:
    outcomes = ["continued", "resumed", "not hit", "refused", "DEVIATED", "never finished"]
    lines = [["mode", "seeds", *outcomes]]
    for mode in sorted({row["mode"] for row in rows}):
        found = [row["outcome"].split(",")[0] for row in rows if row["mode"] == mode]
        lines.append([mode, str(len(found)), *(str(found.count(name)) for name in outcomes)])
    return _markdown(lines)


def _by_fault(rows: Rows) -> str:
    """Of starts with one fault; times from the fault, median and largest."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        for number, text in enumerate(row["schedule"].split(", ")):
            fault, _, _ = text.partition(" @")
            if number < len(row["starts"]) and row["starts"][number]["faults"]:
                groups[_without_index(fault)].append(row["starts"][number])
    lines = [["fault", "starts", "exit statuses", "message after s", "ended after s"]]
    for fault in sorted(groups):
        found = groups[fault]
        statuses = sorted({start["status"] for start in found})
        told = [start["told_s"] for start in found if start["told_s"] is not None]
        ended = [start["ended_s"] for start in found if start["ended_s"] is not None]
        lines.append(
            [fault, str(len(found)), " ".join(map(str, statuses)), _spread(told), _spread(ended)]
        )
    return _markdown(lines)


def _without_index(fault: str) -> str:
    parts = [part.rstrip("0123456789").rstrip("_") for part in fault.split("+")]
    return " + ".join(part.replace(":", " ") for part in parts)


def _spread(values: list[float]) -> str:
    return f"{median(values):.1f} (max {max(values):.1f})" if values else "-"


def _markdown(lines: list[list[str]]) -> str:
    head, *rest = lines
    bar = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, bar, *rest])


if __name__ == "__main__":
    main()
