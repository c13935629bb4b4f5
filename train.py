"""The synchronous loop: generate, train, give the new weights back.

        ┌──────────── rollout.generate ◀───────────┐
        ▼                                          │
    batch per rank ──▶ actor.train ──▶ actor.update_weights (pushed, versioned, verified)
                           │
                           └──▶ save, eval, metrics

The same file runs on a laptop, on one GPU and on a cluster; `python train.py --help` lists the flags.
"""

import sys

from slime.planner.dry_run import dry_run, is_dry_run
from slime.utils.arguments import Args, parse_args
from slime.utils.errors import UserError


def train(args: Args, *, closing_words: bool = True) -> int:
    """Run to the end, or to a signal; the process's exit status."""
    from slime.ray.run import Run

    with Run(args, closing_words=closing_words) as run:
        rollout, actor = run.rollout, run.actor
        # Engines start from --hf-checkpoint; a resumed trainer does not.
        actor.update_weights(rollout)
        run.first_eval()
        for rollout_id in range(run.start_rollout_id, args.num_rollout):
            batch = rollout.generate(rollout_id)  # frees engine memory itself when colocated
            actor.train(rollout_id, batch)  # wakes up itself when colocated
            run.save_if_due(rollout_id)
            if run.stopping:
                run.log(rollout_id)
                break
            actor.update_weights(rollout, rollout_id)  # pushes, verifies; sleeps when colocated
            if run.due(args.eval_interval, rollout_id):
                rollout.eval(rollout_id)
            run.log(rollout_id)
    return run.exit_status


def main(argv: list[str] | None = None, *, closing_words: bool = True) -> int:
    try:
        if is_dry_run(argv):
            return dry_run(argv)
        return train(parse_args(argv), closing_words=closing_words)
    except UserError as error:
        # One raised in an actor arrives inside Ray's wrapper, whose text is a traceback.
        print(f"slime: {getattr(error, 'cause', error)}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("slime: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
