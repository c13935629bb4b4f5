"""`--dry-run`: everything resolved and checked, and the plan for the GPUs it is meant for; nothing starts."""

from __future__ import annotations

import sys

from slime.planner.command import machine_of, need_megatron, with_best_advice
from slime.planner.plan import make_plan
from slime.planner.request import planned_args, split_options
from slime.planner.table import print_plan
from slime.utils.arguments import parse_args, print_resolved
from slime.utils.errors import ConfigError, UserError
from slime.utils.flags.config_file import read_config
from slime.utils.flags.gpus import count_gpus
from slime.utils.flags.parser import read_command_line


def is_dry_run(argv: list[str] | None) -> bool:
    """Asked before anything is parsed: the flags may describe another machine."""
    words = sys.argv[1:] if argv is None else argv
    if "--dry-run" in words or not any(word.split("=")[0] == "--config" for word in words):
        return "--dry-run" in words
    return bool(read_config(read_command_line(words)["config"]).get("dry_run"))


def dry_run(argv: list[str] | None = None) -> int:
    """A run that only a machine with GPUs can take is resolved for one, where this has none."""
    options, rest = split_options(sys.argv[1:] if argv is None else argv)
    refused = None
    try:
        print_resolved(parse_args([*rest, "--dry-run"]))
    except ConfigError as error:
        if count_gpus():
            raise
        refused = error
    with planned_args(rest, options) as args:
        if refused is not None:
            print(f"Not for this machine, which has no GPU ({refused}); for one that has:\n")
            print_resolved(args)
        print("\nPlan\n")
        try:
            need_megatron(args.train_backend)
            plan = with_best_advice(make_plan(args, machine_of(options)), options)
        except UserError as error:
            print(f"  no memory plan: {error}")
            return 0
        print_plan(plan)
    return 0
