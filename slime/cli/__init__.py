"""The `slime` command; each subcommand imports and calls the module that does the work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from slime import __version__
from slime.core.errors import ConfigError, UserError
from slime.utils.printable import safe_text

_USAGE = """usage: slime COMMAND [OPTIONS]

  quickstart    make a tiny model and train it, from nothing to a rising reward
  train         the training loop; the same as python train.py (--train-async: as train_async.py)
  eval          score a model, or the model of a run, on evaluation data
  plan          memory and layout of a run, before anything is started
  engine        serve a model with the embedded inference engine
  convert       weights between Hugging Face and torch_dist
  watch         a live web page of one or several run folders
  report        write report.html of a run folder, or compare several
  doctor        what this machine has, what is missing, how to get it

`slime COMMAND --help` lists the options of a command, `slime --version` prints the version."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"slime {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    try:
        if command not in COMMANDS:
            raise ConfigError(f"unknown command {command!r}; one of {', '.join(COMMANDS)}")
        return COMMANDS[command](rest)
    except UserError as error:
        print(safe_text(f"slime: {error}"), file=sys.stderr)
        return error.exit_status


def train(argv: list[str], *, print_summary: bool = True) -> int:
    """Run `slime train`; `print_summary=False` if it is one stage of several."""
    from slime.cli.loop import main as run_loop

    return run_loop(argv, print_summary=print_summary)


def _train(argv: list[str]) -> int:
    return train(argv)


def _eval(argv: list[str]) -> int:
    from slime.cli.evaluate import main as evaluate

    return evaluate(argv)


def _quickstart(argv: list[str]) -> int:
    from slime.cli.quickstart import run_quickstart

    return run_quickstart(argv)


def _engine(argv: list[str]) -> int:
    from slime.engine.server.__main__ import main as serve

    return serve(argv) or 0


def _convert(argv: list[str]) -> int:
    if not argv or argv[0] not in _CONVERSIONS:
        print(_CONVERT_USAGE)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    return _CONVERSIONS[argv[0]](argv[1:])


def _to_torch_dist(argv: list[str]) -> int:
    if argv in (["-h"], ["--help"]):
        print(_CONVERT_USAGE)
        return 0
    from slime.backends.megatron_utils.conversion.to_torch_dist import main as convert

    return convert(argv)


def _to_hf(argv: list[str]) -> int:
    from slime.backends.megatron_utils.conversion.to_hf import main as convert

    return convert(argv)


def _merge_lora(argv: list[str]) -> int:
    from slime.weights.lora import main as merge

    return merge(argv)


_CONVERT_USAGE = """usage: slime convert hf-to-torch-dist [MODEL_ARGS] --hf-checkpoint DIR --save DIR
       slime convert torch-dist-to-hf --input-dir DIR --output-dir DIR --origin-hf-dir DIR [--max-workers N]
       slime convert merge-lora --base DIR --adapter DIR --output-dir DIR

The first runs in one process, or in several: torchrun --nproc-per-node N tools/convert_hf_to_torch_dist.py"""

_CONVERSIONS: dict[str, Callable[[list[str]], int]] = {
    "hf-to-torch-dist": _to_torch_dist,
    "torch-dist-to-hf": _to_hf,
    "merge-lora": _merge_lora,
}


def _report(argv: list[str]) -> int:
    from slime.runlog.report import write_comparison, write_report

    if not argv or any(word.startswith("-") for word in argv):
        print(_REPORT_USAGE)
        return 0 if argv in (["-h"], ["--help"]) else 2
    files = ("metrics.jsonl", "config_resolved.yaml")
    for folder in map(Path, argv):
        if folder.is_dir() and not any((folder / name).exists() for name in files):
            raise UserError(
                f"{folder} is not the folder of a run: it has neither {' nor '.join(files)}"
            )
    print(write_report(argv[0]) if len(argv) == 1 else write_comparison(argv))
    return 0


_REPORT_USAGE = """usage: slime report RUN_DIR            writes RUN_DIR/report.html
       slime report RUN_DIR OTHER ...  writes RUN_DIR/compare.html: how the runs differ, their curves together"""


def _watch(argv: list[str]) -> int:
    from slime.cli.watch import main as watch

    return watch(argv)


def _plan(argv: list[str]) -> int:
    from slime.cli.plan.command import main as plan

    return plan(argv)


def _doctor(argv: list[str]) -> int:
    from slime.cli.doctor.command import main as examine

    return examine(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "quickstart": _quickstart,
    "train": _train,
    "eval": _eval,
    "plan": _plan,
    "engine": _engine,
    "convert": _convert,
    "watch": _watch,
    "report": _report,
    "doctor": _doctor,
}
