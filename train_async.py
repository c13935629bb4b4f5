"""The asynchronous loop: the next rollout is generated while this one is trained on.

    engines   ── rollout 0 ──┬── rollout 1 ──────┬── rollout 2 ──────┬──
                             │                   │                   │
    trainer                  └─ train 0 ─ update ┴─ train 1 ─ update ┴─

`slime train --train-async` is the same. The verbs and flags of train.py, on processors of their own (no --colocate). A rollout is made by
one version of the weights and trained on by the next. With a rollout function that never stops
(slime.rollout.fully_async_rollout.generate_rollout) weights change while it generates.
"""

import sys

from slime.cli.plan.dry_run import dry_run, is_dry_run
from slime.config.arguments import Args, parse_args
from slime.core.errors import ConfigError
from slime.diagnosis.exit_status import run_command


def train(args: Args, *, closing_words: bool = True) -> int:
    """Run to the end, or to a signal; the process's exit status."""
    from slime.ray.run import Run

    if args.colocate or args.offload_rollout:
        raise ConfigError(
            "train_async.py generates and trains at the same time, on processors of their own: "
            "remove --colocate and --offload and give --rollout-num-gpus, or use train.py"
        )
    with Run(args, closing_words=closing_words) as run:
        if run.complete:
            return 0
        rollout, actor = run.rollout, run.actor
        actor.update_weights(rollout)
        run.first_eval()
        rollout.begin(run.start_rollout_id)
        for rollout_id in range(run.start_rollout_id, args.num_rollout):
            batch = rollout.finish()
            if rollout_id + 1 < args.num_rollout:
                rollout.begin(rollout_id + 1)
            actor.train(rollout_id, batch)
            stopping = run.stopping  # read once: a signal from here on is for the next rollout
            run.save_if_due(rollout_id, stopping=stopping)
            if stopping:
                run.log(rollout_id)
                break
            if not rollout.never_stops and run.update_due(rollout_id):
                rollout.settle()
            actor.update_weights(rollout, rollout_id)
            if run.due(args.eval_interval, rollout_id):
                rollout.eval(rollout_id)
            run.log(rollout_id)
    return run.exit_status


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _main([*words, "--train-async"]))


def _main(argv: list[str]) -> int:
    if is_dry_run(argv):
        from slime.ray.start_checks import check_what_is_here

        return dry_run(argv, check_what_is_here)
    return train(parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
