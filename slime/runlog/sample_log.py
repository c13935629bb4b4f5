"""A few samples of every rollout in samples.jsonl, for people to read, with their tokens beside it.

The numbers of all samples are in samples.table (`sample_table.py`), tokens in tokens/ (`token_log.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from slime.core.types import RolloutBatch, Sample, Status
from slime.runlog.jsonl import LogWrites, append_lines, read_lines, replace_file
from slime.runlog.sample_table import PromptLog, append_table
from slime.runlog.token_log import Decode, TokenLog, batch_tokens, rollout_name, sample_tokens
from slime.utils.untrusted_files import read_regular

SAMPLES_FILE = "samples.jsonl"
IMAGES_FOLDER = "images"
_MAX_THUMBNAIL = 2**17  # bytes; uncompressed, 160 x 160 pixels of three bytes are 77 kB
SAMPLES_PER_ROLLOUT = 8
MAX_TEXT_CHARS = 8000
_MAX_PARTS = 64  # messages of a conversation, images of a sample
_MAX_WAITING = 16  # writes that wait in memory for room on the disk, two per rollout


@dataclass(kw_only=True, frozen=True)
class SampleRow:
    """One sample as shown to people: text, reward and advantage.

    `advantage` is the reward after normalisation within the group, or None (eval, SFT).
    """

    prompt: str
    response: str
    reward: float | None
    advantage: float | None
    status: str
    group_index: int | None
    index: int | None
    prompt_length: int
    response_length: int
    label: str | None = None
    kind: str = "train"  # "train", "train/<dataset>" of several, or "eval/<dataset>"
    trained_length: int | None = None  # response tokens that count in the loss; None: all
    removed: bool = False  # has no weight in training
    weight_versions: list | None = None  # [oldest, newest] that generated the response
    trajectory: int | None = None  # shared by the samples of one trajectory; None: only one sample
    rewards: dict | None = None  # components, if the reward is a dictionary
    error: str | None = None  # why generation or reward failed
    messages: list | None = None  # the conversation, if an agent recorded it
    images: list | None = None  # SHA-256 of each image, whose thumbnail is images/SHA256.png


_TYPES = get_type_hints(SampleRow)
_NEEDED = {f.name for f in fields(SampleRow) if f.default is MISSING}


class SampleLog:
    """Writes texts, numbers and tokens of samples; `decode` gives the texts of token ids.

    On a full disk the run continues: rows wait in memory for the next call, images and tokens are lost.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        limit: int,
        decode: Decode,
        thumbnail: Callable[[bytes], bytes] | None = None,
        datasets: Sequence[str] = (),
    ) -> None:
        """`datasets` are those of training, by the name in `sample.metadata["dataset"]`."""
        self._run_dir, self._limit, self._decode = run_dir, limit, decode
        self._thumbnail = thumbnail
        self._datasets = datasets if len(datasets) > 1 else ()
        self._tokens, self._prompts = TokenLog(run_dir), PromptLog(run_dir)
        self._writes = LogWrites("samples cannot be written yet: %s", most=_MAX_WAITING)

    def log_batch(self, rollout_id: int, samples: list[Sample], batch: RolloutBatch) -> None:
        """Write samples that are trained on; mark the kept rows for the trainer in `batch.logged`."""
        rows = self._by_dataset(batch_rows(samples, batch), samples)
        chosen = self._append(rollout_id, rows)
        kept = set(batch.sample_indices[chosen].tolist())
        self._write_images(sample for sample in samples if sample.index in kept)
        batch.logged = np.isin(np.arange(len(rows)), chosen).astype(np.int8)
        columns = batch_tokens(samples, batch)
        self._tokens.write(rollout_name(rollout_id), columns, self._decode)

    def log_scored(
        self,
        rollout_id: int,
        samples: list[Sample],
        rewards: Sequence[float | None],
        kind: str = "train",
    ) -> None:
        """Write samples of an evaluation, or of a run without a trainer."""
        pairs = zip(samples, rewards, strict=True)
        rows = [sample_row(sample, reward, kind=kind) for sample, reward in pairs]
        rows = self._by_dataset(rows, samples) if kind == "train" else rows
        chosen = self._append(rollout_id, rows)
        name = rollout_name(rollout_id, dataset=None if kind == "train" else kind)
        columns = [sample_tokens(samples[number]) for number in chosen]
        self._tokens.write(name, columns, self._decode)
        self._write_images(samples[number] for number in chosen)

    def require(self) -> None:
        """Write the rows that wait for room on the disk, which a resumed run would not make again."""
        self._writes.require()

    def _append(self, rollout_id: int, rows: list[SampleRow]) -> list[int]:
        """Write the rows; return the numbers of those whose texts are kept."""
        self._writes.add(
            partial(append_samples, self._run_dir, rollout_id, rows, limit=self._limit)
        )
        self._writes.add(partial(self._prompts.add, [row.prompt for row in rows]))
        return chosen_rows(rows, self._limit)

    def _write_images(self, samples: Iterable[Sample]) -> None:
        """Write a thumbnail of each image of the samples, once in a run."""
        files = {_sha256(file): file for sample in samples for file in sample.image_files}
        folder = Path(self._run_dir) / IMAGES_FOLDER
        for key, file in files.items():
            path = folder / f"{key}.png"
            if self._thumbnail is not None and not path.exists():
                thumbnail = self._thumbnail(file)
                with self._writes.errors.warned_once():
                    folder.mkdir(exist_ok=True)
                    replace_file(path, thumbnail)

    def _by_dataset(self, rows: list[SampleRow], samples: list[Sample]) -> list[SampleRow]:
        """Name the dataset of each row, if training has several."""
        if not self._datasets:
            return rows
        names = {sample.index: sample.metadata.get("dataset") for sample in samples}
        return [
            replace(row, kind=f"train/{names[row.index]}")
            if names.get(row.index) in self._datasets
            else row
            for row in rows
        ]


