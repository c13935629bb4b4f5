"""Render a plan: tables in the terminal, or one self-contained HTML file with memory bars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime.cli.plan.activations import layers_line
from slime.cli.plan.memory import GIB, Item, Phase, gib, total
from slime.cli.plan.plan import Plan
from slime.cli.plan.rank_layout import ClusterLayout, EnginePlace, Place
from slime.runlog.jsonl import replace_file

_REPORTED_SIZE = 300_000_000_000
REPORTED_HOST_BYTES = (1.4e12, 1.5e12)
_COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def print_plan(plan: Plan, console: Console | None = None) -> None:
    console = console or wide_console()
    for line in summary_lines(plan):
        console.print(line, highlight=False, markup=False)
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
    whole, megatron = plan.count.whole.total, plan.args.train_backend == "megatron"
    return [
        f"model      {plan.shape.model_type}, {whole / 1e9:.2f}B parameters ({whole:,})",
        f"trainer    {sizes.world} GPUs = TP {sizes.tp} x PP {sizes.pp} x CP {sizes.cp} x DP {sizes.dp}"
        + (
            f"; experts EP {sizes.ep} x TP {sizes.etp} x DP {sizes.expert_dp}"
            if plan.shape.num_experts
            else ""
        )
        + f" on {len({p.node for p in plan.layout.ranks})} machines, {plan.args.train_backend}",
        *([f"layers     {layers_line(plan.args, plan.shape)}"] if megatron else []),
        *_group_lines(plan.layout),
        *([f"adapter    {plan.adapter}"] if plan.adapter else []),
        *_engine_lines(plan),
        f"batches    {batches.samples_per_rollout} samples = {batches.steps_per_rollout} steps x "
        f"{batches.global_batch_size}; {batches.samples_per_dp_rank} per DP rank, micro-batches of "
        f"{batches.tokens_per_gpu} tokens per GPU ({batches.micro_batches} a step at full length)",
        f"GPU        {plan.capacity / GIB:g} GiB ({plan.capacity_source})",
    ]


def closing_lines(plan: Plan) -> list[str]:
    """Return the verdict, advice and notes in rich's markup, in which brackets of messages are escaped."""
    colour = _COLOURS[plan.verdict]
    lines = [f"[{colour} bold]{plan.verdict}[/]: {escape(plan.reason)}"]
    lines += [f"  try: {escape(advice)}" for advice in plan.advice]
    return [*lines, *(f"[dim]note: {escape(warning)}[/]" for warning in plan.args.warnings)]


def _group_lines(layout: ClusterLayout) -> list[str]:
    lines = []
    for axis in ("tp", "cp", "dp", "pp", "ep"):
        groups, size = layout.groups(axis), getattr(layout.sizes, axis)
        if size > 1:
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
    kinds: dict[tuple[str, str, int], list[EnginePlace]] = {}
    for engine in engines:
        kinds.setdefault((engine.model, engine.role, len(engine.gpus)), []).append(engine)
    return [
        *(
            f"engines    {_title(plan, model, role)}{len(group)} x {size} GPUs "
            f"({plan.args.rollout_engine}), {where}: "
            + "; ".join(_ranks(engine.gpus) for engine in group[:4])
            + ("; ..." if len(group) > 4 else "")
            for (model, role, size), group in kinds.items()
        ),
        f"KV cache   {cache.tokens:,} tokens per engine = {cache.requests_at_full_length} requests of "
        f"{cache.longest_request} tokens at once; a rollout sends {cache.requests_wanted}",
    ]


def _title(plan: Plan, model: str, role: str) -> str:
    """Return "judge (frozen): " or "policy prefill: "; nothing for the only model of a run."""
    if not plan.args.engine_models:
        return ""
    found = next(other for other in plan.args.engine_models if other.name == model)
    frozen = "" if found.update_weights else " (frozen)"
    return f"{model}{frozen}{'' if role == 'regular' else ' ' + role}: "


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
            escape(f"{phase.name.replace('_', ' ')}\n{phase.where}, rank {phase.rank}"),
            justify="right",
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
        table.add_row(item.name, gib(item.nbytes), item.note)
    table.add_section()
    table.add_row("in all", f"[bold]{host.total / GIB:.0f}[/]", _against_report(plan))
    return table


