"""The `slime` command; each subcommand imports and calls the module that does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from pkgutil import resolve_name

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
        return resolve_name(COMMANDS[command])(rest)
    except UserError as error:
        print(safe_text(f"slime: {error}"), file=sys.stderr)
        return error.exit_status


def _convert(argv: list[str]) -> int:
    own_help = argv[1:] if argv[:1] == ["hf-to-torch-dist"] else argv[:1]
    if own_help in (["-h"], ["--help"]):
        print(_CONVERT_USAGE)
        return 0
    if not argv or argv[0] not in CONVERSIONS:
        print(_CONVERT_USAGE)
        return 2
    return resolve_name(CONVERSIONS[argv[0]])(argv[1:])


_CONVERT_USAGE = """usage: slime convert hf-to-torch-dist [MODEL_ARGS] --hf-checkpoint DIR --save DIR
       slime convert torch-dist-to-hf --input-dir DIR --output-dir DIR --origin-hf-dir DIR [--max-workers N]
       slime convert merge-lora --base DIR --adapter DIR --output-dir DIR

The first runs in one process, or in several: torchrun --nproc-per-node N tools/convert_hf_to_torch_dist.py"""

CONVERSIONS = {
    "hf-to-torch-dist": "slime.backends.megatron_utils.conversion.to_torch_dist:main",
    "torch-dist-to-hf": "slime.backends.megatron_utils.conversion.to_hf:main",
    "merge-lora": "slime.weights.peft_folder:main",
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


# name -> function (argv) -> exit status, imported when it is called
COMMANDS = {
    "quickstart": "slime.cli.quickstart:run_quickstart",
    "train": "slime.cli.loop:main",
    "eval": "slime.cli.evaluate:main",
    "plan": "slime.cli.plan.command:main",
    "engine": "slime.engine.server.__main__:main",
    "convert": "slime.cli:_convert",
    "watch": "slime.cli.watch:main",
    "report": "slime.cli:_report",
    "doctor": "slime.cli.doctor.command:main",
}
