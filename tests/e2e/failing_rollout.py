"""A rollout function that raises once, as the code of a user or an engine's connection can."""

from pathlib import Path

from slime.rollout.sglang_rollout import generate_rollout as generate_normally

FAILING = 2


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    told = Path(args.run_dir) / "logs" / "failed_once"
    if rollout_id == FAILING and not told.exists():
        told.touch()
        raise ConnectionResetError("POST http://u:S3CRET@127.0.0.1:1/flush_cache: reset by peer")
    return generate_normally(args, rollout_id, data_source, evaluation)
