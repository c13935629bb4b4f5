"""The training step, shared by all backends.

    train(rollout_id, rollout_data)

      fetch ──▶ ref_log_probs? ──▶ old_log_probs? ──▶ advantages ──▶ hooks
                                                                       │
        ┌────────────── for each optimizer step of the schedule ◀──────┘
        ▼
      pack rows ──▶ train_step: forward, loss, backward x M ──▶ clip ──▶ optimizer
        │
        └──▶ metrics, summed over micro-batches, steps and ranks ──▶ TrainReport

The reference pass runs only with a KL term. With one optimizer step per rollout the old log-probs
equal those of the training forward pass; their own pass runs only if `needs_old` is true.

PPO has a second model, the critic: the same class in separate processes, with role "critic". It is
the actor's model with a value head in place of the LM head: a bias-free linear layer to one scalar,
initialized to zero. Where the actor's forward pass returns log-probs of the labels [T], a critic's
returns values [T] (fp32, not divided by a temperature) and entropy None::

      critic.values ──▶ actor.train ──▶ actor.critic_targets ──▶ critic.train
        V of the rows     GAE, policy     values and returns       value loss

A backend therefore needs no critic code in `log_probs`, `train_step`, `save` and `load`, if they
pass the outputs of the forward pass to `loss` and `unpack`. Rank i of the critic has the rows of
rank i of the actor, so both use the same parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime.algorithms.estimators import compute_advantages
from slime.backends.backend import Backend, StepResult
from slime.backends.losses import TrainHooks, TrainLoss
from slime.backends.reporting import Profiler, Reporter
from slime.core.errors import UserError
from slime.core.packing import pack, unpack
from slime.core.types import (
    CriticColumns,
    EngineInfo,
    ParallelInfo,
    RolloutBatch,
    SyncReport,
    TrainBatch,
    TrainReport,
)
from slime.data.stored_samples import save_train_data
from slime.data.tokenizer import refuse_other_vocabulary
from slime.runlog.checkpoint_folder import CheckpointFolder, CheckpointMeta, of_step
from slime.runlog.logging import open_process_log
from slime.runlog.perf_metrics import Timer
from slime.utils.device import device_type
from slime.weights.process_group import Rendezvous
from slime.weights.sync import WeightSync, make_weight_sync, named_engines
from slime.weights.verify import add_probe

if TYPE_CHECKING:
    from slime.config.arguments import Args


def first_weights(args: Args, role: str) -> str:
    """Return the path of initial weights: a checkpoint, a folder of checkpoints, or a HF folder."""
    ref = args.ref_load and of_step(args.ref_load, args.ref_ckpt_step, "--ref-ckpt-step")
    start = ref or args.hf_checkpoint
    if role != "critic" or args.critic_load is None or not Path(args.critic_load).exists():
        return start
    return args.critic_load


def teacher_weights(args: Args) -> str:
    assert args.opd_teacher_load is not None, "a teacher is requested only with a path"
    return of_step(args.opd_teacher_load, args.opd_teacher_ckpt_step, "--opd-teacher-ckpt-step")


class TrainRayActor(Backend):
    """One rank of the trainer: a plain class, which slime/ray wraps in a Ray actor.

    A backend implements the abstract methods of `Backend`.
    """

    def __init__(
        self,
        args: Args,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> None:
        self.args = args
        self.rank = rank
        self.world_size = world_size
        self.parallel = ParallelInfo(
            rank=rank, world_size=world_size, dp_rank=rank, dp_size=world_size
        )
        self.role = "actor"
        self.timer = Timer()
        self.profiler = Profiler(args.profile_target, args.run_dir, rank, args.num_rollout)
        master = None if master_addr is None or master_port is None else (master_addr, master_port)
        self._rendezvous = Rendezvous(rank, world_size, master)
        self._targets: CriticColumns | None = None
        self._engines: list[EngineInfo] = []  # of the last weight update
        self._version = 0  # of the weights that the engines hold
        self._commit: Callable[[], object] | None = None  # of the checkpoint that `save` began

    # ---- start

    def get_master_address(self) -> tuple[str, int]:
        """Start the rendezvous store on rank 0 and return its address and port."""
        return self._rendezvous.serve()

    def set_master(self, address: str, port: int) -> None:
        self._rendezvous.set_master(address, port)

    def log_to_file(self, name: str) -> None:
        """Redirect the output of this process to a log file in the run's folder."""
        open_process_log(self.args.run_dir, f"{name}_{self.rank}", self.args.train_env_vars)

    def parallel_info(self) -> ParallelInfo:
        return self.parallel

    def init(
        self,
        args: Args | None = None,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        checkpoint: str | None = None,
    ) -> int:
        """Join the process group; a backend's `init` also builds and loads the model.

        It returns the first rollout id. `checkpoint` is the folder of one checkpoint to resume from,
        such as `iter_0000019`.
        """
        if args is not None:
            self.args = args
        self.role = role
        self._phase = "train" if role == "actor" else role
        if role == "critic":
            self.args = self.args.replace(**self.args.critic_overrides)
        if device_type() == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self._rendezvous.join(timedelta(minutes=self.args.distributed_timeout_minutes))
        torch.manual_seed(self.args.seed + self.rank)
        self.needs_ref, self.needs_teacher = with_ref, with_opd_teacher
        if with_opd_teacher:
            teacher = self.args.opd_teacher_load
            assert teacher is not None, "with_opd_teacher comes from --opd-teacher-load"
            refuse_other_vocabulary(self.args.hf_checkpoint, teacher, "--opd-teacher-load")
        self.hooks = TrainHooks(self.args)
        self._loss = TrainLoss(self.args, role, self.hooks)
        return 0

    # ---- the training step

    def train(
        self, rollout_id: int, rollout_data: Any, columns: CriticColumns | None = None
    ) -> TrainReport:
        """Train on this rank's rows; `columns` are values for an actor, targets for a critic."""
        with self.profiler.region(f"{self._phase}_overall", rollout_id):
            return self._train(rollout_id, self.fetch(rollout_data), columns)

    def async_train(self, rollout_id: int, rollout_data_ref: Any) -> TrainReport:
        return self.train(rollout_id, rollout_data_ref)

    def _train(
        self, rollout_id: int, batch: RolloutBatch, columns: CriticColumns | None
    ) -> TrainReport:
        if columns is not None:
            batch.values, batch.returns = columns.values, columns.returns
        if self.role == "actor":
            with self.profiler.region("train_log_probs", rollout_id):
                self.prepare(rollout_id, batch)
            save_train_data(self.args.save_debug_train_data, rollout_id, self.rank, batch)
        critic_alone = self.role == "actor" and rollout_id < self.args.num_critic_only_steps
        profiled = self.profiler.region(f"train_{self.role}", rollout_id)
        with self.timer.phase(f"{self._phase}/steps"), profiled:
            results = [
                self.train_step(rollout_id, step_id, micro_batches)
                for step_id, micro_batches in enumerate(() if critic_alone else self.steps(batch))
            ]
        if self.args.offload_train:
            self.drop_gradients()
        interval = self.args.ref_update_interval
        if self.needs_ref and interval and (rollout_id + 1) % interval == 0:
            self.update_ref()
        return self.report(batch, results)

    def prepare(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Compute reference, teacher and old log-probs, then advantages, before the first step."""
        phase = self.timer.phase
        if self.needs_ref:
            with phase("train/ref_log_probs"):
                batch.ref_log_probs = self.log_probs(batch, model="ref")
        if self.needs_teacher:
            with phase("train/teacher_log_probs"):
                batch.teacher_log_probs = self.log_probs(batch, model="teacher")
        if self.needs_old(batch):
            with phase("train/old_log_probs"):
                batch.old_log_probs = self.log_probs(batch, model="actor")
        self.advantages(rollout_id, batch)
        self._require_columns(batch)
        if batch.values is not None:
            self._targets = CriticColumns(values=batch.values, returns=batch.returns)

    def _require_columns(self, batch: RolloutBatch) -> None:
        """Raise UserError if a user hook left out a required column."""
        if self.args.use_opd and batch.teacher_log_probs is None:
            raise UserError(
                "--use-opd: the samples lack the teacher's log-probs: the reward function "
                "must set sample.teacher_log_probs, or remove --custom-rm-path"
            )
        if batch.values is not None and batch.returns is None:
            raise UserError(
                "--custom-advantage-function-path must set returns too: the critic is trained on them"
            )

    def values(self, batch_ref: Any) -> CriticColumns:
        """Return the critic's value of the state before each response token."""
        with self.timer.phase("critic/values"):
            return CriticColumns(values=self.log_probs(self.fetch(batch_ref), model="actor"))

    def critic_targets(self) -> CriticColumns:
        """Return, once, the critic's targets for the actor's last training rows."""
        targets, self._targets = self._targets, None
        assert targets is not None
        return targets

    def fetch(self, batch_ref: Any) -> RolloutBatch:
        """Return this rank's rows from a batch, a Ray reference, or a list of either by DP rank."""
        if isinstance(batch_ref, list):
            mine = batch_ref[self.parallel.dp_rank]
            return self.fetch(mine[0] if isinstance(mine, list) else mine)
        if isinstance(batch_ref, RolloutBatch):
            return batch_ref
        import ray

        return ray.get(batch_ref)

    def needs_old(self, batch: RolloutBatch) -> bool:
        """Return whether old log-probs need a pass of their own before the first training step."""
        args = self.args
        if args.loss_type == "sft_loss":
            return False
        assert batch.schedule is not None
        several_steps = len(batch.schedule.steps) > 1 and not args.use_rollout_logprobs
        correction = args.use_tis and args.use_rollout_logprobs
        hooks = self.hooks.see_old_log_probs
        return several_steps or correction or args.use_routing_replay or args.kl_coef != 0 or hooks

    def advantages(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Fill `batch.advantages` and `batch.returns`, then call the user's postprocessing hook."""
        args = self.args
        if self.hooks.advantages is not None:
            self.hooks.advantages(args, batch)
            batch.check()
        elif args.loss_type != "sft_loss" and not args.disable_compute_advantages_and_returns:
            compute_advantages(
                batch,
                estimator=args.advantage_estimator,
                kl_coef=args.kl_coef,
                kl_type=args.kl_loss_type,
                gamma=args.gamma,
                lambd=args.lambd,
                normalize=args.normalize_advantages,
                dp_group=self.dp_group,
            )
        if self.hooks.postprocess is not None:
            self.hooks.postprocess(args, rollout_id, batch)
            batch.check()

    def steps(self, batch: RolloutBatch) -> Iterator[list[TrainBatch]]:
        """Yield the packed micro-batches of each optimizer step."""
        assert batch.schedule is not None
        for step_id, step in enumerate(batch.schedule.steps):
            yield [
                self.pack(batch, rows, dummy=(step_id, number) in batch.schedule.dummies)
                for number, rows in enumerate(step)
            ]

    def pack(self, batch: RolloutBatch, rows: list[int], *, dummy: bool = False) -> TrainBatch:
        return pack(batch, rows, self.parallel, dummy=dummy)

    def unpack(self, column: torch.Tensor, batch: TrainBatch) -> list[np.ndarray]:
        """Return each row's response tokens from a packed column [T], possibly a CP slice."""
        return unpack(column, batch)

    def loss(
        self,
        batch: TrainBatch,
        log_probs: torch.Tensor,  # [T]
        entropy: torch.Tensor | None,  # [T]
        result: StepResult,
    ) -> torch.Tensor:
        """Return this micro-batch's share of the step's loss; add its metrics to `result`.

        For a critic `log_probs` are values.
        """
        reported = not batch.dummy and batch.rollout_log_probs is not None
        if self.role == "actor" and reported and batch.old_log_probs is None:
            result.log_probs.update(zip(batch.rows, self.unpack(log_probs, batch), strict=True))
        output = self._loss(batch, log_probs, entropy, self.cp_group)
        result.add(output.metrics)
        return output.loss

    @property
    def uses_logits(self) -> bool:
        """Whether the training forward pass must return logits, for `custom_loss`."""
        return self.role == "actor" and self.args.loss_type == "custom_loss"

    def custom_loss(
        self, batch: TrainBatch, logits: torch.Tensor, result: StepResult
    ) -> torch.Tensor:
        """Return the loss of `--custom-loss-function-path` on logits [T, V], like `loss`."""
        output = self._loss.custom(batch, logits)
        result.add(output.metrics)
        return output.loss

    def report(self, batch: RolloutBatch, results: list[StepResult]) -> TrainReport:
        times = {k: v for k, v in self.timer.take().items() if k != "perf/step_time"}
        report = Reporter(self.args, self.role, self.parallel).report
        return report(batch, results, times, self.timer.activity())

    # ---- weights

    def update_weights(
        self, engines: list[EngineInfo] | None = None, version: int | None = None
    ) -> SyncReport:
        """Send the weights to the engines; --check-weight-update-equal adds a probe for SGLang.

        Defaults: the engines of the last call or of --rollout-external-engine-addrs, the next version.
        """
        self.require_awake()
        engines = (self._engines or named_engines(self.args)) if engines is None else engines
        self._engines = engines
        self._version = self._version + 1 if version is None else version
        report = self.send_weights(engines, self._version)
        score = partial(self.log_probs, model="actor")
        return add_probe(report, self.args, engines, score, pp_size=self.parallel.pp_size)

    def send_weights(self, engines: list[EngineInfo], version: int) -> SyncReport:
        return self.weight_sync.update(self.hf_buckets(), engines, version)

    @cached_property
    def weight_sync(self) -> WeightSync:
        return make_weight_sync(self.args)

    def save(self, rollout_id: int, force_sync: bool = False) -> None:
        """Write a checkpoint below --save and commit it as the latest; runs also save their data.

        With --async-save and without `force_sync`, `wait_save` or the next `save` commits it.
        """
        if not isinstance(force_sync, bool):  # a path, which `save_to` takes
            raise TypeError(f"force_sync is True or False, not {force_sync!r}")
        flag = "save" if self.role == "actor" else "critic_save"
        root = getattr(self.args, flag)
        if root is None:
            raise UserError(f"--{flag.replace('_', '-')} is missing: give a folder for checkpoints")
        self.wait_save()
        folder = CheckpointFolder(root)
        self._on_rank_zero(lambda: folder.begin(rollout_id, clean=False))
        self.save_to(str(folder.temporary(rollout_id)), rollout_id, force_sync)
        meta = CheckpointMeta(
            rollout_id=rollout_id,
            weight_version=self._version,
            train_backend=self.args.train_backend,
        )
        self._commit = partial(folder.commit, meta, keep=self.args.save_total_limit)
        if force_sync or not self.args.async_save:
            self.wait_save()

    save_model = save

    def wait_save(self) -> None:
        """Wait for a background save and commit the checkpoint that `save` began."""
        commit, self._commit = self._commit, None  # a failed write is not committed later
        self.wait_write()
        if commit is not None:
            dist.barrier()
            self._on_rank_zero(commit)

    def _on_rank_zero(self, action: Callable[[], object]) -> None:
        """Run `action` on rank 0 while other ranks wait; raise its OSError as UserError on all."""
        failure: list[OSError | None] = [None]
        if self.rank == 0:
            try:
                action()
            except OSError as error:
                failure = [error]
        dist.broadcast_object_list(failure)
        if failure[0] is not None:
            raise UserError(f"could not save: {failure[0]}")
