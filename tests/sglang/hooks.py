"""Hooks of the runs, loaded by import path."""

import time
from pathlib import Path


def slow_step(args, rollout_id, rollout_data) -> None:
    """Marks the folder while the engines are idle, and gives a test time to do something to them."""
    Path(args.run_dir, f"training_{rollout_id}").touch()
    time.sleep(3)
