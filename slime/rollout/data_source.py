"""Data sources: groups of samples from the prompt data, and from a buffer of returned groups.

Until it is trained on, every group that was handed out is in one of three states: in flight, finished (part
of a rollout's result, kept until a later checkpoint covers it), or in the buffer. `state_dict(rollout_id)`
contains everything that training on the rollouts up to `rollout_id` has not consumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from slime.config.datasets import dataset_names
from slime.config.flags.rollout import OPD_REWARD
from slime.config.reward_types import needs_label
from slime.core.errors import ConfigError, UserError
from slime.core.types import Group
from slime.data.prompt_data import DataFormat, PromptDataset, load_prompts
from slime.data.stored_samples import decode_groups, encode_groups
from slime.data.tokenizer import load_tokenizer
from slime.rollout.base_types import BufferFilter, DataSource
from slime.rollout.filter_hub.buffer_filters import pop_first
from slime.rollout.hooks import check_stored_functions
from slime.rollout.samples import clone_group
from slime.utils.load_function import load_function

if TYPE_CHECKING:
    from slime.config.arguments import Args

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "TracksRollouts"]

logger = logging.getLogger(__name__)

_KEPT_ROLLOUTS = 8  # finished rollouts kept for a checkpoint that lags behind generation


@runtime_checkable
class TracksRollouts(Protocol):
    """Optional methods of a data source that tracks its groups through a rollout."""

    def begin(self, rollout_id: int) -> None: ...
    def finish(self, rollout_id: int, group_indices: Iterable[int]) -> None: ...


class RolloutDataSource:
    """Yields prompts epoch by epoch; `group_index` and `index` count up over the whole run."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.datasets = _load_datasets(args)
        self._names = dataset_names(args.prompt_data or [])
        self.epoch = 0
        self.position = 0  # groups of this epoch handed out so far
        self.next_group_index = 0
        self.next_sample_index = 0
        self.buffer: list[Group] = []  # handed out before new groups
        self._buffer_filter: Callable[..., list[Group]] = pop_first
        self._order = self._epoch_order()
        if not len(self._order) and args.num_rollout:
            raise ConfigError(
                f"--prompt-data {' '.join(args.prompt_data or [])}: the weights leave no row"
            )
        self._rollout_id: int | None = None
        self._in_flight: dict[int, Group] = {}
        self._finished: dict[int, list[Group]] = {}

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        return len(self._order)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return the next `num_samples` groups of `n_samples_per_prompt` samples each."""
        groups = self._take_buffered(num_samples)
        groups += [self._new_group() for _ in range(num_samples - len(groups))]
        if self._rollout_id is not None:
            self._in_flight |= {_group_index(group): clone_group(group) for group in groups}
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        if samples:
            raise UserError(
                "the rollout returned groups, but --data-source-path RolloutDataSource has no buffer "
                "for them; use slime.rollout.data_source.RolloutDataSourceWithBuffer"
            )

    def begin(self, rollout_id: int) -> None:
        """Track groups from now on until `finish`; without this they count as used when handed out."""
        self._rollout_id = rollout_id

    def finish(self, rollout_id: int, group_indices: Iterable[int]) -> None:
        """Mark groups as kept or rejected by `rollout_id`."""
        done = [self._in_flight.pop(index, None) for index in group_indices]
        self._finished[rollout_id] = [group for group in done if group is not None]
        for old in [r for r in self._finished if r <= rollout_id - _KEPT_ROLLOUTS]:
            del self._finished[old]

    def state_dict(self, rollout_id: int | None = None) -> dict[str, Any]:
        """Return the state as JSON data; `rollout_id` is the last rollout trained on (None: all finished)."""
        untrained = [
            group
            for finished_id, groups in self._finished.items()
            if rollout_id is not None and finished_id > rollout_id
            for group in groups
        ]
        in_flight = sorted([*untrained, *self._in_flight.values()], key=_group_index)
        return {
            "epoch": self.epoch,
            "position": self.position,
            "next_group_index": self.next_group_index,
            "next_sample_index": self.next_sample_index,
            "dataset_lens": [len(dataset) for dataset in self.datasets],
            "dataset_digests": self._digests,
            "in_flight": encode_groups(in_flight),
            "buffer": encode_groups(self.buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        lens = [len(dataset) for dataset in self.datasets]
        if state["dataset_lens"] != lens:
            logger.warning(
                "the prompt data has %s rows, the checkpoint was written with %s: "
                "the run continues at the same place in the new data", lens, state["dataset_lens"],
            )  # fmt: skip
        elif state.get("dataset_digests", self._digests) != self._digests:  # older ones have none
            logger.warning(
                "the prompt data has as many rows as when the checkpoint was written, but other prompts "
                "or labels: the run continues at the same place in the new data"
            )
        self.epoch = state["epoch"]
        self.next_group_index = state["next_group_index"]
        self.next_sample_index = state["next_sample_index"]
        self._order = self._epoch_order()
        self.position = min(state["position"], len(self._order))
        self._in_flight.clear()
        self._finished.clear()
        stored = decode_groups(state["in_flight"]) + decode_groups(state["buffer"])
        check_stored_functions(self.args, stored)
        self.buffer = stored

    @cached_property
    def _digests(self) -> list[str]:
        """Return a digest of the prompts and labels of each dataset."""
        return [_digest(dataset) for dataset in self.datasets]

    def save(self, rollout_id: int) -> None:
        """Write the state under `--save`; the RolloutManager writes `state_dict` into its checkpoints instead."""
        if self.args.save is None:
            return
        path = _state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.state_dict(rollout_id)))
        temporary.replace(path)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue from the state that `save` wrote; the RolloutManager restores `state_dict` instead."""
        if self.args.load is None or rollout_id is None or rollout_id < 0:
            return
        path = _state_path(self.args.load, rollout_id)
        if not path.exists():
            logger.warning("%s does not exist: the data starts from the beginning", path)
            return
        self.load_state_dict(json.loads(path.read_text()))

    def _take_buffered(self, num_samples: int) -> list[Group]:
        if not self.buffer:
            return []
        groups = self._buffer_filter(self.args, self._rollout_id, self.buffer, num_samples)
        if len(groups) > num_samples:
            raise UserError(
                f"--buffer-filter-path {self.args.buffer_filter_path} returned {len(groups)} groups, "
                f"but at most {num_samples} were requested"
            )
        return list(groups)

    def _new_group(self) -> Group:
        if self.position >= len(self._order):
            self.epoch += 1
            self.position = 0
            self._order = self._epoch_order()
        dataset, row = self._order[self.position]
        self.position += 1
        rows = [row] * self.args.n_samples_per_prompt
        group = [self.datasets[dataset].make_sample(int(row)) for row in rows]
        if len(self.datasets) > 1:
            for sample in group:
                sample.metadata.setdefault("dataset", self._names[dataset])
        return self._number(group)

    def _number(self, group: Group) -> Group:
        for sample in group:
            sample.group_index = self.next_group_index
            sample.index = sample.rollout_id = self.next_sample_index
            self.next_sample_index += 1
        self.next_group_index += 1
        return group

    def _epoch_order(self) -> np.ndarray:
        """Return [rows, 2] (dataset, row) of this epoch, determined by seed and epoch alone."""
        rng = np.random.default_rng([self.args.rollout_seed, self.epoch])
        parts = [np.empty((0, 2), np.int64)]
        for number, dataset in enumerate(self.datasets):
            rows = _weighted_rows(len(dataset), dataset.weight, rng)
            parts.append(np.stack([np.full(len(rows), number), rows], axis=1))
        order = np.concatenate(parts)
        return rng.permutation(order) if self.args.rollout_shuffle else order


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A data source with a buffer for returned groups: surplus and partial ones, or a hook's own."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        if path := args.buffer_filter_path:
            flag = "--buffer-filter-path"
            self._buffer_filter = load_function(path, flag=flag, protocol=BufferFilter)

    def add_samples(self, samples: list[Group]) -> None:
        """Add groups to the buffer; those that a hook created without indices are numbered here."""
        for group in samples:
            if group[0].group_index is None:
                self._number(group)
            self._in_flight.pop(_group_index(group), None)
            self.buffer.append(group)


