"""Text of data, models, hooks and other people's run folders stays text."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from slime import cli
from slime.config.arguments import parse_args, print_resolved
from slime.config.flags.registry import redact
from slime.runlog.logging import setup_logging
from slime.runlog.recorder import LiveDisplay
from slime.runlog.report import write_report
from slime.runlog.run_folder import open_run_folder
from slime.runlog.summary import closing_lines
from slime.serving.servers import ServerProcess
from slime.utils.printable import printable, safe_text
from tests.args import make_args, make_argv
from tests.synthetic_run import write_run

TITLE, CLIPBOARD = "\x1b]0;PWNED\x07", "\x1b]52;c;UFdORUQ=\x07"
CLEAR, C1_CLEAR = "\x1b[2J", "\x9b2J"
ATTACK = f"a{TITLE}{CLIPBOARD}{CLEAR}{C1_CLEAR}\x90q\x85\rb"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# What rich writes itself: colours, and moves of the cursor over its own panel.
DRAWING = re.compile(r"\x1b\[[0-9;?]*[mKAhlGF]|\r")


def is_harmless(text: str) -> bool:
    return CONTROL.search(DRAWING.sub("", text)) is None


def test_only_tabs_newlines_and_what_can_be_seen_are_left():
    every = "".join(map(chr, range(0x100))) + "\udc9b é 漢"
    kept = [c for c in map(chr, range(0x100)) if c in "\t\n" or not CONTROL.match(c)]
    text = printable(every)
    assert all(character in text for character in kept)
    assert CONTROL.search(text) is None
    text.encode()
    assert printable("\x1b[31mred\x1b[0m\r\n") == "red\n"


@pytest.mark.parametrize("unit", ["://", "http://a?b&", "a.", "\x1b[", "\x1b[1;", "@", "?&="])
def test_a_long_degenerate_text_takes_no_time(unit: str):
    """Two million characters: anything quadratic would take hours."""
    text = unit * (2_000_000 // len(unit))
    begun = time.process_time()
    safe_text(text)
    assert time.process_time() - begun < 10


def test_keys_of_a_data_file_and_names_of_files_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = tmp_path / f"rows{TITLE}.jsonl"
    rows.write_text(json.dumps({f"key{ATTACK}": "x"}) + "\n")
    model = Path(make_args().hf_checkpoint)
    words = make_argv(run_dir=str(tmp_path / "run"), prompt_data=[str(rows)])
    (model / "tokenizer.json").touch()
    assert cli.main(["train", *words]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b]52" in shown and is_harmless(shown)
    absent = os.fsdecode(b"gone\xff\x9b2J")
    assert cli.main(["train", *words, "--hf-checkpoint", absent]) == 2
    assert is_harmless(capsys.readouterr().err)


@pytest.mark.parametrize("terminal", [False, True])
def test_displays_show_messages_names_and_labels_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
):
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, height=60)
    args = make_args(run_dir=str(tmp_path / f"run{TITLE}"))
    display = LiveDisplay(args, console)
    display.message(f"the reward raised: {ATTACK} [link=http://evil]click[/link]")
    name = f"set{ATTACK}[link=http://evil]x[/]"
    display.update(
        {"rollout_id": 0, "train/loss": 1.0, f"eval/{name}/reward": 0.5, f"perf/{ATTACK}_time": 1.0}
    )
    if terminal:
        console.print(display._drawing._render())  # type: ignore[union-attr]
    display.close()
    text = out.getvalue()
    assert is_harmless(text), repr(text)
    assert "[link=http://evil]click[/link]" in text
    assert "8;;" not in text  # a hyperlink
    assert "\\x1b]52;c;" in text


def test_logs_and_last_lines_of_a_server_are_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root = logging.getLogger()
    level, before = root.level, list(root.handlers)
    try:
        setup_logging(tmp_path)
        logging.getLogger("slime.x").warning("hook said %s http://u:p@h/?k=S3CRET", ATTACK)
    finally:
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "driver.log").read_text()):
        assert is_harmless(text) and "\\x1b]0;" in text
        assert "S3CRET" not in text and "u:p" not in text
    script = f"printf '%s\\n' '{ATTACK}'"
    server = ServerProcess(["bash", "-c", script], tmp_path / "engine.log")
    while server.status() is None:
        time.sleep(0.01)
    assert is_harmless(server.last_lines()) and "\\x1b]52" in server.last_lines()
    server.stop()


def test_closing_lines_are_text(tmp_path: Path):
    run_dir = write_run(tmp_path / f"run{TITLE}", rollouts=2, planned=2)
    assert is_harmless("\n".join(closing_lines(run_dir)))


class Scripts(HTMLParser):
    """The tags of a page, and what stands inside <script>."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append(data)


