"""The training setting of tests/fsdp.py, run by the Megatron trainer in any parallel layout.

Weights and gradients are brought to Hugging Face's names and shapes by gathering them over all ranks, so
they can be compared with the naive loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from slime.config.arguments import Args
from slime.core.types import RolloutBatch
from slime.rollout.train_data import split_batch
from tests.fsdp import Case, Outcome, make_rows

TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "num_layers_per_virtual_pipeline_stage": 1}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
DIST_OPT = {"use_distributed_optimizer": True}
OVERLAP = {**DIST_OPT, "overlap_grad_reduce": True, "overlap_param_gather": True}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PADDED = {"qkv_format": "bshd"}


def megatron_args(case: Case, world_size: int, *layouts: dict[str, Any], **more: Any) -> Args:
    flags: dict[str, Any] = {
        "train_backend": "megatron",
        "use_distributed_optimizer": False,
        "actor_num_gpus_per_node": world_size,
        "rollout_num_gpus": 1,
    }
    if torch.cuda.is_available():  # an engine, of which there is none, would need a GPU of its own
        flags |= {"rollout_num_gpus": None, "colocate": True, "offload_train": False}
    for layout in layouts:
        flags |= layout
    return case.args(**{**flags, **more})


def start_actor(args: Args, rank: int, world_size: int, **options: Any) -> Any:
    """Imported here: megatron changes torch for the whole process."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    actor = MegatronTrainRayActor(args, rank, world_size)
    actor.init(args, "actor", with_ref=args.use_kl_loss, **options)
    return actor


def my_rows(actor: Any, seed: int) -> RolloutBatch:
    here = actor.parallel
    rows = make_rows(seed)
    if actor.args.multimodal_keys:
        from tests.tiny_vision import make_image_rows

        rows = make_image_rows(actor.args.hf_checkpoint, seed)
    batches = split_batch(actor.args, rows, dp_size=here.dp_size, cp_size=here.cp_size)
    return batches[here.dp_rank]


def train_megatron(args: Args, rank: int, world_size: int) -> Outcome:
    actor = start_actor(args, rank, world_size)
    grads = {} if args.use_distributed_optimizer else first_gradient(actor)
    metrics = [
        actor.train(rollout_id, my_rows(actor, rollout_id)).metrics for rollout_id in range(2)
    ]
    return Outcome(grads=grads, weights=whole_weights(actor), metrics=metrics)


def whole_weights(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in actor.hf_buckets() for name, tensor in bucket}


def whole_adapters(actor: Any) -> dict[str, torch.Tensor]:
    """By their names in PEFT's files."""
    return {name: tensor.clone() for name, tensor in actor.whole_adapters(torch.float32)}


def first_gradient(
    actor: Any,
    whole: Callable[[Any], dict[str, torch.Tensor]] = whole_weights,
    rows: RolloutBatch | None = None,
) -> dict[str, torch.Tensor]:
    batch = my_rows(actor, 0) if rows is None else rows
    if actor.needs_ref:
        batch.ref_log_probs = actor.log_probs(batch, "ref")
    if actor.needs_old(batch):
        batch.old_log_probs = actor.log_probs(batch, "actor")
    actor.advantages(0, batch)
    actor.forward_backward(next(actor.steps(batch)))
    with _gradients_as_weights(actor):
        return whole(actor)


@contextmanager
def _gradients_as_weights(actor: Any):
    params = [p for chunk in actor.chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.detach().clone() for p in params]
    with torch.no_grad():
        for param in params:
            param.copy_(param.main_grad)
    yield
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
