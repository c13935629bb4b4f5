"""The display while a run goes on: plain lines, the panel, and that it never gets in the way."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from slime.runlog.format import count, duration, number, sparkline
from slime.runlog.logging import setup_logging
from slime.runlog.recorder import LiveDisplay, RunConsole
from tests.args import make_args

ROLLOUT = {
    "rollout/reward_mean": 0.4312,
    "rollout/response_len_mean": 5.12,
    "train/log_prob_gap_max": 3.1e-07,
    "train/loss": -0.0021,
    "perf/rollout_tokens_per_second": 5120.4,
    "perf/generate_time": 1.21,
    "perf/train_time": 0.83,
    "perf/train/steps_time": 0.7,
    "perf/update_weights_time": 0.1,
    "perf/step_time": 2.2,
}


@pytest.fixture(autouse=True)
def terminal_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def plain(num_rollout: int = 60) -> tuple[LiveDisplay, io.StringIO]:
    out = io.StringIO()
    return LiveDisplay(make_args(num_rollout=num_rollout), Console(file=out)), out


def terminal() -> tuple[LiveDisplay, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    return LiveDisplay(make_args(num_rollout=60), console), out


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_plain_line_holds_the_numbers_of_the_rollout():
    display, out = plain()
    display.update({"rollout_id": 11, **ROLLOUT, "eval/a/reward": 0.3, "eval/b/reward": 0.5})
    line = out.getvalue().splitlines()[-1]
    assert re.sub(" +", " ", line).startswith(
        "rollout 12/60 reward 0.431 eval 0.400 len 5.12 tok/s 5,120 gap 3.1e-07"
    )
    assert "gen 1.2s train 0.8s sync 0.1s" in line
    assert line.endswith(f"left {duration(2.2 * 48)}")


def test_failed_samples_are_in_the_plain_line():
    display, out = plain()
    display.update({"rollout_id": 0, **ROLLOUT, "rollout/failed": 0.0})
    assert "failed" not in out.getvalue()
    display.update({"rollout_id": 1, **ROLLOUT, "rollout/failed": 8.0})
    assert "  failed 8  gen" in out.getvalue().splitlines()[-1]


def test_plain_lines_are_aligned_whether_or_not_there_was_an_evaluation():
    display, out = plain()
    display.update(
        {
            "rollout_id": -1,
            "rollout/weight_version": 1.0,
            "eval/a/reward": 0.1,
            "perf/start_time": 20.0,
        }
    )
    display.update({"rollout_id": 0, **ROLLOUT})
    display.update({"rollout_id": 9, **ROLLOUT, "eval/a/reward": 0.5})
    start, *rows = out.getvalue().splitlines()[1:]
    assert start == "start 20s  a 0.100"
    assert rows[0].index("len") == rows[1].index("len")
    assert rows[0].index("gen") == rows[1].index("gen")


def test_values_that_are_not_finite_do_not_disturb():
    display, out = plain()
    display.update({"rollout_id": 0, **ROLLOUT, "train/loss": float("nan")})
    assert "rollout  1/60" in out.getvalue() and "nan" not in out.getvalue()


@pytest.mark.parametrize("variable", ["NO_COLOR", "CI"])
def test_a_terminal_that_asks_for_plain_lines_gets_them(
    monkeypatch: pytest.MonkeyPatch, variable: str
):
    monkeypatch.setenv(variable, "1")
    display, out = terminal()
    display.update({"rollout_id": 0, **ROLLOUT})
    display.close()
    assert "\x1b" not in out.getvalue() and "rollout  1/60" in out.getvalue()


def test_panel_shows_progress_metrics_phases_and_messages():
    display, out = terminal()
    with display.phase("generate"):
        pass
    display.update({"rollout_id": -1, "eval/addition/reward": 0.1, "perf/start_time": 20.0})
    for rollout_id in range(3):
        display.update({"rollout_id": rollout_id, **ROLLOUT, "eval/addition/reward": 0.9})
    display.message("checkpoint saved [not markup]")
    print("a stray line")
    display.close()
    text = visible(out.getvalue())
    for part in ("rollout 3/60", "train reward", "eval addition", "0.100 → 0.900", "log-prob gap"):
        assert part in text
    assert "update weights" in text and "checkpoint saved [not markup]" in text
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")  # cursor is back


def test_log_records_and_prints_come_out_above_the_panel(capsys: pytest.CaptureFixture[str]):
    setup_logging(None)
    display, out = terminal()
    logging.getLogger("slime.test").warning("engine 1 answers late")
    print("from print")
    display.close()
    logging.getLogger("slime.test").warning("after the panel")
    text = visible(out.getvalue())
    assert "warning: engine 1 answers late" in text and "from print" in text
    assert "after the panel" not in text
    assert "after the panel" in capsys.readouterr().err


class BrokenFile(io.StringIO):
    """A terminal that went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("gone")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_display_that_fails_does_not_touch_the_run(is_terminal: bool):
    before = sys.stdout
    console = RunConsole(file=BrokenFile(), force_terminal=is_terminal)
    display = LiveDisplay(make_args(), console)
    with display.phase("train"):
        done = True
    display.update({"rollout_id": 0, **ROLLOUT})
    display.update({"rollout_id": 1, "train/loss": "not a number"})  # type: ignore[dict-item]
    display.message("still there?")
    display.close()
    assert done and sys.stdout is before


def test_an_error_of_the_run_passes_through_a_phase():
    display, _ = plain()
    with pytest.raises(ZeroDivisionError), display.phase("train"):
        _ = 1 / 0


def test_numbers_as_people_read_them():
    assert [number(v) for v in (0.0, 0.4312, 12.34, 5120.4, 3.1e-7, float("nan"))] == [
        *("0", "0.431", "12.3", "5,120", "3.1e-07", "-"),
    ]
    assert [duration(s) for s in (0.04, 9.94, 41.2, 187, 7500, 273600)] == [
        *("0.0s", "9.9s", "41s", "3m 07s", "2h 05m", "3d 04h"),
    ]


def test_sparkline_rises_with_its_values():
    line = sparkline([0.0, 0.5, 1.0])
    assert line[0] < line[1] < line[2]
    assert len(sparkline([float(i) for i in range(1000)], width=20)) == 20
    assert sparkline([]) == ""


def test_counts_have_no_exponent():
    """999,999 rounded to three digits is 1e+03 thousand."""
    shown = {9_999: "9,999", 12_345: "12.3k", 999_499: "999k", 999_999: "1M", 999_999_999: "1B"}
    assert {value: count(value) for value in shown} == shown
