"""Who sits on which device: one Ray placement group, one bundle per GPU (or CPU slot).

disaggregated, 2 trainer ranks, 2 engines      bundle  0  1 | 2  3
                                               trainer 0  1 |
                                               engine       | 0  1
colocated, 2 ranks, 2 engines                  bundle  0  1
                                               trainer 0  1
                                               engine  0  1

The critic of PPO has one process on each device of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.utils.arguments import Args
from slime.utils.errors import ConfigError

# A slot is a process, not a core: any layout can be rehearsed on a laptop.
_CPU_SLOT = 0.01
_GPU_SHARES = {"actor": 0.4, "critic": 0.25, "engine": 0.3}  # of one GPU when several sit on it
_READY_TIMEOUT_S = 600


@dataclass(kw_only=True, frozen=True)
class Layout:
    """Bundles by role. `engines[i]` are the bundles of engine i, its first one leads."""

    num_bundles: int
    trainer: list[int]
    engines: list[list[int]]
    with_critic: bool = False


def plan_layout(
    args: Args,
    *,
    with_trainer: bool = True,
    with_engines: bool = True,
    with_critic: bool = False,
) -> Layout:
    """Bundles for each role; pure arithmetic on the cluster flags."""
    train = args.actor_num_nodes * args.actor_num_gpus_per_node if with_trainer else 0
    rollout = args.rollout_num_gpus if with_engines else 0
    first = 0 if args.colocate else train
    per_engine = args.rollout_num_gpus_per_engine
    engines = [
        list(range(first + start, first + start + per_engine))
        for start in range(0, rollout - per_engine + 1, per_engine)
    ]
    total = max(train, rollout) if args.colocate else train + rollout
    return Layout(
        num_bundles=total,
        trainer=list(range(train)),
        engines=engines,
        with_critic=with_critic and with_trainer,
    )


def needs_critic(args: Args) -> bool:
    return args.advantage_estimator == "ppo" and args.loss_type != "sft_loss"


class Placement:
    """A layout with its bundles reserved in the cluster."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        self._check_capacity()
        bundle = {"CPU": _CPU_SLOT, **({"GPU": 1} if self.on_gpu else {})}
        self.group: PlacementGroup = placement_group([bundle] * layout.num_bundles, strategy="PACK")
        ray.get(self.group.ready(), timeout=_READY_TIMEOUT_S)
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        # Ranks of one node must be neighbours, whatever order Ray filled the nodes in.
        self._order = sorted(range(layout.num_bundles), key=lambda i: (nodes[i], i))

    def options(self, bundle: int, *, role: str) -> dict:
        """Ray options that put an actor of `role` on a bundle."""
        trains = bundle in self.layout.trainer
        shared = trains and (
            self.layout.with_critic or any(bundle in b for b in self.layout.engines)
        )
        share = _GPU_SHARES[role] if shared else 1
        return {
            "num_cpus": _CPU_SLOT / 4,
            "num_gpus": share if self.on_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self._order[bundle]
            ),
        }

    def stop(self) -> None:
        """Give the devices back to the cluster."""
        ray.util.remove_placement_group(self.group)

    def _check_capacity(self) -> None:
        if not self.on_gpu:
            return
        have = int(ray.cluster_resources().get("GPU", 0))
        if have < self.layout.num_bundles:
            raise ConfigError(
                f"this layout needs {self.layout.num_bundles} GPUs "
                f"({len(self.layout.trainer)} for training, "
                f"{sum(map(len, self.layout.engines))} for rollout), the Ray cluster has {have}; "
                "lower --actor-num-gpus-per-node / --rollout-num-gpus, or add --colocate"
            )
