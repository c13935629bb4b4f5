"""Render a plan as tables in the terminal, or as JSON, whose keys docs/planning.md documents."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from slime.backends.model_size.rank_model import RankModel
from slime.cli.plan.memory import GIB, Item, Phase, gib
from slime.cli.plan.plan import Plan
from slime.cli.plan.rank_layout import ClusterLayout
from slime.cli.plan.te import layers_line

_REPORTED_SIZE = 300_000_000_000
REPORTED_HOST_BYTES = (1.4e12, 1.5e12)
_COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def print_plan(plan: Plan, console: Console | None = None) -> None:
    console = console or wide_console()
    for line in summary_lines(plan):
        console.print(line, highlight=False)
    console.print(_ranks_table(plan))
    console.print(_phases_table(plan))
    console.print(_host_table(plan))
    for line in closing_lines(plan):
        console.print(line, highlight=False, soft_wrap=True)


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for the tables in a file."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def summary_lines(plan: Plan) -> list[str]:
    sizes, batches = plan.layout.sizes, plan.batches
    whole = plan.count.whole.total
    lines = [
        f"model      {plan.shape.model_type}, {whole / 1e9:.2f}B parameters ({whole:,})",
        f"trainer    {sizes.world} GPUs = TP {sizes.tp} x PP {sizes.pp} x CP {sizes.cp} x DP {sizes.dp}"
        + (f"; experts EP {sizes.ep} x TP {sizes.etp} x DP {sizes.expert_dp}" if _moe(plan) else "")
        + f" on {len({p.node for p in plan.layout.ranks})} machines, {plan.args.train_backend}",
        *_layer_lines(plan),
        *_group_lines(plan.layout),
        *_engine_lines(plan),
        f"batches    {batches.samples_per_rollout} samples = {batches.steps_per_rollout} steps x "
        f"{batches.global_batch_size}; {batches.samples_per_dp_rank} per DP rank, micro-batches of "
        f"{batches.tokens_per_gpu} tokens per GPU ({batches.micro_batches} a step at full length)",
        f"GPU        {plan.capacity / GIB:g} GiB ({plan.capacity_source})",
    ]
    return lines


def closing_lines(plan: Plan) -> list[str]:
    colour = _COLOURS[plan.verdict]
    lines = [f"[{colour} bold]{plan.verdict}[/]: {plan.reason}"]
    lines += [f"  try: {advice}" for advice in plan.advice]
    return [*lines, *(f"[dim]note: {warning}[/]" for warning in plan.args.warnings)]


def _layer_lines(plan: Plan) -> list[str]:
    if plan.args.train_backend != "megatron":
        return []
    return [f"layers     {layers_line(plan.args, plan.shape)}"]


def _moe(plan: Plan) -> bool:
    return bool(plan.shape.num_experts)


def _group_lines(layout: ClusterLayout) -> list[str]:
    sizes = layout.sizes
    axes = [
        ("tp", sizes.tp),
        ("cp", sizes.cp),
        ("dp", sizes.dp),
        ("pp", sizes.pp),
        ("ep", sizes.ep),
    ]
    lines = []
    for axis, size in axes:
        if size > 1:
            groups = layout.groups(axis)
            lines.append(
                f"  {axis.upper()}       {len(groups)} groups of {size}: {_ranks(groups[0])}"
                + (f", {_ranks(groups[1])}, ..." if len(groups) > 1 else "")
            )
    return lines


def _ranks(ranks: list[int]) -> str:
    """Format [0, 1, 2, 3] as 0-3 and [0, 16, 32] as 0,16,32."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _engine_lines(plan: Plan) -> list[str]:
    engines = plan.layout.engines
    if not engines or plan.cache is None:
        return ["engines    none started by this run"]
    where = "on the trainer's GPUs" if plan.args.colocate else "on GPUs of their own"
    cache = plan.cache
    return [
        f"engines    {len(engines)} x {len(engines[0].gpus)} GPUs ({plan.args.rollout_engine}), {where}: "
        + "; ".join(_ranks(engine.gpus) for engine in engines[:4])
        + ("; ..." if len(engines) > 4 else ""),
        f"KV cache   {cache.tokens:,} tokens per engine = {cache.requests_at_full_length} requests of "
        f"{cache.longest_request} tokens at once; a rollout sends {cache.requests_wanted}",
    ]