def data_format_of(args: Args) -> DataFormat:
    """Return how `--prompt-data` is read, from the flags."""
    return DataFormat(
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        image_key=args.multimodal_keys.get("image"),
        max_images=args.limit_mm_data_per_request.get("image"),
        media_path=args.allowed_local_media_path,
        checkpoint=args.hf_checkpoint,
        apply_chat_template=args.apply_chat_template,
        chat_template_kwargs=args.apply_chat_template_kwargs,
        max_prompt_len=args.rollout_max_prompt_len,
        label_needed_by=_label_needed_by(args),
        row_rm_types=_row_rm_types(args),
    )


def _label_needed_by(args: Args) -> str | None:
    """Return the setting that requires a label in each row, for messages."""
    if args.custom_rm_path is None and args.loss_type != "sft_loss" and needs_label(args.rm_type):
        return f"--rm-type {args.rm_type}"
    return None


def _row_rm_types(args: Args) -> tuple[str, ...] | None:
    """Return the reward types that a data row may choose; None if no built-in reward reads them."""
    builtin = args.custom_rm_path in (None, OPD_REWARD)
    if not builtin or args.loss_type == "sft_loss":
        return None
    return (*([args.rm_type] if args.rm_type else []), *args.allow_row_rm_types)


def _load_datasets(args: Args) -> list[PromptDataset]:
    if args.num_rollout == 0:  # only evaluations
        return []
    if not args.prompt_data:
        raise ConfigError("--prompt-data is missing: give a .jsonl or .parquet file of prompts")
    data_format = data_format_of(args)
    tokenizer = load_tokenizer(args.hf_checkpoint)
    return [load_prompts(text, data_format, tokenizer) for text in args.prompt_data]


def _weighted_rows(count: int, weight: float, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of one epoch: weight 2.5 is every row twice and a random half of them once more."""
    whole, part = int(weight), weight - int(weight)
    extra = rng.permutation(count)[: round(part * count)] if part else np.empty(0, np.int64)
    return np.concatenate([np.tile(np.arange(count), whole), np.sort(extra)])


def _digest(dataset: PromptDataset) -> str:
    found = hashlib.blake2b(digest_size=16)
    for sample in dataset.samples:
        found.update(repr((sample.prompt, sample.label)).encode(errors="surrogatepass"))
    return found.hexdigest()


def _state_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"data_source_{rollout_id}.json"


def _group_index(group: Group) -> int:
    index = group[0].group_index
    assert index is not None
    return index
