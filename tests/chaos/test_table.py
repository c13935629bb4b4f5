"""The tables of the document, from results."""

from __future__ import annotations

import json
from typing import Any

from tests.chaos.table import BEGIN, END, main, tables


def row(seed: int, **changes: Any) -> dict[str, Any]:
    start = {"status": 0, "faults": ["SIGKILL"], "told_s": 2.0 + seed, "ended_s": 9.0}
    good = {
        "seed": seed,
        "mode": "colo",
        "schedule": f"kill:engine_{seed} @train 3",
        "outcome": "continued, bitwise",
        "deviations": [],
        "starts": [start],
        "commit": "abc",
        "date": "2026-11-16",
    }
    return {**good, **changes}


def test_faults_of_one_kind_share_a_line_and_missed_ones_do_not_count():
    missed = {"status": 0, "faults": [], "told_s": None, "ended_s": None}
    rows = [row(0), row(1), row(2, starts=[missed], outcome="not hit, bitwise")]
    text = tables(rows)
    assert "| kill engine | 2 | 0 | 2.5 (max 3.0) | 9.0 (max 9.0) |" in text
    assert "| colo | 3 | 2 | 0 | 1 | 0 | 0 | 0 |" in text
    assert "3 seeds, 3 starts" in text and "0 deviated" in text


def test_faults_of_the_second_start_belong_to_it():
    first = {"status": -9, "faults": ["SIGKILL"], "told_s": 0.1, "ended_s": 0.2}
    second = {"status": 143, "faults": ["SIGTERM"], "told_s": 0.3, "ended_s": 4.0}
    schedule = "kill:driver+kill:gcs @time 0.10, term:driver @save 5"
    text = tables([row(0, schedule=schedule, starts=[first, second], outcome="DEVIATED")])
    assert "| kill driver + kill gcs | 1 | -9 | 0.1 (max 0.1) | 0.2 (max 0.2) |" in text
    assert "| term driver | 1 | 143 | 0.3 (max 0.3) | 4.0 (max 4.0) |" in text


def test_the_document_gets_the_last_result_of_each_seed(tmp_path):
    results, document = tmp_path / "results.jsonl", tmp_path / "doc.md"
    rows = [row(0, outcome="DEVIATED", deviations=["x"]), row(0)]
    results.write_text("".join(json.dumps(r) + "\n" for r in rows))
    document.write_text(f"before\n{BEGIN}\nstale text\n{END}\nafter\n")
    main([str(results), "--write", str(document)])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n")
    assert "stale text" not in text and "1 seeds, 1 starts" in text and "0 deviated" in text