def _ranks_table(plan: Plan) -> Table:
    table = Table(title="what a trainer rank holds (GiB)", title_justify="left")
    columns = ("ranks", "layers", "parameters", "weights", "gradients", "fp32 master", "moments")
    for column in columns:
        table.add_column(column, justify="right")
    step = plan.layout.sizes.world // max(len(plan.count.ranks), 1)
    for rank in plan.count.ranks:
        table.add_row(
            f"{rank.rank}-{rank.rank + step - 1}" if step > 1 else str(rank.rank),
            str(rank.dense_layers + rank.moe_layers),
            f"{rank.parameters:,}",
            gib(rank.weight_bytes),
            gib(rank.gradient_bytes),
            gib(rank.master_bytes),
            gib(rank.moment_bytes),
        )
    return table


def _phases_table(plan: Plan) -> Table:
    table = Table(title="memory of the fullest GPU in each phase (GiB)", title_justify="left")
    table.add_column("")
    for phase in plan.phases:
        table.add_column(
            f"{phase.name.replace('_', ' ')}\n{phase.where}, rank {phase.rank}", justify="right"
        )
    names = list(dict.fromkeys(item.name for phase in plan.phases for item in phase.items))
    for name in names:
        table.add_row(name, *(_cell(phase, name) for phase in plan.phases))
    table.add_section()
    table.add_row("in all", *(f"[bold]{gib(phase.total)}[/]" for phase in plan.phases))
    table.add_row("without offload", *(gib(phase.without_offload) for phase in plan.phases))
    return table


def _cell(phase: Phase, name: str) -> str:
    size = sum(item.nbytes for item in phase.items if item.name == name)
    return f"{size / GIB:.2f}" if size else ""


def _host_table(plan: Plan) -> Table:
    host = plan.host
    table = Table(title=f"host memory of machine {host.node} (GiB)", title_justify="left")
    for column in ("", "GiB", ""):
        table.add_column(column, justify="right" if column else "left")
    for item in host.items:
        table.add_row(item.name, _item_gib(item), item.note)
    table.add_section()
    table.add_row("in all", f"[bold]{host.total / GIB:.0f}[/]", _against_report(plan))
    return table


def _against_report(plan: Plan) -> str:
    """Compare with the host memory that is published for GLM-4.5 with CPU Adam."""
    if not plan.args.optimizer_cpu_offload or plan.count.whole.total < _REPORTED_SIZE:
        return ""
    high, low = (plan.host.total / size for size in REPORTED_HOST_BYTES)
    return f"{low:.2f}-{high:.2f} of the 1.4-1.5 TB\nreported for GLM-4.5 on 8 x 8 GPUs"


def _item_gib(item: Item) -> str:
    return f"{item.nbytes / GIB:.1f}"


def plan_json(plan: Plan) -> dict[str, Any]:
    layout, megatron = plan.layout, plan.args.train_backend == "megatron"
    return {
        "version": 1,
        "verdict": plan.verdict,
        "reason": plan.reason,
        "advice": plan.advice,
        "model_type": plan.shape.model_type,
        "total_parameters": plan.count.whole.total,
        "gpus": len({*range(layout.sizes.world), *(g for e in layout.engines for g in e.gpus)}),
        "nodes": layout.nodes,
        "gpu_memory_bytes": int(plan.capacity),
        "gpu_memory_source": plan.capacity_source,
        "parallel": layout.sizes.as_dict(),
        "groups": {axis: layout.groups(axis) for axis in ("tp", "pp", "cp", "dp", "ep")},
        "ranks": [asdict(place) for place in layout.ranks],
        "layers": layers_line(plan.args, plan.shape) if megatron else None,
        "engines": [asdict(engine) for engine in layout.engines],
        "batches": asdict(plan.batches),
        "per_rank": [_rank(rank) for rank in plan.count.ranks],
        "memory": [_phase(phase) for phase in plan.phases],
        "kv_cache": asdict(plan.cache) if plan.cache else None,
        "host_memory": {
            "node": plan.host.node,
            "total_bytes": plan.host.total,
            "items": [_item(item) for item in plan.host.items],
        },
        "warnings": list(plan.args.warnings),
    }


def _rank(rank: RankModel) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "parameters": rank.parameters,
        "expert_parameters": rank.expert_parameters,
        "trained_parameters": rank.trained_parameters,
        "parameter_bytes": rank.weight_bytes,
        "gradient_bytes": rank.gradient_bytes,
        "master_bytes": rank.master_bytes,
        "moment_bytes": rank.moment_bytes,
        "dense_layers": rank.dense_layers,
        "moe_layers": rank.moe_layers,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "where": phase.where,
        "rank": phase.rank,
        "total_bytes": phase.total,
        "without_offload_bytes": phase.without_offload,
        "items": [_item(item) for item in phase.items],
    }


def _item(item: Item) -> dict[str, Any]:
    return {"name": item.name, "bytes": item.nbytes, "note": item.note}
