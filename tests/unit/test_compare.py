"""`slime report A B`: the runs' curves on common charts, and how their configurations differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from slime import cli
from slime.runlog.report import write_comparison
from tests.synthetic_run import write_run
from tests.unit.test_report import Page, metrics_of

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three runs: one of 30 rollouts, one with another lr, one of 20 that logs a metric of its own."""
    found = [
        write_run(tmp_path / name, rollouts=rollouts, planned=30, seed=seed)
        for seed, (name, rollouts) in enumerate({"base": 30, "fast": 30, "short": 20}.items())
    ]
    for folder in found:
        _set(folder, run_dir=str(folder), save=f"{folder}/checkpoints")
    _set(found[1], lr=0.001)
    _set(found[2], lr=0.001, custom_rm_path=HOSTILE)
    record = {"rollout_id": 0, "kind": "rollout", "time": 1.0, "rollout/mine": 2.5}
    with (found[2] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return found


def _set(folder: Path, **values: object) -> None:
    path = folder / "config_resolved.yaml"
    config = yaml.safe_load(path.read_text())
    config |= {name: {"value": v, "origin": "command line"} for name, v in values.items()}
    path.write_text(yaml.safe_dump(config))


def page_of(folders: list[Path]) -> Page:
    return Page(write_comparison(folders).read_text())


def lines_of(page: Page, title: str) -> dict[str, list[tuple[int, float]]]:
    (chart,) = [a for a in page.with_attribute("data-lines") if a["aria-label"] == title]
    lines = json.loads(chart["data-lines"] or "")
    assert [line["color"] for line in lines] == sorted({line["color"] for line in lines})
    return {line["name"]: [(p[0], p[1]) for p in line["points"]] for line in lines}


def test_each_chart_holds_the_logged_values_of_every_run(folders):
    page = page_of(folders)
    for title, metric in (
        ("Train reward", "rollout/reward_mean"),
        ("Eval reward · addition", "eval/addition/reward"),
        ("Entropy", "train/entropy"),
        ("perf/step_time", "perf/step_time"),
    ):
        assert lines_of(page, title) == {f.name: metrics_of(f, metric) for f in folders}
    assert lines_of(page, "rollout/mine") == {"short": [(0, 2.5)]}
    drawn = {a["aria-label"] for a in page.with_attribute("data-lines")}
    logged = {
        n
        for line in (folders[2] / "metrics.jsonl").read_text().splitlines()
        for n in json.loads(line)
    }
    assert len(drawn) == len(logged - {"rollout_id", "kind", "time"})  # each metric once


def test_flags_that_differ_are_listed_with_the_value_of_each_run(folders):
    """Every run saves into its own folder, which is no difference."""
    page = page_of(folders)
    cells = [text for text in page.texts if text.strip()]
    start = cells.index("flag")
    rows = cells[start + 4 : cells.index("Train reward", start)]
    assert rows == ["--custom-rm-path", "-", "-", HOSTILE, "--lr", "0.0003", "0.001", "0.001"]


def test_runs_without_a_difference_say_so(folders, tmp_path):
    twin = write_run(tmp_path / "twin", rollouts=2, planned=30)
    _set(twin, run_dir=str(twin), save=f"{twin}/checkpoints")
    assert "No flag differs." in " ".join(page_of([folders[0], twin]).texts)


def test_the_command_writes_the_page_into_the_first_folder(folders, capsys):
    assert cli.main(["report", *map(str, folders)]) == 0
    path = folders[0] / "compare.html"
    assert capsys.readouterr().out.strip() == str(path)
    page = Page(path.read_text())
    texts = [text.strip() for text in page.texts]
    assert {"base", "fast", "short", "complete, 30 rollouts", "20 of 30 rollouts"} <= set(texts)
    assert not (folders[0] / "report.html").exists()


def test_folders_of_the_same_name_are_told_apart_by_their_path(tmp_path):
    both = [write_run(tmp_path / place / "run", rollouts=2, planned=2) for place in ("a", "b")]
    assert set(lines_of(page_of(both), "Train reward")) == {str(folder) for folder in both}


def test_what_cannot_be_compared_is_refused(folders, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    cases = {
        "is named twice": [folders[0], folders[1], folders[0]],
        "name at most 7": [write_run(tmp_path / str(n), rollouts=1, planned=1) for n in range(8)],
        "is not the folder of a run": [folders[0], tmp_path / "other"],
        "is not a folder": [folders[0], tmp_path / "missing"],
    }
    for said, named in cases.items():
        assert cli.main(["report", *map(str, named)]) != 0
        assert said in capsys.readouterr().err
    assert cli.main(["report", str(folders[0]), "--json"]) == 2
