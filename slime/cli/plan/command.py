"""`slime plan` and `--dry-run`: memory and layout of a configuration; nothing is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from slime.cli.plan.plan import Plan, build_model, find_advice, make_plan, plan_json
from slime.cli.plan.render import print_plan, write_page
from slime.cli.plan.request import PlanOptions, machine_of, planned_args, split_options
from slime.config.arguments import Args, parse_args, print_resolved, read_given, resolve
from slime.config.flags.draft import Draft
from slime.config.flags.registry import own_flags
from slime.config.installed import count_gpus, is_installed
from slime.core.errors import ConfigError, UserError
from slime.utils.printable import safe_text

_USAGE = """usage: slime plan [OPTIONS] FLAGS OF train.py
       slime plan --suggest --gpus N MODEL_ARGS

Memory of every phase on every GPU and machine, the parallel layout, and whether it fits. Needs no GPU,
no weights and no data; MODEL_ARGS of scripts/models, or a config.json in --hf-checkpoint, are enough.

  --gpu-memory GIB    of one GPU, as nvidia-smi counts it (default: this machine's, or 80)
  --host-memory GIB   of one machine; with it, too little is "does not fit"
  --gpus N            number of available GPUs; a job that needs more is refused
  --suggest           propose layouts for the model on --gpus N, best first
  --json              one JSON object (docs/planning.md)
  --html FILE         write a page with the machines, GPUs, groups and memory

Status: 0 fits or tight, 1 does not fit, 2 wrong flags."""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    options, rest = split_options(argv)
    options.refuse(("every_value",), "--dry-run")
    if options.suggest:
        from slime.cli.plan.suggest import suggest

        return suggest(rest, options)
    with planned_args(rest, options) as args:
        _need_megatron(args.train_backend)
        plan = _with_best_advice(make_plan(args, machine_of(options)), options)
    _show(plan, options)
    return 1 if plan.verdict == "does not fit" else 0


def _show(plan: Plan, options: PlanOptions) -> None:
    if options.html:
        write_page(plan, Path(options.html))
    if options.as_json:
        print(json.dumps(plan_json(plan), indent=1))
    else:
        print_plan(plan)


def _with_best_advice(plan: Plan, options: PlanOptions) -> Plan:
    found = find_advice(plan, machine_of(options)) if plan.verdict != "fits" else []
    return replace(plan, advice=[str(advice) for advice in found[:3]])


def _need_megatron(backend: str) -> None:
    if backend == "megatron" and not is_installed("megatron"):
        raise ConfigError(
            "the plan builds the real Megatron model and megatron-core is not installed here: "
            "pip install '.[megatron]'"
        )


def is_dry_run(argv: list[str] | None) -> bool:
    """Return whether --dry-run is set; flags are not parsed yet, as they may be for another machine."""
    words = sys.argv[1:] if argv is None else argv
    if "--dry-run" in words or not any(word.split("=")[0] == "--config" for word in words):
        return "--dry-run" in words
    return bool(read_given(words)[0].get("dry_run"))


def dry_run(argv: list[str] | None, check_start: Callable[[Args], list[str]]) -> int:
    """Resolve the flags, check what a start would check, and print both.

    The memory plan is printed if there are GPUs, and for a run meant for another machine: it needs GPUs that
    this machine lacks, names a model that does not exist here, or gives the sizes of a machine.
    """
    options, rest = split_options(sys.argv[1:] if argv is None else argv)
    options.refuse(("as_json", "suggest", "html"), "slime plan")
    refused = None
    try:
        resolved = parse_args([*rest, "--dry-run"])
    except ConfigError as error:
        refused = error
        resolved = _resolve_with_gpus(rest, error)
        print(safe_text(f"Not for this machine, which has no GPU ({refused}); for one that has:\n"))
    print_resolved(resolved, every=options.every_value)
    checked = check_start(resolved)
    config = Path(resolved.hf_checkpoint).expanduser() / "config.json"
    here = refused is None and not options.describes_machine and config.is_file()
    shown = nullcontext(resolved) if here else planned_args(rest, options)
    with shown as args:
        line, plan = _build(args, options, with_plan=not here or count_gpus() > 0)
    lines = ["Checked", *(f"  {line}" for line in ("flags", *checked, line))]
    if not options.every_value:
        lines += ["", "Defaults are not shown: --dry-run --all prints every value."]
    print(safe_text("\n" + "\n".join(lines)))
    if plan is not None:
        print("\nPlan\n" if count_gpus() else "\nPlan for GPUs, of which this machine has none\n")
        print_plan(plan)
    return 0


def _build(args: Args, options: PlanOptions, *, with_plan: bool) -> tuple[str, Plan | None]:
    """Build the model without weights, as a trainer would, and return a line for the user; `with_plan` also
    plans the run."""
    try:
        _need_megatron(args.train_backend)
        if not with_plan:
            count, plan = build_model(args), None
        else:
            plan = _with_best_advice(make_plan(args, machine_of(options)), options)
            count = plan.count
    except ConfigError:  # the run would refuse it too
        raise
    except UserError as error:
        return f"model      not built, no memory plan: {error}", None
    return f"model      built without weights, {count.whole.total:,} parameters", plan


def _resolve_with_gpus(words: list[str], refused: ConfigError) -> Args:
    """Resolve the flags for a machine with GPUs; raise `refused` if they are wrong there too."""
    if count_gpus():
        raise refused
    given, origins = read_given(words)
    several = (given.get("actor_num_nodes") or 1) > 1
    each = given.get("num_gpus_per_node") or own_flags()["num_gpus_per_node"].default
    try:
        return resolve(Draft(given, origins, gpus=each, offline=True, cluster=several))
    except ConfigError:
        raise refused from None
