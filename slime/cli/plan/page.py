"""Render a plan as one self-contained HTML file: machines, GPUs, groups and memory as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime.cli.plan.memory import GIB, Item, Phase
from slime.cli.plan.plan import Plan
from slime.cli.plan.rank_layout import Place
from slime.cli.plan.render import summary_lines
from slime.runlog.jsonl import replace_file
from slime.runlog.report.page import page_templates

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
    environment = page_templates("slime.cli.plan")
    environment.filters["gib"] = lambda nbytes: f"{nbytes / GIB:.1f}"
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
    first = f"rank {place.rank}"
    second = f"TP {place.tp}  PP {place.pp}"
    third = f"CP {place.cp}  DP {place.dp}"
    if plan.shape.num_experts and sizes.ep > 1:
        third += f"  EP {place.ep}"
    return [first, second, third]


def _colours(items: list[Item]) -> dict[str, int]:
    """Return a colour per name: seven colours, then the same in two lighter shades."""
    names = list(dict.fromkeys(item.name for item in items))
    return {name: number % 21 for number, name in enumerate(names)}


def _phase_bar(phase: Phase, capacity: float, colours: dict[str, int]) -> Bar:
    largest = max(capacity, phase.total)
    title = f"{phase.name.replace('_', ' ')} ({phase.where}, rank {phase.rank})"
    note = f"without offload {phase.without_offload / GIB:.1f} GiB"
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
    total = sum(item.nbytes for item in items)
    limit = None if capacity is None else capacity * scale
    return Bar(title=title, blocks=blocks, total=total, limit=limit, note=note)
