"""Host memory of a machine: CPU Adam, offloaded trainers, copies of weights, processes.

Pinned memory comes from torch's host allocator, which rounds every block up to a power of two: an
offloaded weight buffer of 18.9 GB takes 34.4 GB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slime.backends.model_size import RankModel
from slime.cli.plan.engine_memory import PlannedEngine
from slime.cli.plan.memory import GIB, HostMemory, Item
from slime.cli.plan.rank_layout import ClusterLayout
from slime.cli.plan.trainer_memory import (
    Trainer,
    frozen_models,
    moments_name,
    offloaded_share,
)
from slime.config.arguments import Args

# Assumed: resident memory of processes with CUDA, torch and their libraries loaded.
_TRAINER_PROCESS = 4 * GIB
_ENGINE_PROCESS = 4 * GIB
_RAY_AND_SYSTEM = 8 * GIB
_BYTES_PER_ROLLOUT_TOKEN = 4 + 1 + 4 * 4  # ids, mask, four columns of log-probs and advantages


@dataclass(frozen=True, kw_only=True)
class Host:
    args: Args
    trainer: Trainer
    engines: list[PlannedEngine]
    layout: ClusterLayout

    def fullest(self) -> HostMemory:
        nodes = {place.node for place in self.layout.ranks}
        nodes |= {node for engine in self.layout.engines for node in engine.nodes}
        return max((self._node(node) for node in sorted(nodes)), key=lambda host: host.total)

    def _node(self, node: int) -> HostMemory:
        ranks = [self._model_of(p.pp) for p in self.layout.ranks if p.node == node]
        items = self._frozen(ranks)
        processes = ranks * 2 if self.args.needs_critic else ranks
        for parts in (self._adam, self._asleep, self._offloaded):
            items += parts(processes)
        items += self._processes(node, len(processes))
        return HostMemory(node=node, items=[item for item in items if item.nbytes])

    def _model_of(self, stage: int) -> RankModel:
        ranks = self.trainer.count.ranks
        return ranks[min(stage, len(ranks) - 1)]

    def _adam(self, ranks: list[RankModel]) -> list[Item]:
        """Return fp32 weights and moments, and pinned fp32 gradients copied from the GPU."""
        if self.args.train_backend != "megatron" or not self.args.optimizer_cpu_offload:
            return []
        share = offloaded_share(self.args)
        masters = sum(rank.moment_bytes // 2 for rank in ranks) * share
        moments = sum(rank.moment_bytes for rank in ranks) * share
        gradients = sum(_pinned(_fp32(rank.moment_sizes)) for rank in ranks) * share
        return [
            Item(name="CPU Adam: master weights", nbytes=int(masters)),
            Item(name="CPU Adam: moments", nbytes=int(moments)),
            Item(name="CPU Adam: gradients", nbytes=int(gradients), note="pinned"),
        ]

    def _frozen(self, ranks: list[RankModel]) -> list[Item]:
        """Return the memory of each frozen model's copy, and of the actor's while one is on the GPU."""
        names = frozen_models(self.args)
        if self.args.train_backend != "megatron" or not names:
            return []
        each = sum(_pinned(_repeat(rank.weight_sizes)) for rank in ranks)
        items = [Item(name=f"{name} weights", nbytes=each, note="pinned") for name in names]
        return [*items, Item(name="actor's weights meanwhile", nbytes=each, note="pinned")]

    def _asleep(self, ranks: list[RankModel]) -> list[Item]:
        """Return the offloaded trainer without gradients, which are dropped after the last step."""
        if not self.args.offload_train:
            return []
        weights = sum(_pinned(rank.weight_storages) for rank in ranks)
        optimizer = 0
        for rank in ranks:
            on_gpu = {item.name: item.nbytes for item in self.trainer.resident(rank)}
            if on_gpu.get("fp32 master weights"):
                optimizer += _pinned(_fp32(rank.master_sizes))
            if on_gpu.get(moments_name(self.args)):
                optimizer += 2 * _pinned(_fp32(rank.moment_sizes))
                optimizer += _pinned(_fp32(rank.momentum_sizes))
        return [
            Item(name="sleeping parameters", nbytes=weights, note="pinned"),
            Item(name="sleeping optimizer", nbytes=optimizer, note="pinned"),
        ]

    def _offloaded(self, ranks: list[RankModel]) -> list[Item]:
        """Return what --fsdp-cpu-offload keeps: parameters, gradients and moments in fp32."""
        if not self.args.fsdp_cpu_offload:
            return []
        size = sum(2 * _pinned(_repeat(rank.weight_sizes)) + rank.moment_bytes for rank in ranks)
        return [Item(name="parameters, gradients, Adam", nbytes=size)]

    def _processes(self, node: int, num_ranks: int) -> list[Item]:
        gpus = sum(self._gpus_here(engine.gpus, node) for engine in self.layout.engines)
        batches = self.trainer.batches
        rows = batches.samples_per_rollout * batches.longest_sample * _BYTES_PER_ROLLOUT_TOKEN
        items = [
            Item(name="trainer processes", nbytes=num_ranks * _TRAINER_PROCESS, note="assumed"),
            Item(name="engine processes", nbytes=gpus * _ENGINE_PROCESS, note="assumed"),
            Item(name="rollout in Ray's object store", nbytes=2 * rows),
            Item(name="Ray and the system", nbytes=_RAY_AND_SYSTEM, note="assumed"),
        ]
        pairs = zip(self.layout.engines, self.engines, strict=False)  # external: no planned engines
        kept = sum(
            self._gpus_here(place.gpus, node) * engine.memory.weights()
            for place, engine in pairs
            if _backs_up(engine.memory.args)
        )
        if kept:
            items.append(Item(name="engine weights while the trainer works", nbytes=kept))
        return items

    def _gpus_here(self, gpus: list[int], node: int) -> int:
        return sum(gpu // self.layout.gpus_per_node == node for gpu in gpus)


def _backs_up(args: Args) -> bool:
    """Return whether an engine's released weights are kept on the host; by default SGLang drops them."""
    backup = args.rollout_engine == "slime" or bool(args.sglang_enable_weights_cpu_backup)
    return args.offload_rollout and backup


def _pinned(sizes: Iterable[int]) -> int:
    """Return the bytes that blocks of these sizes take in torch's pinned-memory allocator."""
    return sum(1 << max(size - 1, 0).bit_length() for size in sizes if size)


def _repeat(sizes: dict[int, int]) -> list[int]:
    return [size for size, count in sizes.items() for _ in range(count)]


def _fp32(sizes: dict[int, int]) -> list[int]:
    return [4 * size for size in _repeat(sizes)]
