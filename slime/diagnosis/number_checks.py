"""Checks of --ci-test: end a run with numbers that a correct run cannot have.

engine against trainer   the mean absolute difference of their log-probs of the same tokens
KL to the reference      0 in the first step of a run, when the actor has the reference's weights
norm of the gradient     equal to that of another run, with another layout, on the same rollouts
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.runlog.metric_names import GRAD_NORM, KL

if TYPE_CHECKING:
    from slime.config.arguments import Args

_GAP = "train/log_prob_gap_mean"
_KL_OF_EQUAL_WEIGHTS = 1e-3  # two passes that pack samples differently round differently
_SAME_NORM = 0.05


def check_numbers(args: Args, rollout_id: int, metrics: Mapping[str, float]) -> None:
    """Raise UserError if a number of this rollout fails a check; a missing metric passes."""
    gap, limit = metrics.get(_GAP, 0.0), args.ci_train_rollout_logprob_abs_diff_threshold
    if not gap <= limit:
        raise _failed(
            rollout_id,
            f"{_GAP} is {gap:g}, above {limit:g}: engine and trainer compute different models",
        )
    first = rollout_id == 0 and args.num_steps_per_rollout == 1
    kl = abs(metrics.get(KL, 0.0))
    if first and not args.ci_disable_kl_checker and not kl <= _KL_OF_EQUAL_WEIGHTS:
        raise _failed(
            rollout_id,
            f"{KL} is {kl:g} before the first step, where actor and reference are the same",
        )
    if args.ci_save_grad_norm is not None:
        _save(Path(args.ci_save_grad_norm), rollout_id, metrics[GRAD_NORM])
    if args.ci_load_grad_norm is not None:
        _compare(Path(args.ci_load_grad_norm), rollout_id, metrics[GRAD_NORM])


def _save(path: Path, rollout_id: int, norm: float) -> None:
    norms = _read(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**norms, str(rollout_id): norm}) + "\n")


def _compare(path: Path, rollout_id: int, norm: float) -> None:
    expected = _read(path).get(str(rollout_id))
    if expected is not None and not math.isclose(norm, expected, rel_tol=_SAME_NORM):
        raise _failed(rollout_id, f"{GRAD_NORM} is {norm:g}, and {expected:g} in {path}")


def _read(path: Path) -> dict[str, float]:
    try:
        return {str(key): float(value) for key, value in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no norms written by --ci-save-grad-norm: {error}") from None


def _failed(rollout_id: int, what: str) -> UserError:
    return UserError(f"--ci-test, rollout {rollout_id}: {what}")
