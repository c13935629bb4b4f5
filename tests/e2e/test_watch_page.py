"""The page of `slime watch` in a real browser: runs under way, finished, killed and huge."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime.runlog.event_log import EventLog
from slime.runlog.sample_log import SampleRow, append_samples
from tests.browser import Watcher, browser, require_browser, served
from tests.e2e import runs
from tests.huge_run import write_huge_run
from tests.synthetic_run import write_run

HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script></td><b>bold</b>'


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    require_browser()
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two finished runs that differ by a flag; the first has events and texts that attack the page."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = write_run(folder / "first"), write_run(folder / "second", seed=1)
    config = (second / "config_resolved.yaml").read_text()
    (second / "config_resolved.yaml").write_text(config.replace("0.0003", "0.001"))
    components = {"rollout/reward/format": 0.25, "rollout/reward/exact": 0.5}
    with (first / "metrics.jsonl").open("a") as file:
        record = {"rollout_id": 59, "kind": "rollout", "time": time.time(), **components}
        file.write(json.dumps(record) + "\n")
    log = EventLog(first)
    log.event("engine", f"engine 0 failed and was started again {HOSTILE}")
    log.event("end", outcome="complete")
    append_samples(first, 59, [_hostile_row(n) for n in range(2)])
    return folder


def _hostile_row(n: int) -> SampleRow:
    return SampleRow(
        prompt=f"<|im_start|>user\n{HOSTILE}<|im_end|>\n<|im_start|>assistant\n",
        response=HOSTILE,
        reward=float(n),
        advantage=0.0,
        status="failed",
        group_index=10**6,
        index=10**6 + n,
        prompt_length=5,
        response_length=7,
        label=HOSTILE,
        kind=f"eval/{HOSTILE}",
        error=f"reward: {HOSTILE}",
        rewards={HOSTILE: 0.5},
        messages=[
            {"role": HOSTILE, "content": HOSTILE},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": HOSTILE, "arguments": HOSTILE}],
            },
        ],
    )


@pytest.fixture(scope="module")
def url(folder):
    with served(folder) as found:
        yield found.url


@pytest.fixture
def watcher(context, url):
    found = Watcher(context, url)
    yield found
    found.check()
    found.close()


# ---- a finished run


def test_the_overview_draws_the_run(watcher):
    watcher.open(run="first")
    watcher.page.wait_for_selector("[data-metric=reward] canvas")
    assert "finished" in watcher.text("#run-state")
    assert "60 / 60" in watcher.text(".tiles")
    assert watcher.page.locator(".card[data-metric] canvas").count() >= 6
    assert watcher.page.locator("#stands-out").inner_text()
    components = watcher.text('[data-metric="rollout/reward/"]')
    assert "Reward components, train" in components
    assert "format" in components and "exact" in components


def test_metrics_are_filtered_smoothed_and_zoomed(watcher):
    watcher.open("metrics", run="first")
    watcher.page.fill("#metric-search", "entropy")
    watcher.page.wait_for_selector("[data-metric='train/entropy'] canvas")
    assert watcher.page.locator("[data-metric]").count() == 1
    plot = watcher.page.locator("[data-metric='train/entropy'] .u-over")
    before = plot.locator("xpath=..").locator("canvas").evaluate("canvas => canvas.toDataURL()")
    watcher.page.evaluate("""() => { const slider = document.getElementById("smoothing"); slider.value = 0;
        slider.dispatchEvent(new Event("input")); }""")
    canvas = watcher.page.locator("[data-metric='train/entropy'] canvas")
    assert canvas.evaluate("canvas => canvas.toDataURL()") != before
    box = plot.bounding_box()
    watcher.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 50)
    watcher.page.mouse.down()
    watcher.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50, steps=5)
    watcher.page.mouse.up()
    watcher.page.click("#reset-zoom")
    watcher.page.wait_for_selector("#reset-zoom", state="detached")
    watcher.page.locator(".seg button", has_text="time").click()
    watcher.page.wait_for_selector("[data-metric='train/entropy'] canvas")


def test_pointing_at_a_curve_tells_the_value_of_the_file(watcher, folder):
    watcher.open("metrics", run="first")
    watcher.page.fill("#metric-search", "reward_mean")
    plot = watcher.page.locator("[data-metric='rollout/reward_mean'] .u-over")
    plot.wait_for()
    box = plot.bounding_box()
    watcher.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    watcher.page.wait_for_selector("#tip:not([hidden])")
    rollout, value = re.findall(r"[\d.]+", watcher.text("#tip"))[:2]
    lines = [json.loads(line) for line in (folder / "first/metrics.jsonl").read_text().splitlines()]
    (wanted,) = [
        r["rollout/reward_mean"]
        for r in lines
        if r["kind"] == "rollout" and r["rollout_id"] == int(rollout)
    ]
    assert float(value) == pytest.approx(wanted, abs=1e-4)


def test_two_runs_share_a_chart_and_their_configs_are_compared(watcher):
    watcher.open("metrics", run="first")
    watcher.page.fill("#metric-search", "train/loss")
    watcher.page.click("[aria-label='compare second']")
    watcher.page.wait_for_selector("[data-metric='train/loss'] .legend span")
    assert watcher.page.locator("[data-metric='train/loss'] .legend span").all_inner_texts() == [
        "first",
        "second",
    ]
    watcher.page.click("[data-tab=config]")
    watcher.page.wait_for_selector("#config tbody tr")
    assert watcher.page.locator("#config tbody tr").all_inner_texts() == ["--lr\t0.0003\t0.001"]
    watcher.page.check("#config-all")
    assert watcher.page.locator("#config tbody tr").count() > 10


def test_samples_are_filtered_and_opened(watcher, folder):
    lines = [json.loads(line) for line in (folder / "first/samples.jsonl").read_text().splitlines()]
    truncated = [r for r in lines if r["status"] == "truncated"]
    watcher.open("samples", run="first")
    watcher.page.select_option("#f-status", "truncated")
    watcher.page.wait_for_function(
        "text => document.getElementById('found').textContent.endsWith(text)",
        arg=f"of {len(truncated)}",
    )
    watcher.page.fill("#f-rollout_id-max", "10")
    watcher.page.press("#f-rollout_id-max", "Enter")
    early = [r for r in truncated if r["rollout_id"] <= 10]
    watcher.page.wait_for_function(
        "text => document.getElementById('found').textContent.endsWith(text)",
        arg=f"of {len(early)}",
    )
    watcher.page.click("#samples tbody tr:first-child .clip")
    watcher.page.wait_for_selector("#conversation")
    newest = max(early, key=lambda r: (r["rollout_id"], lines.index(r)))
    assert newest["response"] in watcher.text("#conversation")
    assert str(newest["index"]) in watcher.text("#facts")


def test_groups_without_signal_lead_to_their_samples(watcher):
    watcher.open("groups", run="first", dataset="train")
    watcher.page.select_option("#f-signal", "none")
    watcher.page.wait_for_function(
        "() => !document.getElementById('found').textContent.endsWith('of 960')"
    )
    for text in watcher.page.locator("#groups tbody .rewards").all_inner_texts():
        assert len(set(text.split())) == 1
    watcher.page.locator("#groups .rewards button").first.click()
    watcher.page.wait_for_selector("#facts")


def test_a_statement_shows_the_rows_behind_it(watcher):
    watcher.open("why", run="first")
    finding = watcher.page.locator(".finding", has_text="give no signal").first
    finding.wait_for()
    shown = finding.locator("#groups tbody tr").first
    shown.wait_for()
    finding.get_by_text("all groups").click()
    watcher.page.wait_for_selector("#f-signal")
    assert watcher.page.locator("#f-signal").input_value() == "none"


@pytest.mark.parametrize("tab", ["samples", "groups", "prompts"])
def test_hostile_text_in_a_list_stays_text(watcher, tab):
    watcher.open(tab, run="first", dataset=f"eval/{HOSTILE}")
    watcher.page.wait_for_selector(f"#{tab} tbody tr")
    assert HOSTILE in watcher.page.locator(f"#{tab}").inner_text()
    _nothing_ran(watcher)


def test_hostile_text_in_a_sample_stays_text(watcher):
    watcher.open("sample", run="first", dataset=f"eval/{HOSTILE}", rollout_id=59, index=10**6)
    watcher.page.wait_for_selector("#conversation")
    assert watcher.text("#conversation").count(HOSTILE) >= 4  # role, content, tool, error
    assert HOSTILE in watcher.text("#facts")
    _nothing_ran(watcher)


def test_hostile_text_in_an_event_stays_text(watcher):
    watcher.open(run="first")
    watcher.page.wait_for_selector(".event.engine")
    assert HOSTILE in watcher.text(".event.engine")
    _nothing_ran(watcher)


def _nothing_ran(watcher: Watcher) -> None:
    assert watcher.page.evaluate(
        "() => window.pwned === undefined && !document.querySelector('main img, main script')"
    )


# ---- a run under way, then killed


def test_a_run_under_way_and_then_killed(context, tiny_model, tiny_data, tmp_path):
    run_dir = tmp_path / "run"
    words = runs.command(tiny_model, tiny_data, run_dir, num_rollout=2000, watch=True)
    process = runs.start(words)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        watcher = Watcher(context, found[0])
        watcher.open()
        runs.wait_for(
            lambda: (run_dir / "metrics.jsonl").exists() and len(runs.metrics(run_dir, "perf")) > 2,
            process,
        )
        watcher.page.wait_for_selector("#run-state.running")
        watcher.page.wait_for_selector("[data-metric=reward] canvas")
        done = int(watcher.text(".tiles dd").split("/")[0])
        watcher.page.wait_for_function(
            "done => parseInt(document.querySelector('.tiles dd').textContent) > done", arg=done
        )
        _check_token_strip(watcher, run_dir)
        _check_timeline(watcher)
        watcher.check()
        os.killpg(process.pid, signal.SIGKILL)
        watcher.page.wait_for_selector("#offline:not([hidden])", timeout=30_000)
        watcher.close()
    finally:
        runs._end(process)
    with served(run_dir) as server:
        watcher = Watcher(context, server.url)
        watcher.open()
        watcher.page.wait_for_selector("#run-state.dead")
        watcher.page.wait_for_selector("[data-metric=reward] canvas")
        watcher.check()
        watcher.close()


def _check_token_strip(watcher: Watcher, run_dir: Path) -> None:
    """Every number of the table of tokens is the one that the run's files hold."""
    engine, trainer = (
        load_file(run_dir / "tokens" / f"rollout_0000001{end}.safetensors")
        for end in ("", ".trainer")
    )
    index = int(trainer["sample_index"][0])
    part, other = _part(engine, index), _part(trainer, index)
    first = int(other["position"][0])  # of the response
    watcher.open("sample", run="run", dataset="train", rollout_id=1, index=index)
    watcher.page.wait_for_selector("#strip .tok")
    assert watcher.page.locator("#strip .tok").count() == len(part["position"])
    watcher.page.hover(f"#strip .tok[data-n='{first}']")
    watcher.page.wait_for_selector("#tip:not([hidden])")
    assert "importance weight" in watcher.text("#tip")
    watcher.page.click("text=table")
    heads = watcher.page.locator("#tokens th").all_inner_texts()
    rows = [
        dict(zip(heads, text.split("\t"), strict=True))
        for text in watcher.page.locator("#tokens tbody tr").all_inner_texts()
    ]
    assert [int(row["id"]) for row in rows] == part["token_ids"].tolist()
    assert [row["in the loss"] == "yes" for row in rows] == (part["loss_mask"] == 1).tolist()
    assert [row["weight version"] for row in rows[first:]] == [
        str(v) for v in part["weight_versions"][first:]
    ]
    gap = other["trainer_log_probs"].astype(float) - part["rollout_log_probs"][first:].astype(float)
    for name, expected in (
        ("engine log-prob", part["rollout_log_probs"][first:]),
        ("trainer log-prob", other["trainer_log_probs"]),
        ("advantage", other["advantages"]),
        ("gap", gap),
        ("importance weight", np.exp(gap)),
    ):
        shown = [float(row[name]) for row in rows[first:]]
        np.testing.assert_allclose(shown, expected, rtol=1e-6, err_msg=name)
    assert {row["engine log-prob"] for row in rows[:first]} == {"-"}  # prompt tokens have none


