"""Which process gets which device: one Ray placement group, one bundle per GPU (or CPU slot).

disaggregated, 2 trainer ranks, 2 engines      bundle  0  1 | 2  3
                                               trainer 0  1 |
                                               engine       | 0  1
colocated, 2 ranks, 2 engines                  bundle  0  1
                                               trainer 0  1
                                               engine  0  1

The critic of PPO has one process on each device of the trainer. Nodes without a GPU have unlimited slots,
so the trainer's bundles are pinned to nodes and engines get the remaining nodes, see `node_of_bundle`.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config.arguments import Args
from slime.config.engine_groups import gpu_ranges
from slime.core.errors import ConfigError, UserError

# A slot is a process, not a core: any layout can be tried on a laptop.
_CPU_SLOT = 0.01
_GPU_SHARES = {"actor": 0.4, "critic": 0.25, "engine": 0.3}  # of a GPU with several processes
_ON_NODE = 0.0001  # of the resource node:ADDRESS, of which every node has 1
_READY_TIMEOUT_S = 600


@dataclass(kw_only=True, frozen=True)
class Node:
    id: str
    address: str


@dataclass(kw_only=True, frozen=True)
class Layout:
    """Bundles by role. `engines[i]` are the bundles of engine i, the first one runs its server."""

    num_bundles: int
    trainer: list[int]
    engines: list[list[int]]
    with_critic: bool = False
    trainer_nodes: int = 1


def plan_layout(
    args: Args,
    *,
    with_trainer: bool = True,
    with_engines: bool = True,
    with_critic: bool = False,
) -> Layout:
    """Return the bundles of each role; pure arithmetic on the cluster flags."""
    train = args.num_training_gpus if with_trainer else 0
    rollout = args.rollout_num_gpus if with_engines else 0
    first = 0 if args.colocate else train
    models = args.engine_models if with_engines else ()
    ranges = gpu_ranges(models, rollout, args.rollout_num_gpus_per_engine)
    engines = [[first + gpu for gpu in gpus] for gpus in ranges]
    total = max(train, rollout) if args.colocate else train + rollout
    return Layout(
        num_bundles=total,
        trainer=list(range(train)),
        engines=engines,
        with_critic=with_critic and with_trainer,
        trainer_nodes=args.actor_num_nodes if with_trainer else 1,
    )


class Placement:
    """A layout with its bundles reserved in the cluster."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        self._check_capacity()
        self.group: PlacementGroup = placement_group(self._bundles(), strategy="PACK")
        self._reserve()
        self._order, nodes = self._numbered()
        self.hosts = [node.address for node in nodes]  # by bundle
        self.several_nodes = len({node.id for node in nodes} | {_driver_node()}) > 1

    def options(self, bundle: int, *, role: str) -> dict:
        """Return the Ray options that put an actor of `role` on a bundle."""
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
        """Release the devices."""
        ray.util.remove_placement_group(self.group)

    def _reserve(self) -> None:
        try:
            ray.get(self.group.ready(), timeout=_READY_TIMEOUT_S)
        except GetTimeoutError as error:
            raise UserError(
                f"the Ray cluster could not give {self.layout.num_bundles} slots within "
                f"{_READY_TIMEOUT_S} s: another job may hold them, see `ray status` and `ray job list`"
            ) from error

    def _bundles(self) -> list[dict[str, float]]:
        bundle: dict[str, float] = {"CPU": _CPU_SLOT}
        if self.on_gpu:
            return [{**bundle, "GPU": 1}] * self.layout.num_bundles
        if self.layout.trainer_nodes == 1:
            return [bundle] * self.layout.num_bundles
        return [
            {**bundle, f"node:{node.address}": _ON_NODE}
            for node in node_of_bundle(self.layout, alive_nodes(first=_driver_node()))
        ]

    def _numbered(self) -> tuple[list[int], list[Node]]:
        """Return Ray's index of each bundle of the layout, and its node.

        Ranks of one node must be consecutive, in whatever order Ray filled the nodes. The fullest nodes
        come first, because the trainer needs whole ones.
        """
        table = placement_group_table(self.group)["bundles_to_node_id"]
        nodes = {node.id: node for node in alive_nodes(first=_driver_node())}
        place = {node: number for number, node in enumerate(nodes)}
        filled = Counter(table.values())
        order = list(range(self.layout.num_bundles))
        if self.on_gpu:
            order.sort(key=lambda i: (-filled[table[i]], place[table[i]], i))
        return order, [nodes[table[i]] for i in order]

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


def alive_nodes(*, first: str) -> list[Node]:
    """Return the nodes sorted by address, the one with the id `first` before all others."""
    nodes = [
        Node(id=node["NodeID"], address=node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda n: (n.id != first, int(ipaddress.ip_address(n.address))))


def node_of_bundle(layout: Layout, nodes: list[Node]) -> list[Node]:
    """Spread the trainer's bundles evenly over its nodes, and the engines over the other nodes."""
    if len(nodes) < layout.trainer_nodes:
        raise ConfigError(
            f"--actor-num-nodes {layout.trainer_nodes}: the Ray cluster has {len(nodes)}; start Ray on "
            "more of them (ray start --address=...), or lower it"
        )
    trained = len(layout.trainer)
    per_node = trained // layout.trainer_nodes
    others = nodes[layout.trainer_nodes :] or nodes
    engine_of = {bundle: i for i, bundles in enumerate(layout.engines) for bundle in bundles}
    return [nodes[number // per_node] for number in range(trained)] + [
        others[engine_of.get(bundle, 0) % len(others)]
        for bundle in range(trained, layout.num_bundles)
    ]


def _driver_node() -> str:
    return ray.get_runtime_context().get_node_id()