def read_thumbnails(run_dir: str | Path, keys: object) -> list[str]:
    """Return the kept thumbnails of a row's `images` as data URIs; files of any other kind are skipped."""
    found = []
    for key in keys[:_MAX_PARTS] if isinstance(keys, list) else ():
        if isinstance(key, str) and re.fullmatch("[0-9a-f]{64}", key):
            path = Path(run_dir) / IMAGES_FOLDER / f"{key}.png"
            with suppress(OSError):
                image = read_regular(path, _MAX_THUMBNAIL)
                if image.startswith(b"\x89PNG"):
                    found.append("data:image/png;base64," + base64.b64encode(image).decode())
    return found


def append_samples(
    run_dir: str | Path,
    rollout_id: int,
    rows: Sequence[SampleRow],
    *,
    limit: int = SAMPLES_PER_ROLLOUT,
) -> list[int]:
    """Append the `chosen_rows`, whose long texts are shortened, and the numbers of all rows to the table.

    Append all or nothing. Return the row numbers that were appended.
    """
    chosen = chosen_rows(rows, limit)
    records = [{"rollout_id": rollout_id, **_record(rows[i])} for i in chosen]
    path = Path(run_dir) / SAMPLES_FILE
    offsets = append_lines(path, records)
    try:
        append_table(run_dir, rollout_id, rows, dict(zip(chosen, offsets, strict=True)))
    except OSError:
        if offsets:
            os.truncate(path, offsets[0])
        raise
    return chosen


def chosen_rows(rows: Sequence[SampleRow], limit: int) -> list[int]:
    """Return the numbers of the rows whose texts are kept: `choose_rows`, failures and branches."""
    return _with_branches(rows, _with_failures(rows, choose_rows(rows, limit))) if limit else []


def read_samples(run_dir: str | Path) -> list[tuple[int, SampleRow]]:
    """Return (rollout_id, row) for every valid line of samples.jsonl."""
    read = (parse_row(record) for record in read_lines(Path(run_dir) / SAMPLES_FILE))
    return [row for row in read if row is not None]


def parse_row(record: dict[str, Any]) -> tuple[int, SampleRow] | None:
    """Return (rollout_id, row) of a line, or None if it is not a sample's."""
    rollout_id = record.get("rollout_id")
    values = {name: value for name, value in record.items() if name in _TYPES}
    if not isinstance(rollout_id, int) or not values.keys() >= _NEEDED:
        return None
    if not all(_has_type(value, _TYPES[name]) for name, value in values.items()):
        return None
    return rollout_id, SampleRow(**values)


