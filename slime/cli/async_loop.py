"""The asynchronous loop: the next rollout is generated while this one is trained on.

    engines   ── rollout 0 ──┬── rollout 1 ──────┬── rollout 2 ──────┬──
                             │                   │                   │
    trainer                  └─ train 0 ─ update ┴─ train 1 ─ update ┴─

`slime train --train-async` and `python train_async.py` run it, with the calls and flags of loop.py; trainer and
engines need separate devices (no --colocate). One version of the weights generates a rollout, and the next one is
trained on it. With slime.rollout.fully_async_rollout.generate_rollout, which never stops, weights change while it
generates.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.cli import loop
from slime.config.arguments import Args
from slime.core.errors import ConfigError
from slime.core.types import RolloutResult

if TYPE_CHECKING:
    from slime.ray.run import Run


def rollouts(run: "Run") -> Iterator[RolloutResult]:
    """Train to the end, or until a signal; yield each rollout before it is trained on."""
    args, rollout, actor = run.args, run.rollout, run.actor
    actor.update_weights(rollout)
    run.first_eval()
    rollout.begin(run.start_rollout_id)
    for rollout_id in range(run.start_rollout_id, args.num_rollout):
        batch = rollout.finish()
        yield batch  # before the next one begins: a stop here drops only this one
        if rollout_id + 1 < args.num_rollout:
            rollout.begin(rollout_id + 1)
        actor.train(rollout_id, batch.batch_refs)
        stopping = run.stopping  # read once: a signal from here on is for the next rollout
        run.save_if_due(rollout_id, stopping=stopping)
        if stopping:
            run.log(rollout_id)
            break
        if not rollout.never_stops and rollout.updater.due(rollout_id):
            rollout.settle()
        actor.update_weights(rollout, rollout_id)
        if run.due(args.eval_interval, rollout_id):
            rollout.eval(rollout_id)
        run.log(rollout_id)


def train(args: Args, *, print_summary: bool = True) -> int:
    """Train to the end, or until a signal; return the exit status."""
    return loop.finish(steps(args, print_summary))


def steps(args: Args, print_summary: bool = True) -> loop.Steps:
    if args.colocate or args.offload_rollout:
        raise ConfigError(
            "train_async.py generates and trains at the same time, on separate devices: "
            "remove --colocate and --offload and give --rollout-num-gpus, or use train.py"
        )
    return loop.run_loop(rollouts, args, print_summary)


def main(argv: list[str] | None = None) -> int:
    return loop.main([*(sys.argv[1:] if argv is None else argv), "--train-async"])
