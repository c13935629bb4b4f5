"""The output of --dry-run: every value with its origin, the placement, the batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.config.flags.registry import all_flags
from slime.config.installed import count_gpus
from slime.utils.printable import safe_text

if TYPE_CHECKING:
    from slime.config.arguments import Args

_RESULTS = "Resolved"


def resolved_lines(args: Args) -> list[str]:
    """Return all values by group, each with its origin."""
    lines = []
    for group, rows in _grouped(args).items():
        width = max(len(name) for name, _, _ in rows)
        lines += ["", group]
        lines += [
            f"  {name:<{width}}  {origin:<12}  {_text(value)}" for name, value, origin in rows
        ]
    return lines[1:]


def placement_lines(args: Args) -> list[str]:
    """Return the GPUs, or CPU processes, of trainer and engines, and the sizes of a rollout."""
    unit = "GPU" if count_gpus() else "CPU process"
    training = args.actor_num_nodes * args.actor_num_gpus_per_node
    engines = args.rollout_num_gpus // args.rollout_num_gpus_per_engine
    layout = "colocated: the engines share them" if args.colocate else "disaggregated"
    total = training if args.colocate else training + args.rollout_num_gpus
    nodes = f"{args.actor_num_nodes} x {args.actor_num_gpus_per_node}"
    return [
        f"trainer    {_count(training, unit)} ({nodes}), {args.train_backend}, {args.precision}",
        f"engines    {engines} of {_count(args.rollout_num_gpus_per_engine, unit)} each, "
        f"{args.rollout_engine}",
        f"in all     {_count(total, unit)}, {layout}",
        f"weights    {args.update_weight_transport}, {args.update_weight_buffer_size / 2**20:g} MiB "
        "at a time" + (", verified" if args.check_weight_update_equal else ", not verified"),
        f"rollout    {args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = "
        f"{args.rollout_batch_size * args.n_samples_per_prompt} = "
        f"{_count(args.num_steps_per_rollout, 'step')} x {args.global_batch_size} samples",
        f"run        {args.num_rollout} rollouts, "
        f"{_count(args.num_rollout * args.num_steps_per_rollout, 'optimizer step')}",
    ]


def print_resolved(args: Args) -> None:
    sections = [resolved_lines(args), ["Placement", *("  " + li for li in placement_lines(args))]]
    if args.warnings:
        sections.append(["Warnings", *("  " + warning for warning in args.warnings)])
    print(safe_text("\n\n".join("\n".join(lines) for lines in sections)))


def _grouped(args: Args) -> dict[str, list[tuple[str, Any, str]]]:
    flags = all_flags()
    groups: dict[str, list[tuple[str, Any, str]]] = {flag.group: [] for flag in flags.values()}
    groups[_RESULTS] = []
    for name, value in args.to_dict().items():
        group = flags[name].group if name in flags else _RESULTS
        groups[group].append((name, value, args.origin(name)))
    return {group: rows for group, rows in groups.items() if rows}


def _text(value: Any) -> str:
    if isinstance(value, list) and value and hasattr(value[0], "path"):  # evaluation datasets
        return ", ".join(f"{item.name} ({item.path})" for item in value)
    return "-" if value is None else str(value)


def _count(number: int, unit: str) -> str:
    plural = "es" if unit.endswith("ss") else "s"
    return f"{number} {unit}{'' if number == 1 else plural}"
