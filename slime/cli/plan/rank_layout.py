"""Which ranks form which groups, on which machine, and which GPUs an engine has.

Megatron numbers ranks with tensor parallelism innermost, then context, then data, then pipeline. Experts
are spread inside data x tensor x context, not on top of it: world = TP x PP x CP x DP.

    TP 2, PP 2, CP 1 on 8 GPUs: DP 2     rank  0 1 | 2 3 | 4 5 | 6 7
                                         tp    0 1   0 1   0 1   0 1
                                         dp    0     1     0     1
                                         pp    0     0     1     1
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.arguments import Args


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the parallel groups; FSDP has data parallelism only."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)

    def as_dict(self) -> dict[str, int]:
        return {
            "world": self.world,
            "tensor": self.tp,
            "pipeline": self.pp,
            "context": self.cp,
            "data": self.dp,
            "expert": self.ep,
            "expert_tensor": self.etp,
            "expert_data": self.expert_dp,
        }


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands."""

    rank: int
    node: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    index: int
    gpus: list[int]  # counted over the whole cluster
    nodes: list[int]


@dataclass(frozen=True, kw_only=True)
class ClusterLayout:
    sizes: Sizes
    gpus_per_node: int
    nodes: int
    ranks: list[Place]
    engines: list[EnginePlace]

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of each group: those that differ in `axis` ("tp", "pp", ...) only."""
        fixed = _FIXED[axis]
        found: dict[tuple[int, ...], list[int]] = {}
        for place in self.ranks:
            key = tuple(getattr(place, name) for name in fixed)
            found.setdefault((*key, *self._rest(place, axis)), []).append(place.rank)
        return list(found.values())

    def _rest(self, place: Place, axis: str) -> tuple[int, ...]:
        if axis not in ("ep", "etp"):
            return ()
        inner = self.sizes.etp * self.sizes.ep
        return (place.rank // inner,)


_FIXED = {
    "tp": ("cp", "dp", "pp"),
    "cp": ("tp", "dp", "pp"),
    "dp": ("tp", "cp", "pp"),
    "pp": ("tp", "cp", "dp"),
    "ep": ("etp", "pp"),
    "etp": ("ep", "pp"),
}


def sizes_of(args: Args) -> Sizes:
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.train_backend == "fsdp":
        return Sizes(world=world)
    return Sizes(
        world=world,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
    )


def cluster_layout(args: Args) -> ClusterLayout:
    sizes, per_node = sizes_of(args), args.actor_num_gpus_per_node
    engine_node = per_node if args.colocate else args.num_gpus_per_node
    ranks = [_place(rank, sizes, per_node) for rank in range(sizes.world)]
    first_node = 0 if args.colocate else args.actor_num_nodes
    engines = _engines(args, first_node, engine_node)
    used = {node for engine in engines for node in engine.nodes}
    return ClusterLayout(
        sizes=sizes,
        gpus_per_node=max(per_node, min(engine_node, args.rollout_num_gpus)),
        nodes=len({place.node for place in ranks} | used),
        ranks=ranks,
        engines=engines,
    )


def stage_ranks(sizes: Sizes) -> list[int]:
    """The first rank of each pipeline stage: the others of a stage hold as much."""
    return [stage * (sizes.world // sizes.pp) for stage in range(sizes.pp)]


def _place(rank: int, sizes: Sizes, per_node: int) -> Place:
    outer, expert = rank // sizes.tp, rank // sizes.etp
    return Place(
        rank=rank,
        node=rank // per_node,
        tp=rank % sizes.tp,
        cp=outer % sizes.cp,
        dp=outer // sizes.cp % sizes.dp,
        pp=rank // (sizes.world // sizes.pp),
        etp=rank % sizes.etp,
        ep=expert % sizes.ep,
    )


def _engines(args: Args, first_node: int, per_node: int) -> list[EnginePlace]:
    size, offset = args.rollout_num_gpus_per_engine, first_node * per_node
    places = []
    for index in range(args.rollout_num_gpus // size):
        gpus = list(range(offset + index * size, offset + (index + 1) * size))
        nodes = sorted({gpu // per_node for gpu in gpus})
        places.append(EnginePlace(index=index, gpus=gpus, nodes=nodes))
    return places
