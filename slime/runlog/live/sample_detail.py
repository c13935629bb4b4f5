"""All records of one sample: texts, conversation, tokens, its group and its prompt over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.runlog.live.metric_store import finite_or_none
from slime.runlog.live.run_view import RunView
from slime.runlog.live.sample_query import brief
from slime.runlog.sample_log import read_thumbnails
from slime.runlog.sample_table import is_train
from slime.runlog.token_log import TokenColumns, read_tokens, rollout_name

_MAX_MEMBERS = 64
_NONE = np.zeros(0, bool)
# Columns of the engine, and their numpy dtype.kind.
_KINDS = {"token_ids": "i", "loss_mask": "i", "weight_versions": "i", "rollout_log_probs": "f"}


def sample_detail(run: RunView, dataset: str, rollout_id: int, index: int) -> dict[str, Any] | None:
    """Return the sample, or None if there is no such sample."""
    store = run.samples
    row = store.find(dataset, rollout_id, index)
    if row is None:
        return None
    text = store.text(row)
    found = brief(store, row)
    if text is not None:
        found |= {
            "prompt": text.prompt,
            "response": text.response,
            "label": text.label,
            "rewards": text.rewards,
            "error": text.error,
            "messages": text.messages,
            "images": read_thumbnails(run.run_dir, text.images),
        }
    found["kept"] = text is not None
    found["members"] = _members(run, row)
    found["branches"] = _branches(run, row)
    found["tokens"] = token_strip(run, dataset, rollout_id, index)
    return found


def token_strip(run: RunView, dataset: str, rollout_id: int, index: int) -> dict[str, Any] | None:
    """Return the kept tokens of a sample as columns; None for unknown numbers.

    gap = trainer - engine log-prob, weight = exp(gap), the importance weight before any bound.
    """
    evaluated = None if is_train(dataset) else dataset
    engine = read_tokens(run.run_dir, rollout_name(rollout_id, dataset=evaluated), index)
    if engine is None or any(
        engine.values.get(n, _NONE).dtype.kind != k for n, k in _KINDS.items()
    ):
        return None
    trainer = None
    if evaluated is None:
        trainer = read_tokens(run.run_dir, rollout_name(rollout_id, trainer=True), index)
    words = run.vocabulary()
    ids = engine.values["token_ids"].tolist()
    columns: dict[str, Any] = {
        "position": engine.position,
        "ids": ids,
        "texts": [words.get(i, f"<{i}>") for i in ids],
        "mask": engine.values["loss_mask"],
        "version": engine.values["weight_versions"],
        "engine": engine.values["rollout_log_probs"],
        **_aligned(engine, trainer),
    }
    if "trainer" in columns:
        gap = columns["trainer"].astype(np.float64) - columns["engine"].astype(np.float64)
        columns["gap"], columns["weight"] = gap, np.exp(np.clip(gap, -20, 20))
    return {name: _plain(column) for name, column in columns.items()}


def _aligned(engine: TokenColumns, trainer: TokenColumns | None) -> dict[str, np.ndarray]:
    """Return the trainer's columns at the engine file's positions; NaN if they have none."""
    if trainer is None:
        return {}
    places = {int(position): place for place, position in enumerate(engine.position)}
    known = [(places[int(p)], n) for n, p in enumerate(trainer.position) if int(p) in places]
    names = {"trainer_log_probs": "trainer", "advantages": "advantage", "ref_log_probs": "ref"}
    found = {}
    for name, column in trainer.values.items():
        if column.dtype.kind != "f":
            continue
        whole = np.full(len(engine.position), np.nan, np.float32)
        if known:
            to, source = (np.array(part) for part in zip(*known, strict=True))
            whole[to] = column[source]
        found[names.get(name, name)] = whole
    return found


def _members(run: RunView, row: int) -> list[dict[str, Any]]:
    """Return the samples of the same group, in the order of the table."""
    groups = run.samples.groups()
    group = groups[np.searchsorted(groups["first"], row, side="right") - 1]
    first = int(group["first"])
    size = min(int(group["size"]), _MAX_MEMBERS)
    return [_member(run, row) for row in range(first, first + size)]


def _branches(run: RunView, row: int) -> list[dict[str, Any]]:
    """Return the samples of the same trajectory, of which an agent may return several."""
    rows = run.samples.rows
    record = rows[row]
    same = (rows["trajectory"] == record["trajectory"]) & (rows["dataset"] == record["dataset"])
    found = np.flatnonzero(same & (rows["rollout_id"] == record["rollout_id"]))
    return [_member(run, int(n)) for n in found[:_MAX_MEMBERS]] if len(found) > 1 else []


def _member(run: RunView, row: int) -> dict[str, Any]:
    found = brief(run.samples, row)
    found["kept"] = "response" in found
    return found


def _plain(column: Any) -> Any:
    if not isinstance(column, np.ndarray) or column.dtype.kind != "f":
        return column
    return finite_or_none(column)
