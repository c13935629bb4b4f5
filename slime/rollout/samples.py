"""Copy and restart samples, mark failed ones, and mask tokens that are too stale.

The staleness of a response token is the number of weight updates between generating it and training on
it. Every token carries the version of the weights that generated it; rollout `rollout_id` will be trained
on with weights of version `clock.trained_by(rollout_id)`. In the synchronous loop it is 0, except for
responses that `--partial-rollout` carried over.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import numpy as np

from slime.core.types import Group, Sample, Status
from slime.rollout.engine_pool import EngineRefusedError

if TYPE_CHECKING:
    from slime.config.arguments import Args
    from slime.rollout.context import WeightClock

_TRACEBACK_LINES = 6


def clone_group(group: Group) -> Group:
    return [sample.clone() for sample in group]


def group_index(group: Group) -> int:
    return group[0].group_index or 0


def restart(sample: Sample) -> Sample:
    """Return the sample without its response, to be generated from the beginning."""
    fresh = sample.clone()
    fresh.tokens = sample.tokens[: len(sample.tokens) - sample.response_length]
    later = (fresh.multimodal_inputs or {}).pop("response_images", 0)
    if later and fresh.multimodal_inputs is not None:
        del fresh.multimodal_inputs["images"][-later:]
    fresh.response, fresh.response_length, fresh.weight_versions = "", 0, []
    fresh.loss_mask = fresh.rollout_log_probs = fresh.teacher_log_probs = fresh.reward = None
    fresh.rollout_routed_experts = None
    fresh.status = Status.PENDING
    return fresh


def mark_failed(sample: Sample, stage: str, error: Exception) -> None:
    """Mark the sample FAILED: it stays in its group with reward 0 and no weight in the loss.

    `metadata["error"]` is the exception, `metadata["error_stage"]` is "generate", "reward" or
    "sample hook". Group statistics ignore FAILED samples.
    """
    sample.status = Status.FAILED
    sample.reward = 0.0
    sample.remove_sample = True
    sample.metadata["error"] = f"{type(error).__name__}: {error}"
    sample.metadata["error_stage"] = stage
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    if isinstance(error, EngineRefusedError):  # a traceback would not help
        lines = [str(error)]
    sample.metadata["error_traceback"] = "\n".join(lines[-_TRACEBACK_LINES:])


def fill_empty_response(sample: Sample, token: int) -> None:
    """Append a masked token to a sample without a response (it failed, or the prompt filled the context).

    A failed sample keeps one token of its prompt, which may be too long for the trainer, and no images.
    """
    if sample.status == Status.FAILED:
        sample.tokens, sample.multimodal_inputs = sample.tokens[:1], None
    sample.tokens = sample.tokens or [token]
    sample.append_response_tokens(tokens=[token], trainable=False)


def limit_staleness(
    args: Args, rollout_id: int, groups: list[Group], clock: WeightClock
) -> dict[str, float]:
    """Mask tokens that are too stale out of the loss; return staleness metrics, or {} if nothing is stale.

    `--max-weight-staleness n` allows tokens from up to n versions before the one that trains on them;
    `--mask-offpolicy-in-partial-rollout` allows only the newest version.
    """
    versions = [_versions(sample) for group in groups for sample in group]
    known = [row for row in versions if row is not None and len(row)]
    if not known:
        return {}
    tokens = np.concatenate(known)
    newest = clock.trained_by(rollout_id)
    newest = int(tokens.max()) if newest is None else max(newest, int(tokens.max()))
    if newest == int(tokens.min()):
        return {}
    metrics = {
        "rollout/staleness_mean": float(newest - tokens.mean()),
        "rollout/staleness_max": float(newest - tokens.min()),
    }
    oldest = None
    if args.mask_offpolicy_in_partial_rollout:
        oldest = int(tokens.max())
    elif args.max_weight_staleness is not None:
        oldest = newest - args.max_weight_staleness
    if oldest is not None:
        metrics["rollout/masked_stale_tokens"] = float(
            sum(_mask_before(sample, oldest) for group in groups for sample in group)
        )
    return metrics


def is_too_stale(args: Args, rollout_id: int, group: Group, clock: WeightClock) -> bool:
    """Return whether `--max-weight-staleness` masks every token of one of the group's responses."""
    newest = clock.trained_by(rollout_id)
    if newest is None or args.max_weight_staleness is None:
        return False
    oldest = newest - args.max_weight_staleness
    versions = [_versions(sample) for sample in group]
    return any(row is not None and len(row) and int(row.max()) < oldest for row in versions)


def _versions(sample: Sample) -> np.ndarray | None:
    """Return one version per response token; None if a hook did not record them or nothing is trained on.

    The placeholder token of a failed response was not generated by any version.
    """
    if len(sample.weight_versions) != sample.response_length:
        return None
    if sample.loss_mask is not None and not any(sample.loss_mask):
        return None
    return np.asarray(sample.weight_versions)


def _mask_before(sample: Sample, oldest: int) -> int:
    """Mask tokens of versions before `oldest`; return how many of them were in the loss."""
    versions = _versions(sample)
    if versions is None or not (versions < oldest).any():
        return 0
    mask = np.ones(len(versions), int) if sample.loss_mask is None else np.array(sample.loss_mask)
    masked = int(mask[versions < oldest].sum())
    mask[versions < oldest] = 0
    sample.loss_mask = mask.tolist()
    return masked
