"""Turn scored samples into training rows: normalise rewards by group, compute loss weights, split over ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slime.algorithms.estimators import normalize_group_rewards, overlong_penalty
from slime.config.arguments import Args
from slime.core.dp_schedule import loss_weights, make_schedule, trajectories_per_step
from slime.core.errors import UserError
from slime.core.types import Pixels, RolloutBatch, Sample, Status
from slime.data.images import content_hash, given_tokens, load_image_processor
from slime.rollout.base_types import ConvertSamples, RewardPostProcess
from slime.rollout.samples import fill_empty_response
from slime.utils.load_function import load_function

_PER_TOKEN = ("loss_mask", "rollout_log_probs", "teacher_log_probs")

# Keys that --custom-convert-samples-to-train-data-path must return.
_REQUIRED_KEYS = (
    "tokens",
    "response_lengths",
    "rewards",
    "raw_reward",
    "truncated",
    "sample_indices",
    "loss_masks",
)


def samples_to_batch(args: Args, samples: list[Sample]) -> RolloutBatch:
    """Return one global batch; rewards are normalised here, before the rows of a group go to different ranks."""
    if not any(s.response_length for s in samples):
        raise UserError("no sample of this rollout has a response token: nothing to train on")
    rows = [as_row(s) for s in samples]
    if args.custom_convert_samples_to_train_data_path:
        return _convert_by_hook(args, rows)
    raw, rewards = group_rewards(args, samples)
    return _batch(
        args,
        rows,
        tokens=[s.tokens for s in rows],
        response_lens=[s.response_length for s in rows],
        loss_masks=[_loss_mask(s) for s in rows],
        rewards=rewards,
        raw_rewards=raw,
        truncated=[s.status is Status.TRUNCATED for s in rows],
        rollout_log_probs=_column(rows, "rollout_log_probs"),
        teacher_log_probs=_column(rows, "teacher_log_probs"),
        metadata=[s.train_metadata for s in rows],
    )


def image_columns(args: Args, rows: list[Sample]) -> dict[str, Any]:
    """Return positions, images and pixels of a batch in which samples have images; each image once."""
    if not any(row.image_files for row in rows):
        return {}
    if not args.multimodal_keys:
        raise UserError('samples have images: add --multimodal-keys \'{"image": "images"}\'')
    processor = load_image_processor(args.hf_checkpoint)
    numbers: dict[str, int] = {}
    pixels: list[Pixels] = []
    columns: dict[str, Any] = {"positions": [], "images": [], "pixels": pixels}
    for row in rows:
        places = np.zeros((len(row.image_files), 3), np.int32)
        tokens = given_tokens(row)
        for place, file in zip(places, row.image_files, strict=True):
            number = numbers.setdefault(content_hash(file), len(pixels))
            if number == len(pixels):
                pixels.append(processor.pixels(file))
            place[[0, 2]] = number, processor.num_tokens(pixels[number].grid)
        grids = [pixels[number].grid for number in places[:, 0]]
        places[:, 1] = processor.places(tokens, grids)
        columns["positions"].append(processor.positions(tokens, grids))
        columns["images"].append(places)
    return columns


def as_row(sample: Sample) -> Sample:
    """Return the sample with at least one prompt token and one response token.

    An empty response gets a masked token, so that the sample's reward still counts in its group and its
    trajectory in the divisor of the loss. Without a prompt the first response token, which nothing
    predicts, becomes the prompt.
    """
    if 0 < sample.response_length < len(sample.tokens):
        return sample
    row = sample.clone()
    row.tokens, row.loss_mask = row.tokens or [0], list(_loss_mask(sample))
    if row.response_length:
        row.response_length -= 1
        for name in _PER_TOKEN:
            column = getattr(row, name)
            setattr(row, name, None if column is None else column[1:])
    if not row.response_length:
        row.teacher_log_probs = None
        fill_empty_response(row, row.tokens[-1])
    return row


def _routed_experts(
    args: Args, samples: list[Sample], rows: list[list[int]]
) -> list[np.ndarray] | None:
    """Return [tokens, layers, experts per token] of each row; -1 where the engine did not report any.

    A sample without a trained token (failed, or its prompt filled the context) needs no experts.
    """
    if not args.use_rollout_routing_replay:
        return None
    flag = "--use-rollout-routing-replay"
    reported = [sample.rollout_routed_experts for sample in samples]
    shape = next((experts.shape[1:] for experts in reported if experts is not None), (1, 1))
    columns = []
    for sample, experts, row in zip(samples, reported, rows, strict=True):
        if experts is None and any(_loss_mask(sample)):
            raise UserError(
                f"{flag}: sample {sample.index} has no routed experts of "
                "the engine; a generate function of your own must set sample.rollout_routed_experts"
            )
        column = np.full((len(row), *shape), -1, np.int16)
        if experts is not None:
            known = min(len(experts), len(row))
            if list(row[:known]) != list(sample.tokens[:known]):
                raise UserError(
                    f"{flag}: --custom-convert-samples-to-train-data-path returned other tokens for sample "
                    f"{sample.index} than it has; it may shorten or extend a row at its end only"
                )
            column[:known] = experts[:known]
        columns.append(column)
    return columns


def split_batch(
    args: Args, batch: RolloutBatch, *, dp_size: int, cp_size: int
) -> list[RolloutBatch]:
    """Return one batch per data-parallel rank, each with its schedule."""
    batch.loss_weights = loss_weights(
        batch.loss_masks,
        batch.trajectory_ids,
        global_batch_size=args.global_batch_size,
        per_token=args.calculate_per_token_loss,
    )
    batch.num_trajectories = trajectories_per_step(batch.trajectory_ids, args.global_batch_size)
    by_tokens = args.use_dynamic_batch_size
    parts = make_schedule(
        batch.total_lens,
        batch.trajectory_ids,
        dp_size=dp_size,
        cp_size=cp_size,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        max_tokens=args.max_tokens_per_gpu if by_tokens else None,
        log_probs_max_tokens=args.log_probs_max_tokens_per_gpu if by_tokens else None,
        balance=args.balance_data,
    )
    return [batch.select(rows, schedule) for rows, schedule in parts]


def group_rewards(args: Args, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return the raw rewards and those relative to their group, from which advantages are computed.

    GRPO divides (r - mean) of the group by its standard deviation; each estimator's formula is in
    `slime/algorithms/estimators.py`. FAILED samples are left out of their group and get 0.
    """
    path = args.custom_reward_post_process_path
    if path:
        flag = "--custom-reward-post-process-path"
        hook = load_function(path, flag=flag, protocol=RewardPostProcess)
        raw, rewards = (np.asarray(column, np.float32) for column in hook(args, samples))
        _check_finite(rewards, samples, f"{flag} {path}")
        return raw, rewards
    raw = np.array([s.get_reward_value(args.reward_key) for s in samples], np.float32)
    _check_finite(raw, samples, f"--rollout-function-path {args.rollout_function_path}")
    if args.overlong_buffer_len:
        raw = raw + overlong_penalty(
            np.array([s.response_length for s in samples]),
            max_response_len=args.rollout_max_response_len,
            buffer_len=args.overlong_buffer_len,
            factor=args.overlong_penalty_factor,
        )
    if args.disable_rewards_normalization or args.loss_type == "sft_loss":
        return raw, raw
    groups = np.array([s.group_index for s in samples])
    kept = np.array([s.status is not Status.FAILED for s in samples])
    rewards = np.zeros_like(raw)
    rewards[kept] = normalize_group_rewards(
        raw[kept],
        groups[kept],
        estimator=args.advantage_estimator,
        std=not args.disable_grpo_std_normalization,
    )
    return raw, rewards