def _has_type(value: object, wanted: Any) -> bool:
    kinds = get_args(wanted) or (wanted,)
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def choose_rows(rows: Sequence[SampleRow], limit: int) -> list[int]:
    """Return row numbers in order: groups picked evenly over the batch, at least two samples of each.

    Samples of one group side by side show what the advantage rewards. 6 groups of 4 with limit 8
    give 4 groups, two rows of each: the best and the worst of the group.
    """
    groups: dict[int | None, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group_index, []).append(number)
    if len(rows) <= limit:
        return list(range(len(rows)))
    per_group = 2 if max(len(members) for members in groups.values()) > 1 else 1
    names = list(groups)
    picked = evenly(names, max(1, limit // per_group))
    per_group = max(per_group, limit // len(picked))
    chosen = [number for name in picked for number in _spread(groups[name], rows, per_group)]
    return sorted(chosen[:limit])


def _with_failures(rows: Sequence[SampleRow], chosen: list[int]) -> list[int]:
    """Add the first sample that failed for each reason, so that every reason can be read."""
    reasons = {row.error.splitlines()[0]: n for n, row in reversed([*enumerate(rows)]) if row.error}
    known = {error.splitlines()[0] for n in chosen if (error := rows[n].error)}
    missing = [n for reason, n in reasons.items() if reason not in known]
    return sorted({*chosen, *missing[:SAMPLES_PER_ROLLOUT]})


def _with_branches(rows: Sequence[SampleRow], chosen: list[int]) -> list[int]:
    """Add all samples of the chosen samples' trajectories: an agent's branches are read together."""
    wanted = {(rows[n].group_index, t) for n in chosen if (t := rows[n].trajectory) is not None}
    others = [n for n, row in enumerate(rows) if (row.group_index, row.trajectory) in wanted]
    return sorted({*chosen, *others[: len(chosen) + _MAX_PARTS]})


def evenly(items: list, count: int) -> list:
    """Return `count` items at equal distances, first and last included; all if there are fewer."""
    if count >= len(items):
        return items
    if count == 1:
        return items[:1]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _spread(members: list[int], rows: Sequence[SampleRow], count: int) -> list[int]:
    """Return `count` of the group's rows, evenly from the best reward to the worst."""
    rewards = {n: rows[n].reward for n in members}
    ranked = sorted(members, key=lambda n: -math.inf if (r := rewards[n]) is None else -r)
    return evenly(ranked, count)


def _record(row: SampleRow) -> dict[str, Any]:
    kept = ("label", "kind")  # written always, as readers expect
    values = {f.name: (getattr(row, f.name), f.default) for f in fields(row)}
    record = {name: v for name, (v, default) in values.items() if name in kept or v != default}
    return record | {"prompt": _shorten(row.prompt), "response": _shorten(row.response)}


def _shorten(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    omitted = len(text) - 2 * half
    return f"{text[:half]}\n[... {omitted:,} characters left out ...]\n{text[-half:]}"


def batch_rows(samples: list[Sample], batch: RolloutBatch) -> list[SampleRow]:
    """Return the rows of a batch; the advantage is the normalised reward that the trainer gets."""
    by_index = {sample.index: sample for sample in samples}
    columns = (batch.sample_indices, batch.raw_rewards, batch.rewards)
    return [
        _row(by_index[index], reward=raw, advantage=advantage)
        for index, raw, advantage in zip(*(column.tolist() for column in columns), strict=True)
    ]


def sample_row(sample: Sample, reward: float | None, *, kind: str) -> SampleRow:
    """Return the row of a sample that was scored but not trained on."""
    return _row(sample, reward=None if sample.status is Status.FAILED else reward, kind=kind)


def _row(
    sample: Sample, *, reward: float | None, advantage: float | None = None, kind: str = "train"
) -> SampleRow:
    return SampleRow(
        prompt=_prompt(sample),
        response=sample.response,
        reward=reward,
        advantage=advantage,
        status=sample.status.value,
        group_index=sample.group_index,
        index=sample.index,
        prompt_length=len(sample.tokens) - sample.response_length,
        response_length=sample.response_length,
        label=None if sample.label is None else _as_text(sample.label),
        kind=kind,
        trained_length=None if sample.loss_mask is None else sample.effective_response_length,
        removed=sample.remove_sample,
        weight_versions=[min(held), max(held)] if (held := sample.weight_versions) else None,
        trajectory=sample.rollout_id,
        rewards=sample.reward_components or None,
        error=_error(sample),
        messages=_messages(sample.metadata.get("messages")),
        images=[_sha256(file) for file in sample.image_files[:_MAX_PARTS]] or None,
    )


def _sha256(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def _prompt(sample: Sample) -> str:
    """Return the prompt as the model saw it, if an agent's endpoint recorded it, else the data's."""
    rendered = sample.metadata.get("rendered_prompt")
    prompt = rendered if isinstance(rendered, str) else sample.prompt
    return prompt if isinstance(prompt, str) else _as_json(prompt)


def _error(sample: Sample) -> str | None:
    metadata = sample.metadata
    if sample.status is not Status.FAILED or "error" not in metadata:
        return None
    names = ("error_stage", "error", "error_traceback")
    where, error, trace = (_as_text(metadata.get(name, "")) for name in names)
    return _shorten(f"{where}: {error}\n{trace}")


def _messages(messages: object) -> list[dict[str, object]] | None:
    """Return the conversation with shortened texts; parts other than text become their type."""
    if not isinstance(messages, list) or not messages:
        return None
    kept = evenly([m for m in messages if isinstance(m, dict)], _MAX_PARTS)
    return [
        {
            "role": _as_text(message.get("role", "")),
            "content": _shorten(_text(message.get("content"))),
            **({"tool_calls": calls} if (calls := _calls(message.get("tool_calls"))) else {}),
        }
        for message in kept
    ]


def _text(content: object, depth: int = 0) -> str:
    if isinstance(content, list):
        return "" if depth > 4 else "".join(_text(part, depth + 1) for part in content)
    if isinstance(content, dict):
        return _as_text(content.get("text", f"[{_as_text(content.get('type', 'part'))}]"))
    return "" if content is None else _as_text(content)


def _as_text(value: object) -> str:
    """Return `str` of a value that may come from a row of data: it may be nested as deep as JSON allows."""
    try:
        return str(value)
    except RecursionError:
        return "[nested too deep]"


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, default=_as_text)
    except (
        RecursionError,
        TypeError,
        ValueError,
    ):  # keys that are no text, a list inside of itself
        return _as_text(value)


def _calls(calls: object) -> list[dict[str, str]]:
    found = []
    for call in calls[:_MAX_PARTS] if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict):  # rows of data have conversations too
            continue
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else _as_json(arguments)
        found.append({"name": _as_text(function.get("name", "")), "arguments": _shorten(text)})
    return found
