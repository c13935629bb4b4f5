"""Run folders made by somebody else bring no code, no permissions and no endless files; one's own are repeated."""

from __future__ import annotations

import hmac
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime import api
from slime.cli import evaluate
from slime.config.flags.parser import read_command_line
from slime.core.errors import ConfigError, UserError
from slime.ray import python_functions
from slime.runlog import own_config
from slime.runlog.jsonl import append_lines
from slime.runlog.report import write_comparison, write_report
from slime.runlog.run_yaml import dump_run_yaml, read_resolved
from slime.utils import untrusted_files

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def make_run(folder: Path, given: dict, *, sign: bool = False) -> Path:
    (folder / "hf").mkdir(parents=True)
    (folder / "checkpoints" / "iter_0000001").mkdir(parents=True)
    (folder / "checkpoints" / "iter_0000001" / "meta.json").write_text("{}")
    values = {"save_hf": str(folder / "hf"), "save": str(folder / "checkpoints"), **given}
    text = f"# slime run\n{yaml.safe_dump(values)}# lr: 1e-6\n"
    (folder / "config.yaml").write_text(own_config.signed(text) if sign else text)
    resolved = {name: {"value": value, "origin": "config"} for name, value in values.items()}
    (folder / "config_resolved.yaml").write_text(dump_run_yaml(resolved))
    return folder


HOSTILE = [
    {"custom_rm_path": "runs.evil.payload.reward"},  # a file of the folder itself
    {"custom_generate_function_path": "runs.evil.payload.generate"},
    {"eval_function_path": "runs.evil.payload.evaluate"},
    {"rm_type": "code", "allow_unsandboxed_code": True},  # programs of the folder's own model
    {"sglang_trust_remote_code": True},  # code in the folder's model
    {"rm_type": "remote_rm", "rm_url": "http://evil.example"},
]


@pytest.mark.parametrize("given", HOSTILE, ids=lambda given: next(reversed(given)))
def test_slime_eval_takes_no_code_from_others(tmp_path, given):
    run = make_run(tmp_path / "evil", given)
    name = next(reversed(given))
    with pytest.raises(ConfigError, match=f"not a run of this user.*--{name.replace('_', '-')}"):
        evaluate._command(str(run), [])
    own = make_run(tmp_path / "own", given, sign=True)
    words, _ = evaluate._command(str(own), [])
    assert f"--{name.replace('_', '-')}" in words


def test_slime_eval_takes_numbers_from_others(tmp_path):
    run = make_run(tmp_path / "other", {"eval_temperature": 0.5, "rm_type": "math"})
    words, _ = evaluate._command(str(run), ["--custom-rm-path", "mine.reward"])
    assert words[words.index("--eval-temperature") + 1] == "0.5"


INJECTED = "--custom-rm-path=evil.reward"


@pytest.mark.parametrize(
    "given",
    [
        {"rollout_stop": ["x", INJECTED]},  # an option with several values
        {"group_rm": INJECTED},  # an option without a value
        {"rm_type": INJECTED},
        {"rollout_stop": ["--"]},
    ],
)
def test_a_value_of_another_run_is_no_option_of_slime_eval(tmp_path, given):
    run = make_run(tmp_path / "evil", given)
    name, value = next(iter(given.items()))
    with pytest.raises(ConfigError, match=f"{name} .*would be read as an option: give it yourself"):
        evaluate._command(str(run), [])
    own = [] if name == "group_rm" else ["yes"]
    words, _ = evaluate._command(str(run), [f"--{name.replace('_', '-')}", *own])
    assert INJECTED not in words and value not in words


def test_slime_eval_keeps_what_the_run_turned_off(tmp_path):
    given = {"sglang_enable_multimodal": False, "group_rm": False, "apply_chat_template": True}
    not_set = {"rollout_stop": [], "rm_url": None}
    run = make_run(tmp_path / "own", {**given, **not_set}, sign=True)
    words, _ = evaluate._command(str(run), [])
    found = read_command_line(words)
    assert {name: found[name] for name in given} == given
    assert not found.keys() & not_set.keys()