def _check_finite(rewards: np.ndarray, samples: list[Sample], where: str) -> None:
    """Refuse rewards that would make the scores of their whole group NaN."""
    for reward, sample in zip(rewards.tolist(), samples, strict=True):
        if not math.isfinite(reward):
            raise UserError(f"{where} returned reward {reward} for sample {sample.index}")


def _convert_by_hook(args: Args, samples: list[Sample]) -> RolloutBatch:
    flag = "--custom-convert-samples-to-train-data-path"
    hook = load_function(
        args.custom_convert_samples_to_train_data_path, flag=flag, protocol=ConvertSamples
    )
    data = hook(args, samples)
    missing = [key for key in _REQUIRED_KEYS if key not in data]
    if missing:
        raise UserError(f"{flag}: the returned dictionary lacks {', '.join(missing)}")
    by_index = {s.index: s for s in samples}
    rows = [by_index[i] for i in data["sample_indices"]]
    return _batch(
        args,
        rows,
        tokens=data["tokens"],
        response_lens=data["response_lengths"],
        loss_masks=data["loss_masks"],
        rewards=data["rewards"],
        raw_rewards=data["raw_reward"],
        truncated=data["truncated"],
        rollout_log_probs=data.get("rollout_log_probs"),
        teacher_log_probs=data.get("teacher_log_probs"),
        metadata=data.get("metadata"),
    )


def _batch(args: Args, rows: list[Sample], **columns: Any) -> RolloutBatch:
    """Return the batch of these columns and of those that every row takes from its sample."""
    columns |= {
        "group_indices": [s.group_index for s in rows],
        "sample_indices": [s.index for s in rows],
        "trajectory_ids": [_trajectory_id(s) for s in rows],
        "routed_experts": _routed_experts(args, rows, columns["tokens"]),
        **image_columns(args, rows),
    }
    return RolloutBatch(**columns)


def _trajectory_id(sample: Sample) -> int:
    """Return the id that the samples of one trajectory share."""
    trajectory_id = sample.index if sample.rollout_id is None else sample.rollout_id
    assert trajectory_id is not None
    return trajectory_id


def _loss_mask(sample: Sample) -> list[int]:
    """Return 1 for every token to train on. Truncated responses are trained on; a hook drops them by `remove_sample`."""
    if sample.remove_sample:
        return [0] * sample.response_length
    return sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length


def _column(rows: list[Sample], name: str) -> list[list[float]] | None:
    """Return one list per row, or None if the samples have none; only rows without trained tokens may lack it."""
    columns: list[list[float] | None] = [getattr(row, name) for row in rows]
    trained = [columns[row] for row, sample in enumerate(rows) if any(_loss_mask(sample))]
    present = [column is not None for column in trained or columns]
    if trained and any(present) and not all(present):
        raise UserError(f"{sum(present)} of {len(present)} samples have {name}; all or none must")
    if not any(present):
        return None
    return [
        [0.0] * sample.response_length if column is None else column
        for column, sample in zip(columns, rows, strict=True)
    ]
