"""A hook that loses an engine after its last answer to a rollout, before its memory is released."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e import runs

HELD = 1
KILL = "tests.e2e.engine_faults.kill"  # --custom-rollout-log-function-path
FREEZE = "tests.e2e.engine_faults.freeze"


def kill(rollout_id: int, args: Any, samples: Any, metrics: Any, seconds: float) -> None:
    _send(signal.SIGKILL, rollout_id, args)


def freeze(rollout_id: int, args: Any, samples: Any, metrics: Any, seconds: float) -> None:
    _send(signal.SIGSTOP, rollout_id, args)


def _send(number: signal.Signals, rollout_id: int, args: Any) -> None:
    if rollout_id == HELD:
        os.kill(runs.engine_facts(Path(args.run_dir), 0)["pid"], number)
