"""A plan as JSON; the keys are documented in docs/planning.md and stay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slime.backends.model_size.rank_model import RankModel
from slime.cli.plan.memory import Item, Phase
from slime.cli.plan.plan import Plan
from slime.cli.plan.te import layers_line


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
