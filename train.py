"""The synchronous loop: generate, train, send the new weights to the engines.

        ┌──────────── rollout.generate ◀───────────┐
        ▼                                          │
    batch per rank ──▶ actor.train ──▶ actor.update_weights (pushed, versioned, verified)
                           │
                           └──▶ save, eval, metrics

The same file runs on a laptop, on one GPU and on a cluster; `python train.py --help` lists the flags.
"""

import runpy
import sys
from pathlib import Path

from slime.cli.plan.command import dry_run, is_dry_run
from slime.config.arguments import Args, parse_args
from slime.diagnosis.exit_status import run_command


def train(args: Args, *, closing_words: bool = True) -> int:
    """Train to the end, or until a signal; return the exit status."""
    from slime.ray.run import Run

    with Run(args, closing_words=closing_words) as run:
        if run.complete:
            return 0
        rollout, actor = run.rollout, run.actor
        # Engines start from --hf-checkpoint; a resumed trainer does not.
        actor.update_weights(rollout)
        run.first_eval()
        for rollout_id in range(run.start_rollout_id, args.num_rollout):
            batch = rollout.generate(rollout_id)  # frees engine memory itself when colocated
            actor.train(rollout_id, batch)  # wakes up itself when colocated
            stopping = run.stopping  # read once: a signal from here on is for the next rollout
            run.save_if_due(rollout_id, stopping=stopping)
            if stopping:
                run.log(rollout_id)
                break
            actor.update_weights(rollout, rollout_id)  # pushes, verifies; sleeps when colocated
            if run.due(args.eval_interval, rollout_id):
                rollout.eval(rollout_id)
            run.log(rollout_id)
    return run.exit_status


def main(argv: list[str] | None = None, *, closing_words: bool = True) -> int:
    return run_command(lambda: _main(argv, closing_words))


def _main(argv: list[str] | None, closing_words: bool) -> int:
    if is_dry_run(argv):
        from slime.ray.start_checks import check_what_is_here

        return dry_run(argv, check_what_is_here)
    args = parse_args(argv)
    loop = train
    if args.train_async:
        loop = runpy.run_path(str(Path(__file__).with_name("train_async.py")))["train"]
    return loop(args, closing_words=closing_words)


if __name__ == "__main__":
    sys.exit(main())