@pytest.mark.parametrize(
    "template",
    [
        "{rollout_id:9999999999}",
        "{rollout_id:{rollout_id}}",
        "{rollout_id.real:9}",
        "{0}",
        "{",
        "}",
    ],
)
def test_the_name_of_an_export_cannot_take_all_memory(tmp_path, template):
    run = make_run(tmp_path / "evil", {"save_hf": template})
    with pytest.raises(UserError, match="is not the name of a folder"):
        _ = api.load_run(run).model


@pytest.mark.parametrize("template", ["hf", "hf_{rollout_id}", "hf_{rollout_id:07d}", "{{hf}}"])
def test_names_of_exports_are_filled_in(tmp_path, template):
    run = make_run(tmp_path / "own", {"save_hf": str(tmp_path / template)})
    wanted = tmp_path / template.format(rollout_id=1)
    wanted.mkdir()
    assert api.load_run(run).model == wanted


def test_code_in_a_run_folder_is_not_imported(tmp_path, home):
    """From a folder above it, the module path runs.evil.payload is a file of the downloaded run."""
    run = make_run(tmp_path / "runs" / "evil", {"custom_rm_path": "runs.evil.payload.reward"})
    (run / "payload.py").write_text("open('PWNED', 'w')\ndef reward(args, sample): return 0.0\n")
    done = subprocess.run(
        [sys.executable, "-m", "slime.cli", "eval", "runs/evil", "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "not a run of this user" in done.stderr, done.stderr
    assert not (tmp_path / "PWNED").exists()


def test_only_own_runs_are_resumed_by_python(tmp_path, monkeypatch, home):
    given = {"train_env_vars": {"LD_PRELOAD": "/tmp/evil.so"}}
    monkeypatch.setattr(api.Run, "checkpoints", [Path("iter_0000001")])
    foreign = api.load_run(make_run(tmp_path / "foreign", given))
    with pytest.raises(UserError, match=r"not a run of this user.*slime train --config"):
        foreign.prepare()
    own = make_run(tmp_path / "own", given, sign=True)
    assert api.load_run(own).prepare() is not None
    config = own / "config.yaml"
    config.write_text(config.read_text().replace("evil.so", "other.so"))
    with pytest.raises(UserError, match="was changed"):
        api.load_run(own).prepare()
    (home / ".slime" / "functions.key").unlink()  # another user's key
    with pytest.raises(UserError, match="not a run of this user"):
        api.load_run(make_run(tmp_path / "moved", given, sign=True) and own).prepare()


def test_a_trusted_run_is_taken_over(tmp_path, monkeypatch, home):
    """As after a container with another home folder: options and functions are signed anew."""
    monkeypatch.setattr(api.Run, "checkpoints", [Path("iter_0000001")])
    run = make_run(tmp_path / "run", {"custom_rm_path": "mine.reward"}, sign=True)
    (run / "inputs").mkdir()
    python_functions.store(python_functions.make_functions(len, None), run / "inputs")
    (run / "inputs" / "functions.pkl").chmod(0o644)  # as copied
    (home / ".slime" / "functions.key").unlink()
    python_functions.load.cache_clear()
    with pytest.raises(UserError, match="trust=True"):
        api.load_run(run).prepare()
    with pytest.raises(UserError, match="is not loaded"):
        python_functions.load(run / "inputs")
    assert api.load_run(run, trust=True).prepare() is not None
    assert [*python_functions.load(run / "inputs").rewards.values()] == [len]
    assert api.load_run(run).prepare() is not None


def test_an_empty_key_signs_nothing(tmp_path, home):
    """A full disk leaves an empty key: then anybody could sign functions."""
    python_functions.store(python_functions.make_functions(len, None), tmp_path)
    key = home / ".slime" / "functions.key"
    key.write_bytes(b"")
    content = b"cos\ngetcwd\n."
    file = tmp_path / "functions.pkl"
    file.write_bytes(hmac.digest(b"", content, "sha256") + content)
    with pytest.raises(UserError, match="is damaged"):
        python_functions.load(tmp_path)


def test_a_full_disk_leaves_the_files_of_a_run_that_is_taken_over(tmp_path):
    run = make_run(tmp_path / "other", {"rm_type": "math"})
    python_functions.store(python_functions.make_functions(len, None), run)
    files = [run / "config.yaml", run / "functions.pkl"]
    before = [file.read_bytes() for file in files]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
    try:
        with pytest.raises(OSError):
            own_config.adopt_config(run)
        with pytest.raises(OSError):
            python_functions.adopt(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_bytes() for file in files] == before


def test_a_signed_config_is_no_signed_pickle(tmp_path):
    text = "cos\ngetcwd\n.\n"
    line = own_config.signed(text).splitlines()[-1]
    assert not untrusted_files.is_signed(text.encode(), bytes.fromhex(line.rpartition(" ")[2]))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, BOMB, "a: !!binary aGk=", "a: [", "- a", "\0"],
    ids=["deep", "aliases", "tags", "cut", "list", "binary"],
)
def test_a_hostile_configuration_is_one_sentence(tmp_path, text):
    path = tmp_path / "config_resolved.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        read_resolved(path)


