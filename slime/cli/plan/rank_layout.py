"""Parallel groups of the ranks, their machines, the GPUs of each engine, and tokens per rank.

Megatron numbers ranks with tensor parallelism innermost, then context, then data, then pipeline.
Experts are sharded inside data x tensor x context, not on top of it: world = TP x PP x CP x DP.

    TP 2, PP 2, CP 1 on 8 GPUs: DP 2     rank  0 1 | 2 3 | 4 5 | 6 7
                                         tp    0 1   0 1   0 1   0 1
                                         dp    0     1     0     1
                                         pp    0     0     1     1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime.cli.plan.model_shape import Shape
from slime.config.arguments import Args
from slime.config.engine_groups import DEFAULT_MODEL, engines_of

ASSUMED_PROMPT = 1024


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the parallel groups; FSDP has data parallelism only."""

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
    """Coordinates of a rank in the parallel groups."""

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
    model: str = DEFAULT_MODEL
    role: str = "regular"


@dataclass(frozen=True, kw_only=True)
class ClusterLayout:
    sizes: Sizes
    gpus_per_node: int
    nodes: int
    ranks: list[Place]
    engines: list[EnginePlace]

    def groups(self, axis: str) -> list[list[int]]:
        """Return the ranks of each group along `axis` ("tp", "pp", ...)."""
        sizes = self.sizes
        block = sizes.etp * sizes.ep if axis in ("ep", "etp") else sizes.world
        found: dict[tuple[int, ...], list[int]] = {}
        for place in self.ranks:
            key = (*(getattr(place, name) for name in _FIXED[axis]), place.rank // block)
            found.setdefault(key, []).append(place.rank)
        return list(found.values())


_FIXED = {
    "tp": ("cp", "dp", "pp"),
    "cp": ("tp", "dp", "pp"),
    "dp": ("tp", "cp", "pp"),
    "pp": ("tp", "cp", "dp"),
    "ep": ("etp", "pp"),
    "etp": ("ep", "pp"),
}


def sizes_of(args: Args) -> Sizes:
    world = args.num_training_gpus
    if args.train_backend == "fsdp":
        return Sizes(world=world, ep=args.expert_model_parallel_size or 1)
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
    if not args.colocate:  # engines get the GPUs after the trainer's, on its last machine first
        per_node = max(per_node, args.num_gpus_per_node)
    ranks = [_place(rank, sizes, per_node) for rank in range(sizes.world)]
    engines = _engines(args, 0 if args.colocate else sizes.world, per_node)
    used = {node for engine in engines for node in engine.nodes}
    return ClusterLayout(
        sizes=sizes,
        gpus_per_node=per_node,
        nodes=len({place.node for place in ranks} | used),
        ranks=ranks,
        engines=engines,
    )


def stage_ranks(sizes: Sizes) -> list[int]:
    """Return the first rank of each pipeline stage; all ranks of a stage hold the same amount."""
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


def _engines(args: Args, first: int, per_node: int) -> list[EnginePlace]:
    places = []
    for index, spec in enumerate(engines_of(args)):
        gpus = [first + gpu for gpu in spec.gpus]
        nodes = sorted({gpu // per_node for gpu in gpus})
        places.append(
            EnginePlace(
                index=index, gpus=gpus, nodes=nodes, model=spec.model, role=spec.worker_type
            )
        )
    return places


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batch sizes: 32 prompts x 8 samples = 256 in one step; with DP 1 all on the one replica."""

    samples_per_rollout: int
    steps_per_rollout: int
    global_batch_size: int
    samples_per_dp_rank: int  # in one step
    longest_sample: int
    tokens_per_gpu: int  # of the largest micro-batch
    log_prob_tokens_per_gpu: int
    micro_batches: int  # of a step, if every sample had the maximum length


def batches_of(args: Args, sizes: Sizes, shape: Shape) -> Batches:
    longest = longest_sample(args, shape)
    share = math.ceil(longest / sizes.cp)
    samples = math.ceil(args.global_batch_size / sizes.dp)
    if args.use_dynamic_batch_size:
        tokens = max(args.max_tokens_per_gpu or 0, share)
        log_prob_tokens = max(args.log_probs_max_tokens_per_gpu or tokens, share)
        per_micro_batch = max(tokens // share, 1)
    else:
        per_micro_batch = args.micro_batch_size
        tokens = log_prob_tokens = per_micro_batch * share
    return Batches(
        samples_per_rollout=args.rollout_batch_size * args.n_samples_per_prompt,
        steps_per_rollout=args.num_steps_per_rollout,
        global_batch_size=args.global_batch_size,
        samples_per_dp_rank=samples,
        longest_sample=longest,
        tokens_per_gpu=min(tokens, samples * share),
        log_prob_tokens_per_gpu=min(log_prob_tokens, samples * share * args.num_steps_per_rollout),
        micro_batches=math.ceil(samples / per_micro_batch),
    )


def longest_sample(args: Args, shape: Shape) -> int:
    """Return the longest prompt plus response; prompts without a limit count as 1024 tokens."""
    limit = args.rollout_max_context_len or shape.context
    prompt = args.rollout_max_prompt_len or ASSUMED_PROMPT
    return min(limit, prompt + (args.rollout_max_response_len or 0))
