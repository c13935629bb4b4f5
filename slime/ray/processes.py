"""All processes of a run on Ray: placed, started together, and stopped in reverse order.

placement ──▶ trainer ranks (load their models), rollout manager, engines (start their servers)
                  │  all have started
                  ▼
              WeightUpdater ──▶ RolloutGroup, TrainGroup: the verbs of the loop
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from slime.config.arguments import Args
from slime.config.env import read_env, set_env
from slime.diagnosis.exit_status import StopSignal
from slime.ray import local_ray
from slime.ray.checkpointing import Checkpointer
from slime.ray.cluster import actor_env, beside_driver, collect_logs
from slime.ray.engine_group import EngineGroup, make_engine_group
from slime.ray.placement_group import Layout, Placement, plan_layout
from slime.ray.remote import Remote, rollout_manager
from slime.ray.rollout_group import Engines, RolloutGroup
from slime.ray.train_group import Ranks, TrainGroup
from slime.ray.watch import Member, Watch
from slime.ray.weight_updater import WeightUpdater
from slime.rollout.base_types import RolloutFunction
from slime.runlog.recorder import Recorder
from slime.serving.external import ExternalGroup
from slime.utils.load_function import load_function

if TYPE_CHECKING:
    from slime.ray.rollout import RolloutManager

_MANAGER_THREADS = 4  # generate, with a save or a query at the same time


@dataclass(kw_only=True, frozen=True)
class Plan:
    """What a run starts; made before Ray starts, so that a wrong flag is refused first."""

    layout: Layout
    never_stops: bool  # whether the rollout function generates between rollouts too


def make_plan(args: Args) -> Plan:
    generate = load_function(
        args.rollout_function_path, flag="--rollout-function-path", protocol=RolloutFunction
    )
    evaluate = load_function(
        args.eval_function_path, flag="--eval-function-path", protocol=RolloutFunction
    )
    users = [generate, *([evaluate] if args.eval_interval else [])]
    needed = any(getattr(function, "needs_engines", True) for function in users)
    layout = plan_layout(
        args,
        with_trainer=not args.debug_rollout_only,
        with_engines=needed and not args.debug_train_only and not args.rollout_external,
        with_critic=args.needs_critic,
    )
    return Plan(layout=layout, never_stops=getattr(generate, "never_stops", False))


class Processes:
    """`rollout` and `actor` are up once this is constructed; `stop` ends all processes."""

    def __init__(
        self,
        args: Args,
        plan: Plan,
        checkpoints: Checkpointer,
        recorder: Recorder,
        stop_signal: StopSignal,
    ):
        watch = Watch(args, recorder.deadline, recorder.message)
        with ExitStack() as stack:
            placement = Placement(plan.layout)
            _on_stop(stack, lambda: _collect_logs(args, placement))
            _on_stop(stack, placement.stop)
            token = _engine_token(args)
            # The router is a child of this process.
            set_env(SLIME_SEVERAL_NODES="1" if placement.several_nodes else "0")
            actor, critic = _create_ranks(args, placement, token, watch)
            _on_stop(stack, actor.stop)
            if critic:
                _on_stop(stack, critic.stop)
            manager = _create_manager(args, placement, token)
            watch.add(lambda: [manager])
            _on_stop(stack, manager.remote.kill)
            group = _create_engines(args, placement, token)
            _on_stop(stack, group.stop)
            group.start()
            engines = Engines(args, group, manager, recorder, watch)
            shares_gpus = args.colocate and bool(actor)
            if shares_gpus:
                # Engines size their KV cache by the free memory: the trainer takes its memory afterwards.
                engines.wait()
                engines.release()
            _start_ranks(args, actor, critic, checkpoints)
            if checkpoints.loaded:
                _load_state(manager, checkpoints, watch)
            if not shares_gpus:
                engines.wait()
            actor.wait_started()
            if critic:
                critic.wait_started()
            if actor:
                sizes = actor.first(lambda rank: rank.parallel_info())
                watch.call(
                    manager, lambda manager: manager.set_parallel(sizes.dp_size, sizes.cp_size)
                )
            updater = WeightUpdater(
                args, actor, engines, recorder, version=checkpoints.weight_version
            )
            self.actor = TrainGroup(
                args, actor=actor, critic=critic, updater=updater, recorder=recorder
            )
            self.rollout = RolloutGroup(
                args,
                manager=manager,
                engines=engines,
                updater=updater,
                recorder=recorder,
                watch=watch,
                stop_signal=stop_signal,
                never_stops=plan.never_stops,
            )
            self._stack = stack.pop_all()

    def stop(self) -> None:
        self._stack.close()


def _on_stop(stack: ExitStack, stop: Callable[[], None]) -> None:
    """Register `stop`. It is skipped once Ray has lost its GCS or raylet: calls would wait for a minute,
    and the actors end with Ray."""
    stack.callback(lambda: stop() if local_ray.dead_process() is None else None)


def _engine_token(args: Args) -> str:
    """Return the key of the engines' routes; external engines and routers have a key of their own."""
    given = read_env().engine_token if args.rollout_external or args.sglang_router_ip else None
    return given or ("" if args.rollout_external else secrets.token_hex(16))


def _env(placement: Placement, processes: int, token: str) -> dict[str, str]:
    return actor_env(processes, token=token, several_nodes=placement.several_nodes)


def _create_ranks(
    args: Args, placement: Placement, token: str, watch: Watch
) -> tuple[Ranks, Ranks | None]:
    """Create the processes of the actor and, for PPO, of the critic."""
    env = {**_env(placement, len(placement.layout.trainer), token), **args.train_env_vars}
    actor = Ranks(args, placement, role="actor", env=env, watch=watch)
    if not placement.layout.with_critic:
        return actor, None
    return actor, Ranks(args, placement, role="critic", env=env, watch=watch)


def _create_manager(args: Args, placement: Placement, token: str) -> Member[RolloutManager]:
    options = {
        "num_cpus": 0,
        "max_concurrency": _MANAGER_THREADS,
        "runtime_env": {"env_vars": _env(placement, len(placement.layout.engines), token)},
        "scheduling_strategy": beside_driver(),  # the node with the run folder
    }
    remote = Remote(options, rollout_manager, args, token)
    return Member(label="rollout manager", remote=remote, log="rollout.log")


def _create_engines(args: Args, placement: Placement, token: str) -> EngineGroup | ExternalGroup:
    env = {"env_vars": _env(placement, len(placement.layout.engines), token)}
    options = [
        [{**placement.options(b, role="engine"), "runtime_env": env} for b in bundles]
        for bundles in placement.layout.engines
    ]
    return make_engine_group(args, options, token=token)


def _start_ranks(args: Args, actor: Ranks, critic: Ranks | None, checkpoints: Checkpointer) -> None:
    actor.start(
        with_ref=args.use_kl_loss or args.kl_coef != 0,
        with_opd_teacher=args.use_opd and args.opd_type == "megatron",
        checkpoint=checkpoints.loaded,
    )
    if critic:
        critic.start(checkpoint=checkpoints.critic_loaded, asleep=args.offload_train)


def _load_state(manager: Member[RolloutManager], checkpoints: Checkpointer, watch: Watch) -> None:
    """Load the data position and the sample buffer."""
    path, last = str(checkpoints.loaded), checkpoints.start_rollout_id - 1
    watch.call(manager, lambda manager: manager.load(path, last))


def _collect_logs(args: Args, placement: Placement) -> None:
    if placement.several_nodes:
        folder = Path(args.run_dir) / "logs"
        with suppress(RayError):  # the cluster itself may be broken
            collect_logs(folder, folder)
