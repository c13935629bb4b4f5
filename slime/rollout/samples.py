"""Copy samples, restart them, mark them as failed, fill empty responses."""

from __future__ import annotations

import traceback

from slime.core.types import Group, Sample, Status
from slime.rollout.engine_pool import EngineRefusedError

_TRACEBACK_LINES = 6


def clone_group(group: Group) -> Group:
    return [sample.clone() for sample in group]


def group_index(group: Group) -> int:
    return group[0].group_index or 0


def restart(sample: Sample) -> Sample:
    """Return the sample without its response, to be generated from the beginning."""
    fresh = sample.clone()
    fresh.tokens = sample.tokens[: len(sample.tokens) - sample.response_length]
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
    if isinstance(error, EngineRefusedError):  # the traceback would not help
        lines = [str(error)]
    sample.metadata["error_traceback"] = "\n".join(lines[-_TRACEBACK_LINES:])


def fill_empty_response(sample: Sample, token: int) -> None:
    """Append a masked token to a sample without a response (it failed, or the prompt filled the context).

    Of a failed sample's prompt, which may be too long, only one token goes to the trainer.
    """
    prompt = sample.tokens[:1] if sample.status == Status.FAILED else sample.tokens
    sample.tokens = prompt or [token]
    sample.append_response_tokens(tokens=[token], trainable=False)
