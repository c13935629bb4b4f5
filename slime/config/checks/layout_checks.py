"""Rules about nodes, GPUs and engines: refuse what cannot be placed before Ray starts."""

from __future__ import annotations

from slime.config.engine_groups import gpu_ranges
from slime.config.flags.draft import Draft
from slime.core.errors import ConfigError

# Environment variables of a trainer rank that slime or Ray sets.
_SET_BY_SLIME = {
    "CUDA_VISIBLE_DEVICES": "Ray gives every rank its GPU",
    "MASTER_ADDR": "rank 0 is the rendezvous",
    "MASTER_PORT": "rank 0 is the rendezvous",
    "RANK": "slime numbers the ranks",
    "WORLD_SIZE": "slime counts the ranks",
    "LOCAL_RANK": "Ray gives every rank its GPU",
    "SLIME_ENGINE_TOKEN": "every run generates its own",
}


def check_cluster(draft: Draft) -> None:
    check_nodes(draft)
    check_engines(draft)
    check_machine(draft)
    check_env_vars(draft)
    if draft["distributed_backend"] == "nccl" and not draft.gpus:
        draft.lacking("--distributed-backend nccl needs GPUs: remove it, or use gloo")
    if draft["distributed_backend"] == "gloo" and draft.gpus:
        raise ConfigError("--distributed-backend gloo is for machines without a GPU: remove it")
    _check_transport(draft)


def check_nodes(draft: Draft) -> None:
    training, has = draft["actor_num_gpus_per_node"], draft["num_gpus_per_node"]
    several = draft["actor_num_nodes"] > 1
    if training > has and (draft.given("num_gpus_per_node") or several):
        raise ConfigError(
            f"--actor-num-gpus-per-node {training} is more than --num-gpus-per-node {has}: lower the "
            "first, or set the second to the GPUs of a node"
        )


def check_engines(draft: Draft) -> None:
    per_engine, rollout = draft["rollout_num_gpus_per_engine"], draft["rollout_num_gpus"]
    if rollout == 0 and draft.given("rollout_num_gpus") and not draft["debug_train_only"]:
        raise ConfigError("--rollout-num-gpus 0 leaves no engine: give at least 1, or --colocate")
    if draft["engine_models"]:
        return _check_node_boundaries(draft)
    if rollout and rollout < per_engine:
        raise ConfigError(
            f"an engine of --rollout-num-gpus-per-engine {per_engine} does not fit into {rollout} rollout "
            f"GPUs: give it at most {rollout}, or raise --rollout-num-gpus"
        )
    if rollout % per_engine:
        raise ConfigError(
            f"{rollout} rollout GPUs cannot be split into engines of --rollout-num-gpus-per-engine "
            f"{per_engine}: choose a number that divides them"
        )
    _check_node_boundaries(draft)


def check_machine(draft: Draft) -> None:
    """Check that the run fits on this machine, unless there is a cluster to join."""
    needed, has = _training(draft) + _engines_beside(draft), draft.gpus
    if not has or needed <= has or draft.cluster:
        return
    draft.lacking(
        f"this run needs {needed} GPUs ({_training(draft)} for training, {_engines_beside(draft)} beside "
        f"them for rollout) and this machine has {has}: {_advice(draft)}, or submit it to a Ray cluster "
        "of more nodes (docs/scaling.md)"
    )


def check_env_vars(draft: Draft) -> None:
    for name in draft["train_env_vars"]:
        if name in _SET_BY_SLIME:
            raise ConfigError(
                f"--train-env-vars: {name} is set by slime ({_SET_BY_SLIME[name]}): remove it"
            )


def _training(draft: Draft) -> int:
    return 0 if draft["debug_rollout_only"] else draft.num_training_gpus


def _engines_beside(draft: Draft) -> int:
    """Return the GPUs of engines that are not colocated with the trainer."""
    if draft["rollout_external"]:
        return 0
    if draft["colocate"]:
        return max(0, draft["rollout_num_gpus"] - _training(draft))
    return draft["rollout_num_gpus"]


def _advice(draft: Draft) -> str:
    if _training(draft) and _engines_beside(draft) and _training(draft) <= draft.gpus:
        return "add --colocate and remove --rollout-num-gpus, or lower one of them"
    return "lower --actor-num-nodes x --actor-num-gpus-per-node"


def _check_node_boundaries(draft: Draft) -> None:
    """Check that no engine spans a node boundary; GPUs go to the trainer first, then engine by engine."""
    per_node = draft["num_gpus_per_node"]
    cpu_only = not draft.gpus and not draft.offline  # CPU processes are all on this machine
    if draft["rollout_external"] or cpu_only:
        return
    first = 0 if draft["colocate"] else _training(draft)
    sizes = draft["rollout_num_gpus"], draft["rollout_num_gpus_per_engine"]
    for gpus in gpu_ranges(draft["engine_models"], *sizes):
        start, size = first + gpus.start, len(gpus)
        room = per_node - start % per_node
        if size > room and (size <= per_node or start % per_node):
            raise ConfigError(
                f"an engine of --rollout-num-gpus-per-engine {size} would start on the last "
                f"{room} GPUs of a node of {per_node} (--num-gpus-per-node) and end on the next one: "
                f"choose sizes with which every engine starts at a multiple of "
                f"{min(size, per_node)} GPUs"
            )


def _check_transport(draft: Draft) -> None:
    transport, gpus = draft["update_weight_transport"], draft.gpus
    if transport == "tensor" and not draft["colocate"] and (gpus or draft["actor_num_nodes"] > 1):
        raise ConfigError(
            "--update-weight-transport tensor shares memory, which needs --colocate: use distributed"
        )
    if transport == "distributed" and draft["colocate"] and gpus:
        raise ConfigError(
            "--update-weight-transport distributed cannot run between processes on one GPU: use tensor "
            "with --colocate"
        )
