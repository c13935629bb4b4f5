"""The synchronous loop: generate, train, send the new weights to the engines.

        ┌──────────── rollout.generate ◀───────────┐
        ▼                                          │
    batch per rank ──▶ actor.train ──▶ actor.update_weights (pushed, versioned, verified)
                           │
                           └──▶ save, eval, metrics

It runs on a laptop, on one GPU and on a cluster. `slime train`, and `python train.py` in a checkout, call
`main`. `slime.train`, and `for batch in run` in Python, iterate over `steps`.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.plan.command import dry_run, is_dry_run
from slime.cli.watch import watching
from slime.config.arguments import Args, parse_args
from slime.core.types import RolloutResult
from slime.diagnosis.exit_status import Terminated, run_command

if TYPE_CHECKING:
    from slime.ray.run import Run

Steps = Generator[RolloutResult, None, int]  # returns the exit status


def rollouts(run: "Run") -> Iterator[RolloutResult]:
    """Train to the end, or until a signal; yield each rollout before it is trained on."""
    args, rollout, actor = run.args, run.rollout, run.actor
    # Engines start from --hf-checkpoint; a resumed trainer does not.
    actor.update_weights(rollout)
    run.first_eval()
    for rollout_id in range(run.start_rollout_id, args.num_rollout):
        batch = rollout.generate(rollout_id)  # releases engine memory when colocated
        yield batch
        actor.train(rollout_id, batch.batch_refs)  # reloads the trainer when colocated
        stopping = run.stopping  # read once: a signal from here on is for the next rollout
        run.save_if_due(rollout_id, stopping=stopping)
        if stopping:
            run.log(rollout_id)
            break
        actor.update_weights(rollout, rollout_id)  # pushes, verifies; offloads when colocated
        if run.due(args.eval_interval, rollout_id):
            rollout.eval(rollout_id)
        run.log(rollout_id)


def train(args: Args, *, print_summary: bool = True) -> int:
    """Train to the end, or until a signal; return the exit status."""
    return finish(run_loop(rollouts, args, print_summary))


def run_loop(
    loop: Callable[["Run"], Iterator[RolloutResult]], args: Args, print_summary: bool = True
) -> Steps:
    """Run a loop from start to end; if the caller stops iterating, save and stop, like Ctrl-C."""
    from slime.ray.run import Run

    with Run(args, print_summary=print_summary) as run:
        try:
            for batch in () if run.complete else loop(run):
                with run.stop_signal.interruptible():  # Ctrl-C may interrupt the caller's code
                    yield batch
        except GeneratorExit:
            raise Terminated from None
    return run.exit_status


def main(argv: list[str] | None = None, *, print_summary: bool = True) -> int:
    sys.path.insert(0, str(Path.cwd()))  # for hooks of the working directory, wherever train.py is
    return run_command(lambda: start(argv, print_summary))


def start(argv: list[str] | None, print_summary: bool = True) -> int:
    """Run `main`, but raise errors instead of printing them."""
    return finish(steps(argv, print_summary))


def steps(argv: list[str] | None, print_summary: bool = True) -> Steps:
    """Run the loop of this command line, synchronous or not, and yield its rollouts."""
    if is_dry_run(argv):
        from slime.ray.start_checks import check_for_dry_run

        return dry_run(argv, check_for_dry_run)
    args = parse_args(argv)
    with watching(args):
        return (yield from _loop_of(args)(args, print_summary))


def _loop_of(args: Args) -> Callable[[Args, bool], Steps]:
    if not args.train_async:
        return lambda args, print_summary: run_loop(rollouts, args, print_summary)
    from slime.cli import async_loop

    return async_loop.steps


def finish(steps: Steps) -> int:
    """Iterate to the end; return the exit status."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
