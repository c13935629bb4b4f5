"""report.html over whole, partial, resumed, hostile and empty run folders."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slime import cli
from slime.core.errors import UserError
from slime.runlog.format import score
from slime.runlog.report import write_report
from slime.runlog.report.charts import smooth, thin
from slime.runlog.run_folder import read_run
from slime.runlog.sample_log import append_samples
from slime.runlog.tracking import cut_back
from tests.synthetic_run import make_row, write_run

_VOID = {"meta", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what the tests look at."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def with_attribute(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in attributes]


def report_of(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rollouts=30, planned=30)


def metrics_of(run_dir: Path, name: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["rollout_id"], line[name]) for line in lines if name in line]


def test_header_says_what_was_learned(run_dir: Path):
    text = " ".join(report_of(run_dir).texts)
    for dataset in ("addition", "addition_3digits"):
        rewards = metrics_of(run_dir, f"eval/{dataset}/reward")
        assert f"eval reward · {dataset}" in text
        assert score(rewards[0][1]) in text and score(rewards[-1][1]) in text
    assert "complete, 30 rollouts" in text
    assert "30 rollouts of GRPO, 16 prompts x 8 samples each" in text


def test_curves_hold_the_logged_values(run_dir: Path):
    charts = {a["aria-label"]: a for a in report_of(run_dir).with_attribute("data-lines")}
    assert {"Reward", "Response length", "Loss", "Entropy", "Gradient norm"} <= set(charts)
    lines = {
        line["name"]: line["points"] for line in json.loads(charts["Reward"]["data-lines"] or "")
    }
    assert set(lines) == {"train", "eval addition", "eval addition_3digits"}
    logged = metrics_of(run_dir, "rollout/reward_mean")
    assert [(p[0], p[1]) for p in lines["train"]] == logged


def test_lines_of_two_components_and_groups_say_what_they_count(run_dir: Path):
    config = run_dir / "config_resolved.yaml"
    for key, value in (("reward_key", "score"), ("eval_reward_key", "exact")):
        with config.open("a") as file:
            file.write(f"{key}: {{value: {value}, origin: command line}}\n")
    page = report_of(run_dir)
    charts = {a["aria-label"]: a for a in page.with_attribute("data-lines")}
    lines = {line["name"] for line in json.loads(charts["Reward"]["data-lines"] or "")}
    assert {"train (score)", "eval addition (exact)"} <= lines
    assert "rewards all equal, of 16 groups" in " ".join(page.texts)


def test_what_stands_out_is_reported_in_words(run_dir: Path):
    text = " ".join(report_of(run_dir).texts)
    assert "The gradient is zero" not in text
    lines = [
        {"rollout_id": n, "kind": "train", "time": 1.0, "train/grad_norm": 0.0}
        for n in range(30, 45)
    ]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    text = " ".join(report_of(run_dir).texts)
    assert "What stands out" in text and "The gradient is zero." in text


def test_time_per_phase_adds_up(run_dir: Path):
    (chart,) = report_of(run_dir).with_attribute("data-bars")
    bars = {bar["name"]: bar["seconds"] for bar in json.loads(chart["data-bars"] or "")}
    assert set(bars) == {"generate", "train", "update weights", "eval", "save"}
    assert {len(seconds) for seconds in bars.values()} == {30}
    labels = json.loads(chart["data-options"] or "")["labels"]
    assert labels == [str(rollout_id) for rollout_id in range(30)]
    run = read_run(run_dir)
    seconds = sum(value for _, value in metrics_of(run_dir, "perf/train_time"))
    assert sum(times["train"] for _, times in run.phases) == pytest.approx(seconds)
    assert sum(bars["train"]) == pytest.approx(seconds)


def test_one_file_that_asks_for_nothing_else(run_dir: Path):
    html = write_report(run_dir).read_text()
    page = Page(html)
    assert not [t for t, _ in page.tags if t in ("link", "img", "iframe", "object", "embed")]
    assert not page.with_attribute("src") and not page.with_attribute("href")
    outside = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert outside <= {"https://github.com/leeoniya/uPlot"}  # in the comment with its name
    assert "url(" not in html and "@import" not in html


def test_hostile_text_stays_text(tmp_path: Path):
    run_dir = write_run(tmp_path / "<b>run", rollouts=1)
    attack = "</td></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
    row = make_row(prompt=attack, response=attack, label=attack, kind=attack, group_index=None)
    append_samples(run_dir, 1, [replace(row, index=None, status='"><script>alert(3)</script>')])
    page = report_of(run_dir)
    assert sum(tag == "script" for tag, _ in page.tags) == 1  # the page's own
    assert not any(tag == "img" for tag, _ in page.tags)
    assert sum(text == attack for text in page.texts) >= 3


def test_partial_run_says_how_far_it_got(tmp_path: Path):
    text = " ".join(report_of(write_run(tmp_path / "run", rollouts=7, planned=60)).texts)
    assert "7 of 60 rollouts" in text


def resumes_of(page: Page) -> list[list[int]]:
    """Of each chart with lines, the rollouts at which it marks a resume."""
    charts = page.with_attribute("data-lines")
    return [json.loads(chart["data-options"] or "")["resumed_at"] for chart in charts]


def test_resumed_run_marks_the_place(run_dir: Path):
    cut_back(run_dir, 20)
    page = report_of(run_dir)
    assert "resumed at rollout 20" in " ".join(page.texts)
    assert not any(resumes_of(page))  # 20 is not on the axis yet
    line = {"rollout_id": 25, "kind": "train", "time": 1.0, "train/loss": 0.5}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert [20] in resumes_of(report_of(run_dir))


def test_empty_folder_gives_sentences(tmp_path: Path):
    text = " ".join(report_of(tmp_path).texts)
    assert "no metrics yet" in text and "No samples are recorded yet" in text
    assert "The folder holds no configuration" in text


def test_a_folder_that_is_not_there_is_a_message(tmp_path: Path):
    with pytest.raises(UserError, match="is not a folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [0.0, 1e-9, -3.0, 1e12])
def test_a_single_constant_value_can_be_drawn(tmp_path: Path, value: float):
    names = ("train/log_prob_gap_max", "train/loss", "rollout/reward_mean")
    lines = [
        {"rollout_id": i, "kind": "train", "time": 1.0, **dict.fromkeys(names, value)}
        for i in (0, 1)
    ]
    for count in (1, 2):
        text = "".join(json.dumps(line) + "\n" for line in lines[:count])
        (tmp_path / "metrics.jsonl").write_text(text)
        charts = report_of(tmp_path).with_attribute("data-lines")
        for chart in charts:
            (line,) = json.loads(chart["data-lines"] or "")
            assert line["points"] == [[i, value] for i in range(count)]
            logarithmic = json.loads(chart["data-options"] or "")["log"]
            assert value > 0 or not logarithmic  # which has no place for zero
        assert len(charts) == len(names)


def test_values_that_are_not_numbers_leave_a_gap(tmp_path: Path):
    lines = [
        {"rollout_id": i, "kind": "train", "time": 1.0, "train/loss": None if i == 1 else i}
        for i in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).series["train/loss"] == [(0, 0), (2, 2)]
    write_report(tmp_path)


def test_a_long_run_stays_a_page_of_bounded_size(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", rollouts=700, planned=700, groups=2)
    path = write_report(run_dir)
    assert path.stat().st_size < 3_000_000
    page = Page(path.read_text())
    points = [
        line["points"]
        for chart in page.with_attribute("data-lines")
        for line in json.loads(chart["data-lines"] or "")
    ]
    assert max(map(len, points)) <= 600
    shown = {a["data-rollout"] for a in page.with_attribute("data-rollout")}
    assert {"0", "699"} <= shown and 20 < len(shown) < 700


def test_the_page_allows_its_own_script_only(run_dir: Path):
    html = write_report(run_dir).read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy


def test_smooth_is_a_weighted_mean_of_what_came_before():
    values = [1.0, 4.0, 2.0, 8.0]
    keep = 1 - 1 / 3
    naive = []
    for last in range(len(values)):
        weights = [keep ** (last - i) for i in range(last + 1)]
        naive.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    assert smooth(values, 3) == pytest.approx(naive)
    assert smooth(values, 1) == values


def test_thin_keeps_the_mean():
    points = [(i, float(i % 7)) for i in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thin(points[:50], 100) == points[:50]


def test_a_folder_that_is_no_run_gets_no_report(tmp_path: Path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "is not the folder of a run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_components_hook_metrics_and_errors_are_shown(run_dir: Path):
    """A metric that nobody foresaw has a chart of its own; the phases and known charts are not repeated."""
    own = {"rollout/reward/format": 0.25, "rollout/reward/exact": 0.5, "mine/tool_calls": 3.0}
    lines = [{"rollout_id": n, "kind": "rollout", "time": 1.0, **own} for n in range(2)]
    lines.append({"rollout_id": 1, "kind": "eval", "time": 1.0, "eval/addition/reward/reward": 1.0})
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    error = "reward: ValueError: no <b>"
    row = make_row(reward=0.5, status="failed", rewards={"exact": 0.5}, error=error)
    append_samples(run_dir, 99, [row])
    page = report_of(run_dir)
    charts = {
        a["aria-label"]: json.loads(a["data-lines"] or "")
        for a in page.with_attribute("data-lines")
    }
    train = charts["Reward components, train"]
    assert {line["name"]: line["points"] for line in train} == {
        "format": [[0, 0.25], [1, 0.25]],
        "exact": [[0, 0.5], [1, 0.5]],
    }
    assert charts["Reward components, eval addition"][0]["name"] == "reward"
    assert charts["mine/tool_calls"][0]["points"] == [[0, 3.0], [1, 3.0]]
    assert not {"rollout/reward/format", "perf/train_time", "train/loss"} & set(charts)
    assert "eval addition/reward" not in {line["name"] for line in charts["Reward"]}
    text = " ".join(page.texts)
    assert "exact 0.5" in text and "reward: ValueError: no <b>" in text