def _part(columns: dict[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    place = columns["sample_index"].tolist().index(index)
    start, count = int(columns["num_tokens"][:place].sum()), int(columns["num_tokens"][place])
    return {
        n: c[start : start + count]
        for n, c in columns.items()
        if n not in ("sample_index", "num_tokens")
    }


def _check_timeline(watcher: Watcher) -> None:
    watcher.open("timeline", run="run")
    watcher.page.wait_for_selector(".lane[data-process=trainer_0] .bar")
    lanes = {lane.get_attribute("data-process") for lane in watcher.page.locator(".lane").all()}
    assert {"driver", "rollout", "trainer_0", "engine 0", "events"} <= lanes
    phases = {
        bar.get_attribute("data-phase")
        for bar in watcher.page.locator(".lane[data-process=driver] .bar").all()
    }
    assert {"generate", "train", "update_weights"} <= phases
    assert "http://" in watcher.text("#engines")
    watcher.page.wait_for_selector("[data-metric='Resident memory'] canvas")
    assert "engine_0" not in lanes  # its memory is a curve; its lane is that of weight versions
    assert "engine_0" in watcher.text("[data-metric='Resident memory']")


# ---- a huge one


def test_a_huge_run_stays_small_in_the_browser(context, tmp_path):
    write_huge_run(tmp_path / "huge")
    with served(tmp_path) as server:
        watcher = Watcher(context, server.url)
        watcher.open()
        watcher.page.wait_for_selector("[data-metric=reward] canvas")
        watcher.open("metrics", run="huge")
        watcher.page.wait_for_selector("[data-metric='rollout/reward_mean'] canvas")
        assert watcher.page.locator("[data-metric] canvas").count() < 30  # those on the screen
        watcher.open("samples", run="huge")
        watcher.page.wait_for_function(
            "() => document.getElementById('found')?.textContent.endsWith('of 80,000')"
        )
        watcher.page.uncheck("#f-kept")
        watcher.page.wait_for_function(
            "() => document.getElementById('found').textContent.endsWith('of 1,000,000')"
        )
        watcher.page.click("#page-next")
        watcher.page.wait_for_function(
            "() => document.getElementById('found').textContent.startsWith('51-100')"
        )
        watcher.open("timeline", run="huge")
        watcher.page.wait_for_selector(".lane[data-process=driver] .bar")
        watcher.page.click("text=whole run")
        watcher.page.wait_for_timeout(1000)
        assert watcher.page.evaluate("() => document.querySelectorAll('*').length") < 20_000
        assert watcher.largest < 2**20
        watcher.check()
        watcher.close()