def test_a_run_folder_of_somebody_else_puts_no_markup_into_the_report(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", rollouts=3, planned=3)
    evil = "</text><script>document.title='XSS'</script><img src=x onerror=alert(1)>"
    perf = {"kind": "perf", "time": 1.0, "perf/generate_time": 1.0, f"perf/{evil}_time": 1.0}
    lines = [
        {"rollout_id": evil, **perf},
        {"rollout_id": 7, **perf},
        {"rollout_id": 7, "kind": "eval", "time": 1.0, f"eval/{evil}/reward": 0.5},
        {"rollout_id": 8, "kind": [evil], "time": evil},
    ]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    sample = json.loads((run_dir / "samples.jsonl").read_text().splitlines()[0])
    with (run_dir / "samples.jsonl").open("a") as file:
        for change in ({"rollout_id": evil}, {"reward": evil}, {"status": evil}, {"prompt": None}):
            file.write(json.dumps({**sample, **change}) + "\n")
    with (run_dir / "resumes.jsonl").open("a") as file:
        file.write(json.dumps({"start_rollout_id": evil}) + "\n")
    html = write_report(run_dir).read_text()
    page = Scripts(html)
    assert len(page.scripts) == 1 and "img" not in [tag for tag, _ in page.tags]
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    [policy] = [a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert policy is not None and f"script-src 'sha256-{digest}'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


SECRET = "S3CRET"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("rm_url", f"http://host/score?api_key={SECRET}"),
        ("rm_url", f"http://host/score?{SECRET}"),
        ("rm_url", f"http://me:{SECRET}@host:80/score"),
        ("rm_url", f"http://me:a@{SECRET}@host/score"),
        ("rm_url", f"host:80/score?x=1&api_key={SECRET}#top"),
        ("wandb_key", SECRET),
        ("wandb_host", f"https://me:{SECRET}@wandb.example"),
        ("train_env_vars", {"MY_TOKEN": SECRET, "URL": f"http://h/?t={SECRET}"}),
    ],
)
def test_secrets_are_nowhere_in_what_is_written_or_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: object
):
    argv = make_argv(run_dir=str(tmp_path / "run"), **{flag: value})
    args = parse_args(argv)
    run_dir = open_run_folder(args)
    write_report(run_dir)
    print_resolved(args)
    printed = capsys.readouterr()
    files = {file.name: file.read_text() for file in run_dir.rglob("*") if file.is_file()}
    assert {"config.yaml", "config_resolved.yaml", "report.html"} <= files.keys()
    for text in (*files.values(), printed.out, printed.err, repr(args)):
        assert SECRET not in text
    option = "--" + flag.replace("_", "-")
    assert f"give {option} again" in files["config.yaml"]
    assert flag not in yaml.safe_load(files["config.yaml"])
    assert any(SECRET in word for word in argv)


@pytest.mark.parametrize("flag", ["router_api_key", "router_redis_url", "sglang_admin_api_key"])
def test_secrets_of_engine_and_router_are_hidden(flag: str):
    assert SECRET not in str(redact(flag, SECRET))
