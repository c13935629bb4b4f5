"""`--dry-run`: resolve and check everything, print the plan, start nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable

from slime.cli.plan.command import machine_of, need_megatron, with_best_advice
from slime.cli.plan.plan import make_plan
from slime.cli.plan.render import print_plan
from slime.cli.plan.request import planned_args, split_options
from slime.config.arguments import Args, parse_args, print_resolved, resolve
from slime.config.flags.draft import Draft, Origin
from slime.config.flags.parser import read_command_line, read_config
from slime.config.flags.registry import own_flags
from slime.config.installed import count_gpus
from slime.core.errors import ConfigError, UserError


def is_dry_run(argv: list[str] | None) -> bool:
    """Return whether --dry-run is set, before flags are parsed: they may be for another machine."""
    words = sys.argv[1:] if argv is None else argv
    if "--dry-run" in words or not any(word.split("=")[0] == "--config" for word in words):
        return "--dry-run" in words
    return bool(read_config(read_command_line(words)["config"]).get("dry_run"))


def dry_run(argv: list[str] | None, check_start: Callable[[Args], None]) -> int:
    """Resolve the flags, check what a start would check, print the plan.

    If this machine has no GPU and the run needs some, it is resolved for a machine with GPUs.
    """
    options, rest = split_options(sys.argv[1:] if argv is None else argv)
    refused = None
    try:
        resolved = parse_args([*rest, "--dry-run"])
    except ConfigError as error:
        refused = error
        resolved = _resolve_with_gpus(rest, error)
    else:
        print_resolved(resolved)
    check_start(resolved)
    with planned_args(rest, options) as args:
        if refused is not None:
            print(f"Not for this machine, which has no GPU ({refused}); for one that has:\n")
            print_resolved(args)
        print("\nPlan\n" if count_gpus() else "\nPlan for GPUs, of which this machine has none\n")
        try:
            need_megatron(args.train_backend)
            plan = with_best_advice(make_plan(args, machine_of(options)), options)
        except ConfigError:  # the run would refuse it too
            raise
        except UserError as error:
            print(f"  no memory plan: {error}")
            return 0
        print_plan(plan)
    return 0


def _resolve_with_gpus(words: list[str], refused: ConfigError) -> Args:
    """Resolve the flags for a machine with GPUs; raise `refused` if they are wrong there too."""
    if count_gpus():
        raise refused
    typed = read_command_line(words)
    configured = read_config(typed["config"]) if typed.get("config") else {}
    given = {**configured, **typed}
    origins: dict[str, Origin] = dict.fromkeys(given, "command line")
    several = (given.get("actor_num_nodes") or 1) > 1
    each = given.get("num_gpus_per_node") or own_flags()["num_gpus_per_node"].default
    try:
        return resolve(Draft(given, origins, gpus=each, offline=True, cluster=several))
    except ConfigError:
        raise refused from None