def test_a_pipe_or_a_device_is_no_configuration(tmp_path):
    path = tmp_path / "config_resolved.yaml"
    os.mkfifo(path)
    with pytest.raises(UserError, match="not a regular file"):
        read_resolved(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        read_resolved(path)


def test_odd_records_of_another_run_are_skipped(tmp_path):
    run = make_run(tmp_path / "odd", {})
    lines = ['{"rollout_id": []}', '{"kind": "x"}', '{"rollout_id": 1, "a": 2}', "[" * 5000, "7"]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert api.load_run(run).metrics == [{"rollout_id": 1, "a": 2}]


@pytest.mark.parametrize("save", [7, [1], True])
def test_the_model_of_a_run_with_an_odd_save_is_found(tmp_path, save):
    run = make_run(tmp_path / "odd", {"save": save})
    assert api.load_run(run).model == run / "hf"


@pytest.mark.parametrize(("seconds", "shown"), [(["x", 20], "20s a rollout"), ([1e308] * 2, "inf")])
def test_a_report_of_odd_times(tmp_path, seconds, shown):
    run = make_run(tmp_path / "odd", {})
    records = [
        {"rollout_id": number, "kind": "perf", "time": 1, "perf/step_time": value}
        for number, value in enumerate(seconds)
    ]
    append_lines(run / "metrics.jsonl", records)
    assert shown in write_report(run).read_text()


def test_a_report_is_not_written_through_a_link(tmp_path):
    """The folder may have a link where the report's temporary file will be."""
    run, victim = make_run(tmp_path / "odd", {}), tmp_path / "bashrc"
    victim.write_text("mine")
    (run / ".report.html.tmp").symlink_to(victim)
    (run / "report.html").symlink_to(victim)
    write_report(run)
    assert victim.read_text() == "mine" and "<html" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config_resolved.yaml", "actor_num_nodes: {value: [x]}\nactor_num_gpus_per_node: {value: 99999999999}\n"
         "rollout_num_gpus: {value: 1}\ncolocate: {value: 1}"),
        ("config_resolved.yaml", "hf_checkpoint: {value: [1]}\nnum_rollout: {value: x}\nlr: {value: []}"),
        ("environment.json", '{"starts": [{"time": "x"}, {"time": 1, "gpus": 7}, {"time": 1e300}, 3]}'),
        ("environment.json", '{"starts": [{"time": 1, "packages": [1], "git_commit": 7}]}'),
    ],
)  # fmt: skip
def test_a_report_of_odd_files(tmp_path, name, text):
    run = make_run(tmp_path / "odd", {})
    (run / name).write_text(text)
    assert write_report(run).exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("num_rollout: {value: '7'}", "1 rollouts"),
        ("num_rollout: {value: 2026-01-31}", "2026-01-31"),
        ("num_rollout: {value: 2020-99-99}", "2020-99-99"),
        ("num_rollout: {value: [2026-01-31 10:00:00]}", "2026-01-31 10:00:00"),
        ("advantage_estimator: {value: 7}", "1 rollout of 7"),
    ],
)
def test_a_report_of_odd_values(tmp_path, text, shown):
    runs = [make_run(tmp_path / name, {}) for name in ("odd", "plain")]
    (runs[0] / "config_resolved.yaml").write_text(text)
    perf = {"rollout_id": 0, "kind": "perf", "time": 1, "perf/train_time": 1}
    metrics = [perf, {"rollout_id": 0, "kind": "rollout", "time": 1, "rollout/reward_mean": 1}]
    append_lines(runs[0] / "metrics.jsonl", metrics)
    assert shown in write_report(runs[0]).read_text()
    assert write_comparison(runs).exists()
