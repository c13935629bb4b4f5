"""Machines and GPUs of engines beside the trainer, as `slime plan` shows them and as Ray places them."""

import json

import pytest

from slime.cli.plan.rank_layout import cluster_layout
from slime.cli.plan.request import PlanOptions, planned_args
from slime.ray.placement_group import plan_layout
from tests.unit.test_plan import QWEN3_4B


@pytest.mark.parametrize(
    ("nodes", "training", "rollout", "engine_nodes", "machines"),
    [
        (1, 4, 4, [0], 1),  # engine GPUs 4-7 of the trainer's machine
        (1, 4, 12, [0, 1, 1], 2),
        (1, 8, 8, [1, 1], 2),
        (2, 4, 4, [1], 2),  # 8 GPUs of a node: both halves of the trainer are on the first
    ],
)
def test_engines_get_the_gpus_after_the_trainers(
    tmp_path, nodes, training, rollout, engine_nodes, machines
):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    flags = [
        *("--hf-checkpoint", str(tmp_path), "--rm-type", "math", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "4096", "--actor-num-nodes", str(nodes)),
        *("--actor-num-gpus-per-node", str(training), "--rollout-num-gpus", str(rollout)),
        *("--rollout-num-gpus-per-engine", "4"),
    ]
    with planned_args(flags, PlanOptions()) as args:
        layout, placed = cluster_layout(args), plan_layout(args)
    assert [engine.gpus for engine in layout.engines] == placed.engines
    assert [engine.nodes for engine in layout.engines] == [[node] for node in engine_nodes]
    assert (layout.nodes, layout.gpus_per_node) == (machines, 8)
