"""One run from start to end: its folder, its processes, its checkpoints and its summary."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from types import TracebackType

from ray.exceptions import RayTaskError

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.diagnosis.exit_status import StopSignal, Terminated, add_advice
from slime.diagnosis.ray_processes import RayProcess
from slime.diagnosis.run_monitor import HeadWatch, ProcessWatch, RunMonitor, died
from slime.ray import local_ray
from slime.ray.checkpointing import Checkpointer, HfExports
from slime.ray.cluster import connect, run_facts
from slime.ray.processes import Processes, make_plan
from slime.ray.rollout_group import RolloutGroup
from slime.ray.start_checks import check_inputs, check_outputs
from slime.ray.train_group import TrainGroup
from slime.ray.watch import BrokenRunError, first_line, ray_lost
from slime.runlog.logging import setup_logging
from slime.runlog.recorder import Recorder
from slime.runlog.report import write_report
from slime.runlog.run_folder import hold_folder, hold_run_folder, open_run_folder, resume_line
from slime.runlog.summary import closing_lines
from slime.runlog.tracking import cut_back, logged_rollouts

logger = logging.getLogger(__name__)


class Run:
    """Inside the context `rollout` and `actor` are up; leaving it saves, stops and reports."""

    def __init__(self, args: Args, *, print_summary: bool = True):
        check_inputs(args)
        self.args, self._print_summary = args, print_summary
        self._checkpoints = Checkpointer(args)
        self._exports = HfExports(args, self._checkpoints)
        self.start_rollout_id = self._checkpoints.start_rollout_id
        with ExitStack() as folders:  # a notebook may retry in this process
            self._open_folders(folders)
            self.complete = self._nothing_left()
            self.recorder = Recorder(args)
            # Closed last: the folders are released after the run has reported its end.
            self._last = folders.pop_all()
        for warning in (*args.warnings, *self._checkpoints.warnings):
            self.recorder.message(f"warning: {warning}")
        if self._resumed:
            self.recorder.message(self._resumed)
        self.stop_signal = StopSignal(self.recorder.message, _after_a_signal(args))
        self._resources = ExitStack()
        self._resources.callback(self.recorder.close)
        self._resources.callback(self.stop_signal.restore)
        self._processes: Processes | None = None
        self._started = False

    @property
    def rollout(self) -> RolloutGroup:
        assert self._processes is not None, "a complete run starts no processes"
        return self._processes.rollout

    @property
    def actor(self) -> TrainGroup:
        assert self._processes is not None, "a complete run starts no processes"
        return self._processes.actor

    def __enter__(self) -> Run:
        try:
            if not self.complete:
                with self.recorder.phase("start"):
                    self._processes = self._start()
                self._complete_export()
        except BaseException as error:
            lost = ray_lost()
            self._record_end(lost or error)
            self._add_advice(lost or error)
            with self._last:
                self._resources.close()
            if lost is not None:
                raise lost from None
            raise
        self._started = True
        self._last.callback(self._write_report)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        stopped = isinstance(error, Terminated)
        lost = ray_lost()
        with self._last, self._resources:
            self._record_end(lost or error)
            if lost is not None:
                self._save_without_ray(error)
                self._add_advice(lost)
                raise lost from None
            if stopped:
                self._save_interrupted()
            elif isinstance(error, Exception) and self._can_save_after(error):
                self._try_to_save()
            if (error is None or stopped) and not self.complete:
                self._checkpoints.finish(self.actor)
            self._add_advice(error)
        if (error is None or stopped) and self._print_summary:
            with suppress(OSError):  # the terminal may be closed
                print("\n".join(closing_lines(self.args.run_dir)), flush=True)
        return stopped

    def due(self, interval: int | None, rollout_id: int) -> bool:
        """Return whether this is an `interval`-th rollout, or the last one."""
        if not interval:
            return False
        return (rollout_id + 1) % interval == 0 or rollout_id + 1 == self.args.num_rollout

    def first_eval(self) -> None:
        """Evaluate before any training; after a resume only if the resumed run has not done so."""
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
        """Return whether nothing is left to train, evaluate or export, so that no process has to start."""
        done = self.start_rollout_id >= self.args.num_rollout
        exported = self._exports.missing() is None
        return done and exported and not self._lacks_eval(self.start_rollout_id - 1)

    def save_if_due(self, rollout_id: int, *, stopping: bool = False) -> None:
        """Save a checkpoint every `--save-interval` rollouts, after the last one and before stopping.

        `CheckpointFolder.prune` removes older ones (`--save-total-limit`). The HF model is exported
        with the last one, or with each one if every export has its own folder.
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

    def _open_folders(self, folders: ExitStack) -> None:
        args = self.args
        folders.callback(os.close, hold_run_folder(args.run_dir))
        loaded = self._checkpoints.loaded is not None
        self._resumed = resume_line(args, self.start_rollout_id) if loaded else ""
        open_run_folder(args, loaded=self._checkpoints.loaded)
        check_outputs(args)
        if args.save and not args.debug_rollout_only:
            folders.callback(os.close, hold_folder(args.save, "--save"))
        setup_logging(args.run_dir, role="driver")
        cut_back(args.run_dir, self.start_rollout_id)

    def _start(self) -> Processes:
        plan = make_plan(self.args)
        if connect(self.recorder.message):
            self._resources.callback(local_ray.stop)
        facts = run_facts(self.args)
        self._last.callback(_dismiss, RunMonitor(facts))
        self.stop_signal.install()
        if facts.own_ray:
            watch = ProcessWatch(facts.own_ray, self._on_ray_death)
        else:
            watch = HeadWatch(facts.head)
        self._resources.callback(watch.stop)
        processes = Processes(self.args, plan, self._checkpoints, self.recorder, self.stop_signal)
        self._resources.callback(processes.stop)
        return processes

    def _save_interrupted(self) -> None:
        """Save the state after the last training step, while the next rollout is running."""
        last = self.actor.last_trained
        if last is not None:
            with self.recorder.phase("save"):
                self.rollout.stop_engines()
                self.actor.wake_up()
                self._save(last)
            self._export_hf(last)

    def _can_save_after(self, error: Exception) -> bool:
        """Return whether the trainer is intact and holds exactly the state after the last training step."""
        if isinstance(error, BrokenRunError) or self.actor.last_trained is None:
            return False
        phase = self.recorder.failed_phase
        rank_failed = isinstance(error, RayTaskError)
        return phase in ("generate", "eval") or (phase == "update_weights" and not rank_failed)

    def _try_to_save(self) -> None:
        """Save after an error, which is reported in any case."""
        try:
            self._save_interrupted()
            self._checkpoints.finish(self.actor)
        except Exception as failure:
            self.recorder.message(
                f"warning: the last rollout could not be saved: {first_line(failure)}"
            )

    def _save(self, rollout_id: int) -> None:
        """Write a checkpoint, which makes an earlier export of the same rollout stale."""
        self._exports.mark_outdated(rollout_id)
        self._checkpoints.save(rollout_id, self.actor, self.rollout)

    def _complete_export(self) -> None:
        """Export the checkpoint this run resumes, if the earlier run died before its export.

        The last rollout has an export, and each one if every export has its own folder.
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
        """Stop the run, from a thread. Actors survive the GCS for a minute and can save, but not the raylet."""
        can_save = process.name == "gcs_server" and self._started
        self.stop_signal.fail(died(process), at_once=not can_save)

    def _save_without_ray(self, error: BaseException | None) -> None:
        """Save if the actors, which survive the GCS for a while, still can."""
        if isinstance(error, Terminated):
            self._try_to_save()
        elif error is None:  # the loop has saved; a background write may be running
            with suppress(Exception):
                self._checkpoints.finish(self.actor)

    def _add_advice(self, error: BaseException | None) -> None:
        if isinstance(error, BrokenRunError):
            error.args = (f"{error}\n{self._checkpoints.how_to_continue()}",)
        elif isinstance(error, Exception) and self._needs_advice(error):
            add_advice(error, self._checkpoints.how_to_continue())

    def _needs_advice(self, error: Exception) -> bool:
        """Return whether to add how to resume: a refused start has nothing to resume, a failed save says it."""
        if isinstance(error, UserError):
            return self.recorder.failed_phase not in ("start", "save")
        return not isinstance(error, Terminated)

    def _record_end(self, error: BaseException | None) -> None:
        if error is None or isinstance(error, Terminated):
            self.recorder.end("stopped" if error or self.stopping else "complete")
        else:
            self.recorder.end("failed", first_line(error))

    def _write_report(self) -> None:
        try:
            write_report(self.args.run_dir)
        except OSError as error:  # a full disk must not hide how the run itself ended
            logger.warning("no report.html: %s", error)


def _dismiss(monitor: RunMonitor) -> None:
    """Dismiss the monitor once the run has reported its end; with a dead Ray, when the process exits."""
    if local_ray.dead_process() is None:
        monitor.dismiss()
    else:
        local_ray.leave_at_exit(monitor.dismiss)


def _after_a_signal(args: Args) -> str:
    if args.debug_rollout_only or not (args.save or args.save_hf):
        return "stopping; nothing is saved" + ("" if args.debug_rollout_only else " without --save")
    return "saving, then stopping" if args.save else "writing --save-hf, then stopping"
