"""`slime plan`: memory and layout of a configuration, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

from slime.cli.plan.advice import find_advice
from slime.cli.plan.memory import GIB
from slime.cli.plan.plan import Machine, Plan, make_plan, with_advice
from slime.cli.plan.render import plan_json, print_plan
from slime.cli.plan.request import PlanOptions, gpu_capacity, planned_args, split_options
from slime.config.installed import is_installed
from slime.core.errors import ConfigError

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
    if options.suggest:
        from slime.cli.plan.suggest import suggest

        return suggest(rest, options)
    with planned_args(rest, options) as args:
        need_megatron(args.train_backend)
        plan = with_best_advice(make_plan(args, machine_of(options)), options)
    show(plan, options)
    return 1 if plan.verdict == "does not fit" else 0


def machine_of(options: PlanOptions) -> Machine:
    size, source = gpu_capacity(options)
    host = None if options.host_memory is None else options.host_memory * GIB
    return Machine(gpu_bytes=size * GIB, source=source, host_bytes=host)


def show(plan: Plan, options: PlanOptions) -> None:
    if options.html:
        from slime.cli.plan.page import write_page

        write_page(plan, Path(options.html))
    if options.as_json:
        print(json.dumps(plan_json(plan), indent=1))
    else:
        print_plan(plan)


def with_best_advice(plan: Plan, options: PlanOptions) -> Plan:
    found = find_advice(plan, machine_of(options)) if plan.verdict != "fits" else []
    return with_advice(plan, [str(advice) for advice in found[:3]])


def need_megatron(backend: str) -> None:
    if backend == "megatron" and not is_installed("megatron"):
        raise ConfigError(
            "the plan builds the real Megatron model and megatron-core is not installed here: "
            "pip install '.[megatron]'"
        )