def _against_report(plan: Plan) -> str:
    """Compare with the host memory that is published for GLM-4.5 with CPU Adam."""
    if not plan.args.optimizer_cpu_offload or plan.count.whole.total < _REPORTED_SIZE:
        return ""
    high, low = (plan.host.total / size for size in REPORTED_HOST_BYTES)
    return f"{low:.2f}-{high:.2f} of the 1.4-1.5 TB\nreported for GLM-4.5 on 8 x 8 GPUs"


_WIDTH = 720  # of a memory bar, in SVG units


@dataclass(frozen=True, kw_only=True)
class Block:
    """One item of a stacked bar."""

    x: float
    width: float
    colour: int
    label: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    title: str
    blocks: list[Block]
    total: int
    limit: float | None  # x of the line that marks the capacity
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuBox:
    x: int
    y: int
    place: Place | None
    engine: int | None
    title: str
    labels: list[str]


@dataclass(frozen=True, kw_only=True)
class NodeBox:
    index: int
    gpus: list[GpuBox]


def write_page(plan: Plan, path: Path) -> Path:
    replace_file(path, render_page(plan).encode())
    return path


def render_page(plan: Plan) -> str:
    from slime.runlog.report import page_templates  # Jinja, which only a page needs

    environment = page_templates("slime.cli.plan")
    environment.filters["gib"] = gib
    items = [item for phase in plan.phases for item in phase.items]
    colours, on_host = _colours(items), _colours(plan.host.items)
    return environment.get_template("plan.html.jinja").render(
        plan=plan,
        lines=summary_lines(plan),
        nodes=node_boxes(plan),
        bars=[_phase_bar(phase, plan.capacity, colours) for phase in plan.phases],
        host=_bar("host memory", plan.host.items, _scale(plan.host.total), None, on_host),
        colours=colours,
        on_host=on_host,
        stages=plan.layout.sizes.pp,
        width=_WIDTH,
    )


def node_boxes(plan: Plan) -> list[NodeBox]:
    places = {place.rank: place for place in plan.layout.ranks}
    engine_of = {gpu: engine.index for engine in plan.layout.engines for gpu in engine.gpus}
    per_node = plan.layout.gpus_per_node
    boxes: dict[int, list[GpuBox]] = {}
    for gpu in sorted({*places, *engine_of}):
        node, slot = divmod(gpu, per_node)
        place, engine = places.get(gpu), engine_of.get(gpu)
        boxes.setdefault(node, []).append(
            GpuBox(
                x=(slot % 8) * 86,
                y=(slot // 8) * 78,
                place=place,
                engine=engine,
                title=f"GPU {gpu}" + (f", engine {engine}" if engine is not None else ""),
                labels=_labels(plan, place, engine),
            )
        )
    return [NodeBox(index=node, gpus=gpus) for node, gpus in sorted(boxes.items())]


def _labels(plan: Plan, place: Place | None, engine: int | None) -> list[str]:
    if place is None:
        return [f"engine {engine}"]
    sizes = plan.layout.sizes
    expert = f"  EP {place.ep}" if plan.shape.num_experts and sizes.ep > 1 else ""
    return [
        f"rank {place.rank}",
        f"TP {place.tp}  PP {place.pp}",
        f"CP {place.cp}  DP {place.dp}{expert}",
    ]


def _colours(items: list[Item]) -> dict[str, int]:
    """Return a colour per name: seven colours, then the same in two lighter shades."""
    names = list(dict.fromkeys(item.name for item in items))
    return {name: number % 21 for number, name in enumerate(names)}


def _phase_bar(phase: Phase, capacity: float, colours: dict[str, int]) -> Bar:
    largest = max(capacity, phase.total)
    title = f"{phase.name.replace('_', ' ')} ({phase.where}, rank {phase.rank})"
    note = f"without offload {gib(phase.without_offload)} GiB"
    return _bar(title, phase.items, _scale(largest), capacity, colours, note)


def _scale(nbytes: float) -> float:
    return _WIDTH / (nbytes * 1.04)


def _bar(
    title: str,
    items: list[Item],
    scale: float,
    capacity: float | None,
    colours: dict[str, int],
    note: str = "",
) -> Bar:
    blocks, x = [], 0.0
    for item in items:
        width = item.nbytes * scale
        blocks.append(
            Block(x=x, width=width, colour=colours[item.name], label=item.name, nbytes=item.nbytes)
        )
        x += width
    limit = None if capacity is None else capacity * scale
    return Bar(title=title, blocks=blocks, total=total(items), limit=limit, note=note)
