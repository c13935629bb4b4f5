"""A user's own loop: `python step_script.py MODEL RUN_DIR [FLAG=VALUE ...]`; prints what it saw as JSON."""

import json
import os
import signal
import sys
from pathlib import Path

import slime

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]


def digits(sample):
    return sum(c.isdigit() for c in sample.response) / 8


def leave(how: str) -> None:
    if how == "error":
        raise ValueError("of the user's loop")
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("Ctrl-C did not interrupt the loop's body")


def loop(run: slime.Run, last: int, how: str) -> dict:
    """Iterate, and leave the loop at rollout `last`; return what was seen."""
    seen, raised = [], None
    try:
        for batch in run:
            rewards = [float(r) for rank in batch.ranks for r in rank.raw_rewards]
            seen.append([batch.rollout_id, rewards, batch.metrics["rollout/reward_mean"]])
            if batch.rollout_id == last:
                if how == "break":
                    break
                leave(how)
    except (ValueError, KeyboardInterrupt) as error:
        raised = type(error).__name__
    assert "torch" not in sys.modules
    folders = [path.name for path in run.checkpoints]
    return {"seen": seen, "raised": raised, "checkpoints": folders, "status": run.exit_status}


if __name__ == "__main__":
    model, folder, *given = sys.argv[1:]
    options = dict(word.split("=") for word in given)
    run = slime.prepare(
        model, ROWS, digits, run_dir=folder, train_backend="fsdp", num_rollout=4, rollout_batch_size=4,
        n_samples_per_prompt=4, global_batch_size=16, rollout_max_response_len=8, lr=1e-3,
        use_dynamic_batch_size=True, max_tokens_per_gpu=128, actor_num_gpus_per_node=1,
        rollout_num_gpus=1, **options,
    )  # fmt: skip
    assert not (Path(folder) / "metrics.jsonl").exists() and run.metrics == []
    results = [loop(run, 2, "break"), loop(run, 2, "error")]
    results += [loop(slime.load_run(folder), 3, "ctrl-c"), loop(slime.load_run(folder), -1, "end")]
    print(json.dumps(results))
