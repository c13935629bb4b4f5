"""One run from start to end: its folder, its processes, its checkpoints and its closing words."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ray.exceptions import RayError, RayTaskError

from slime.config.arguments import Args
from slime.config.env import read_env, set_env
from slime.core.errors import UserError
from slime.diagnosis.exit_status import add_advice
from slime.diagnosis.head_watch import HeadWatch, ProcessWatch
from slime.diagnosis.ray_processes import RayProcess
from slime.diagnosis.run_monitor import RunMonitor, died
from slime.diagnosis.stop_signal import StopSignal, Terminated
from slime.ray import local_ray
from slime.ray.checkpointing import Checkpointer, HfExports
from slime.ray.cluster import actor_env, connect, run_facts
from slime.ray.log_collection import collect_logs
from slime.ray.placement_group import Placement, needs_critic, plan_layout
from slime.ray.recorder import Recorder
from slime.ray.rollout_group import RolloutGroup
from slime.ray.start_checks import check_inputs, check_outputs
from slime.ray.train_group import TrainGroup
from slime.ray.watch import BrokenRunError, LostError
from slime.rollout.base_types import RolloutFunction
from slime.runlog.logging import setup_logging
from slime.runlog.report.page import write_report
from slime.runlog.run_folder import hold_folder, hold_run_folder, open_run_folder
from slime.runlog.summary import closing_lines
from slime.runlog.tracking import cut_back, logged_rollouts
from slime.utils.load_function import load_function

logger = logging.getLogger(__name__)


class Run:
    """Inside the context `rollout` and `actor` are up; leaving it saves, stops and reports."""

    rollout: RolloutGroup
    actor: TrainGroup

    def __init__(self, args: Args, *, closing_words: bool = True):
        check_inputs(args)
        self.args, self._closing_words = args, closing_words
        self._checkpoints = Checkpointer(args)
        self._exports = HfExports(args, self._checkpoints)
        self.start_rollout_id = self._checkpoints.start_rollout_id
        self._holds = [hold_run_folder(args.run_dir)]
        try:
            self._open_folders()
            self.complete = self._nothing_left()
            self.recorder = Recorder(args)
        except BaseException:  # a notebook may try again in this process
            self._let_go()
            raise
        for warning in (*args.warnings, *self._checkpoints.warnings):
            self.recorder.message(f"warning: {warning}")
        self.stop_signal = StopSignal(self.recorder.message, _after_a_signal(args))
        self._owns_ray = False
        self._started = False

    def __enter__(self) -> Run:
        try:
            if not self.complete:
                with self.recorder.phase("start"):
                    self._start()
                self._complete_export()
        except BaseException as error:
            lost = self._ray_lost()
            self._add_advice(lost or error)
            self._stop()
            self._let_go()
            if lost is not None:
                raise lost from None
            raise
        self._started = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        stopped = isinstance(error, Terminated)
        lost = self._ray_lost()
        if lost is not None:
            self._end_without_ray(lost, error)
        try:
            if stopped:
                self._save_interrupted()
            elif isinstance(error, Exception) and self._can_save_after(error):
                self._try_to_save()
            if (error is None or stopped) and not self.complete:
                self._checkpoints.finish(self.actor)
            self._add_advice(error)
        finally:
            self._stop()
            self._write_report()
            self._let_go()
        if (error is None or stopped) and self._closing_words:
            with suppress(OSError):  # of a terminal that was closed
                print("\n".join(closing_lines(self.args.run_dir)), flush=True)
        return stopped

    def due(self, interval: int | None, rollout_id: int) -> bool:
        """Every `interval` rollouts, and after the last one."""
        if not interval:
            return False
        return (rollout_id + 1) % interval == 0 or rollout_id + 1 == self.args.num_rollout

    def update_due(self, rollout_id: int) -> bool:
        """Whether the engines get new weights after this rollout."""
        return (rollout_id + 1) % self.args.update_weights_interval == 0

    def first_eval(self) -> None:
        """Evaluate before any training; after a resume only where the old run died before doing so."""
        before = self.start_rollout_id - 1
        if self._lacks_eval(before):
            self.rollout.eval(before)
        self.recorder.log(before, starting=True)

    def _lacks_eval(self, rollout_id: int) -> bool:
        args = self.args
        if not args.eval_interval or rollout_id in logged_rollouts(args.run_dir, "eval"):
            return False
        if rollout_id < 0:
            return not args.skip_eval_before_train
        return self.due(args.eval_interval, rollout_id)

    def _nothing_left(self) -> bool:
        """Whether nothing is left to train, to evaluate or to export, so that no process has to start."""
        done = self.start_rollout_id >= self.args.num_rollout
        exported = self._exports.missing() is None
        return done and exported and not self._lacks_eval(self.start_rollout_id - 1)

    def save_if_due(self, rollout_id: int, *, stopping: bool = False) -> None:
        """A checkpoint every `--save-interval` rollouts and after the last one.

        The HF export comes with the last, and with each where it has a folder of its own.
        """
        last = rollout_id + 1 == self.args.num_rollout or stopping
        due = last or self.due(self.args.save_interval, rollout_id)
        if due:
            with self.recorder.phase("save"):
                self._save(rollout_id)
        if last or (due and self._exports.each):
            self._export_hf(rollout_id)

    def log(self, rollout_id: int) -> None:
        self.recorder.log(rollout_id)

    @property
    def stopping(self) -> bool:
        return self.stop_signal.received is not None

    @property
    def exit_status(self) -> int:
        return 128 + self.stop_signal.received if self.stop_signal.received else 0

    # ---- parts

    def _open_folders(self) -> None:
        args = self.args
        open_run_folder(args, loaded=self._checkpoints.loaded)
        check_outputs(args)
        if args.save and not args.debug_rollout_only:
            self._holds.append(hold_folder(args.save, "--save"))
        setup_logging(args.run_dir, role="driver")
        cut_back(args.run_dir, self.start_rollout_id)

    def _start(self) -> None:
        args = self.args
        generate = load_function(
            args.rollout_function_path, flag="--rollout-function-path", protocol=RolloutFunction
        )
        evaluate = load_function(
            args.eval_function_path, flag="--eval-function-path", protocol=RolloutFunction
        )
        users = [generate, *([evaluate] if args.eval_interval else [])]
        needed = any(getattr(function, "needs_engines", True) for function in users)
        engines = needed and not args.debug_train_only
        layout = plan_layout(
            args,
            with_trainer=not args.debug_rollout_only,
            with_engines=engines and not args.rollout_external,
            with_critic=needs_critic(args),
        )
        self._owns_ray = connect(self.recorder.message)
        facts = run_facts(args)
        self._monitor = RunMonitor(facts)
        self.stop_signal.install()
        if facts.own_ray:
            self._ray_watch = ProcessWatch(facts.own_ray, self._on_ray_death)
        else:
            self._ray_watch = HeadWatch(facts.head)
        self._placement = placement = Placement(layout)
        token = secrets.token_hex(16)
        if args.rollout_external:  # their owner's
            token = read_env().engine_token or ""
        several = placement.several_nodes
        # The router runs in this process's care.
        set_env(SLIME_SEVERAL_NODES="1" if several else "0")
        engine_env = actor_env(len(layout.engines), token=token, several_nodes=several)
        train_env = actor_env(len(layout.trainer), token=token, several_nodes=several)
        self.rollout = RolloutGroup(
            args,
            engine_options=[
                [
                    {
                        **placement.options(bundle, role="engine"),
                        "runtime_env": {"env_vars": engine_env},
                    }
                    for bundle in bundles
                ]
                for bundles in layout.engines
            ],
            env=engine_env,
            token=token,
            recorder=self.recorder,
            stop_signal=self.stop_signal,
        )
        self.actor = TrainGroup(
            args, placement, env={**train_env, **args.train_env_vars}, recorder=self.recorder
        )
        self.rollout.push_weights = self.actor.push_weights
        self.rollout.never_stops = getattr(generate, "never_stops", False)
        loaded = self._checkpoints.loaded
        critic = self._checkpoints.critic_loaded
        self.actor.start(str(loaded) if loaded else None, str(critic) if critic else None)
        if loaded:
            self.rollout.load(str(loaded), self.start_rollout_id - 1)
        self.rollout.wait()
        self.actor.wait()
        self.actor.weight_version = self._checkpoints.weight_version
        self.rollout.set_parallel(*self.actor.parallel())

    def _save_interrupted(self) -> None:
        """The state after the last training step, taken while the next rollout was under way."""
        last = self.actor.last_trained
        if last is not None:
            with self.recorder.phase("save"):
                self.rollout.stop_engines()
                self.actor.wake_up()
                self._save(last)
            self._export_hf(last)

    def _can_save_after(self, error: Exception) -> bool:
        """Whether the trainer still holds exactly the state after the last training step, and answers."""
        if isinstance(error, BrokenRunError) or self.actor.last_trained is None:
            return False
        phase = self.recorder.failed_phase
        rank_failed = isinstance(error, RayTaskError)
        return phase in ("generate", "eval") or (phase == "update_weights" and not rank_failed)

    def _try_to_save(self) -> None:
        """After an error that is told in any case."""
        try:
            self._save_interrupted()
            self._checkpoints.finish(self.actor)
        except Exception as failure:
            reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            self.recorder.message(f"warning: the last rollout could not be saved: {reason}")

    def _save(self, rollout_id: int) -> None:
        """Write a checkpoint; an export of an earlier training on the same rollout no longer counts."""
        self._exports.mark_outdated(rollout_id)
        self._checkpoints.save(rollout_id, self.actor, self.rollout)

    def _complete_export(self) -> None:
        """Export the checkpoint this run continues, where an earlier start did not live to do it.

        That is due for the last rollout, and for each where exports have folders of their own.
        """
        missing = self._exports.missing()
        if missing is not None:
            path = self._exports.path(missing)
            self.recorder.message(
                f"writing --save-hf {path}: it does not hold rollout {missing} yet"
            )
            self._export_hf(missing)

    def _export_hf(self, rollout_id: int) -> None:
        if self.args.save_hf:
            with self.recorder.phase("save"):
                self._exports.write(rollout_id, self.actor)

    def _on_ray_death(self, process: RayProcess) -> None:
        """Called from a thread. Actors survive the GCS for a minute and can save; not so the raylet."""
        can_save = process.name == "gcs_server" and self._started
        self.stop_signal.fail(died(process), at_once=not can_save)

    def _ray_lost(self) -> LostError | None:
        """The error to raise when a process of the run's own Ray has died."""
        process = local_ray.dead_process()
        return LostError(f"{died(process)}: Ray cannot go on without it.") if process else None

    def _end_without_ray(self, lost: LostError, error: BaseException | None) -> None:
        """Save if the actors still can, report, and say what died."""
        try:
            if isinstance(error, Terminated):
                self._try_to_save()
            elif error is None:  # the loop has saved; a write may be under way
                with suppress(Exception):
                    self._checkpoints.finish(self.actor)
        finally:
            self._add_advice(lost)
            self._stop()
            self._write_report()
            self._let_go()
        raise lost from None

    def _add_advice(self, error: BaseException | None) -> None:
        if isinstance(error, BrokenRunError):
            error.args = (f"{error}\n{self._checkpoints.how_to_continue()}",)
        elif isinstance(error, Exception) and self._needs_advice(error):
            add_advice(error, self._checkpoints.how_to_continue())

    def _needs_advice(self, error: Exception) -> bool:
        """A start that is refused has left nothing to continue, and a failed save says what to do."""
        if isinstance(error, UserError):
            return self.recorder.failed_phase not in ("start", "save")
        return not isinstance(error, Terminated)

    def _write_report(self) -> None:
        try:
            write_report(self.args.run_dir)
        except OSError as error:  # a full disk must not hide how the run itself ended
            logger.warning("no report.html: %s", error)

    def _stop(self) -> None:
        try:
            if local_ray.dead_process() is None:
                self._stop_actors()
            if "_ray_watch" in self.__dict__:
                self._ray_watch.stop()
            if self._owns_ray:
                local_ray.stop()
        finally:  # a second Ctrl-C may come inside: the run still ends in its own words
            self.stop_signal.restore()
            self.recorder.close()
            self._dismiss_monitor()

    def _stop_actors(self) -> None:
        for part in ("rollout", "actor", "_placement"):  # what had come up before an error
            if part in self.__dict__:
                self.__dict__[part].stop()
        self._collect_logs()

    def _dismiss_monitor(self) -> None:
        """Once the run has said how it ended; Ray may end this process before it can."""
        if "_monitor" not in self.__dict__:
            return
        if local_ray.dead_process() is None:
            self._monitor.dismiss()
        else:
            local_ray.leave_at_exit(self._monitor.dismiss)

    def _let_go(self) -> None:
        for handle in self._holds:
            os.close(handle)

    def _collect_logs(self) -> None:
        if "_placement" in self.__dict__ and self._placement.several_nodes:
            folder = Path(self.args.run_dir) / "logs"
            with suppress(RayError):  # the cluster itself may be what broke
                collect_logs(folder, folder)


def _after_a_signal(args: Args) -> str:
    if args.debug_rollout_only or not (args.save or args.save_hf):
        return "stopping; nothing is saved" + ("" if args.debug_rollout_only else " without --save")
    return "saving, then stopping" if args.save else "writing --save-hf, then stopping"
