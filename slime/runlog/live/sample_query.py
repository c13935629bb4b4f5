"""Pages of samples, groups and prompts for the web page: filter, sort, slice, then read the texts of that page only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slime.runlog.live.sample_store import SampleStore, without_signal
from slime.runlog.sample_table import STATUSES

PAGE = 50
_EXCERPT = 240
_RANGES = ("reward", "advantage", "response_len", "prompt_len", "rollout_id", "oldest_version")
_SORTS = ("rollout_id", "reward", "advantage", "response_len", "prompt_len", "trained_len")
_GROUP_COLUMNS = ("rollout_id", "mean", "low", "high", "size", "failed", "truncated", "length")
_MAX_SEARCHED = 20_000  # texts that a search reads
_MAX_SEARCH_S = 10.0
Query = Mapping[str, str]


class QueryError(ValueError):
    """A query that cannot be answered; the message is for the page."""


def samples_page(store: SampleStore, query: Query) -> dict[str, Any]:
    """Return one page of the samples that match, newest first unless `sort` names a column."""
    rows = store.rows
    chosen = np.flatnonzero(_sample_filter(store, query))
    chosen = _sorted(rows, chosen, query, _SORTS)
    if text := query.get("text", ""):
        chosen = _searched(store, chosen, text)
    page = _page(store, query, chosen, lambda row: brief(store, int(row)))
    return {**page, "all": len(rows)}


def groups_page(store: SampleStore, query: Query) -> dict[str, Any]:
    """Return one page of groups; `signal=none` keeps groups with equal rewards."""
    groups = store.groups()
    kept = _dataset_filter(store, groups, query) & _range_filter(groups, "rollout_id", query)
    if query.get("signal") == "none":
        kept &= without_signal(groups)
    elif query.get("signal") == "some":
        kept &= ~without_signal(groups)
    if query.get("prompt"):
        kept &= groups["prompt"] == np.uint64(_hash(query["prompt"]))
    chosen = _sorted(groups, np.flatnonzero(kept), query, _GROUP_COLUMNS)
    page = _page(store, query, chosen, lambda number: _group(store, groups[number]))
    return {**page, "all": len(groups)}


def prompts_page(store: SampleStore, query: Query) -> dict[str, Any]:
    """Return prompts that were sampled in several rollouts, with their first and last mean reward."""
    groups = store.groups()
    groups = groups[_dataset_filter(store, groups, query)]
    _, first, inverse, counts = np.unique(
        groups["prompt"], return_index=True, return_inverse=True, return_counts=True
    )
    last = np.zeros(len(first), int)
    np.maximum.at(last, inverse, np.arange(len(groups)))
    change = groups["mean"][last] - groups["mean"][first]
    by = {"count": counts, "change": change, "last": groups["mean"][last]}
    key = by.get(query.get("sort", "count"), counts)
    order = np.argsort(np.where(np.isfinite(key), key, -math.inf), kind="stable")
    order = order if query.get("order") == "up" else order[::-1]

    def prompt(n: int) -> dict[str, Any]:
        return {
            **_group(store, groups[last[n]]),
            "times": int(counts[n]),
            "first_mean": _number(groups["mean"][first[n]]),
            "history": _history(groups, groups["prompt"][first[n]]),
        }

    return _page(store, query, order, prompt)


def _page(
    store: SampleStore, query: Query, chosen: np.ndarray, row: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    start = _int(query, "start", 0)
    rows = [row(number) for number in chosen[start : start + PAGE]]
    return {"total": len(chosen), "start": start, "rows": rows, "datasets": store.names}


def brief(store: SampleStore, row: int) -> dict[str, Any]:
    """Return the numbers of a sample and the beginning of its texts."""
    record = store.rows[row]
    found: dict[str, Any] = {
        name: _number(record[name])
        for name in record.dtype.names
        if name not in ("dataset", "status", "prompt", "text")
    }
    found["dataset"] = store.datasets[record["dataset"]]
    found["status"] = STATUSES[record["status"]] if record["status"] < len(STATUSES) else "?"
    found["prompt_hash"] = f"{record['prompt']:016x}"
    text = store.text(row)
    if text is not None:
        found["prompt"], found["response"] = text.prompt[-_EXCERPT:], text.response[:_EXCERPT]
        found["label"] = text.label
    elif int(record["prompt"]) in store.prompts():
        found["prompt"] = store.prompts()[int(record["prompt"])]
    return found


def _group(store: SampleStore, group: Any) -> dict[str, Any]:
    rows = range(int(group["first"]), int(group["first"]) + int(group["size"]))
    found: dict[str, Any] = {name: _number(group[name]) for name in ("group", *_GROUP_COLUMNS)}
    found["dataset"] = store.datasets[group["dataset"]]
    found["prompt_hash"] = f"{group['prompt']:016x}"
    found["rewards"] = [_number(r) for r in store.rows["reward"][rows.start : rows.stop][:64]]
    found["indices"] = store.rows["index"][rows.start : rows.stop][:64].tolist()
    kept = np.flatnonzero(store.rows["text"][rows.start : rows.stop] >= 0)
    text = store.text(rows.start + int(kept[0])) if len(kept) else None
    prompt = store.prompts().get(int(group["prompt"])) if text is None else text.prompt[-_EXCERPT:]
    return found if prompt is None else {**found, "prompt": prompt}


def _history(groups: np.ndarray, prompt: Any) -> list[list[float | None]]:
    same = groups[groups["prompt"] == prompt][-200:]
    return [[_number(r), _number(m)] for r, m in zip(same["rollout_id"], same["mean"], strict=True)]


def _sample_filter(store: SampleStore, query: Query) -> np.ndarray:
    rows = store.rows
    kept = _dataset_filter(store, rows, query)
    if status := query.get("status"):
        kept &= rows["status"] == (STATUSES.index(status) if status in STATUSES else 255)
    for name in _RANGES:
        kept &= _range_filter(rows, name, query)
    if query.get("group"):
        kept &= rows["group"] == _int(query, "group", -1)
    if query.get("prompt"):
        kept &= rows["prompt"] == np.uint64(_hash(query["prompt"]))
    if query.get("kept"):
        kept &= rows["text"] >= 0
    if query.get("signal") == "none":
        groups = store.groups()
        kept &= np.repeat(without_signal(groups), groups["size"])
    return kept


def _dataset_filter(store: SampleStore, rows: np.ndarray, query: Query) -> np.ndarray:
    name = query.get("dataset")
    if not name:
        return np.ones(len(rows), bool)
    numbers = [
        n for n, held in enumerate(store.datasets) if held == name or held.startswith(f"{name}/")
    ]
    return np.isin(rows["dataset"], numbers)


def _range_filter(rows: np.ndarray, name: str, query: Query) -> np.ndarray:
    """Keep rows between `<name>_min` and `<name>_max`; a row without a value is dropped."""
    kept = np.ones(len(rows), bool)
    if low := query.get(f"{name}_min"):
        kept &= rows[name] >= _float(low, name)
    if high := query.get(f"{name}_max"):
        kept &= rows[name] <= _float(high, name)
    return kept


def _sorted(
    rows: np.ndarray, chosen: np.ndarray, query: Query, allowed: tuple[str, ...]
) -> np.ndarray:
    name = query.get("sort", "")
    up = query.get("order") == "up"
    if name in allowed:
        key = rows[name][chosen].astype(np.float64)
        key = np.where(np.isfinite(key), key, np.inf if up else -np.inf)
        order = np.argsort(key if up else -key, kind="stable")
        return chosen[order]
    return chosen if up else chosen[::-1]


def _searched(store: SampleStore, chosen: np.ndarray, text: str) -> np.ndarray:
    kept = chosen[store.rows["text"][chosen] >= 0][:_MAX_SEARCHED]
    wanted, found = text.lower(), []
    deadline = time.monotonic() + _MAX_SEARCH_S
    for row in kept.tolist():
        if time.monotonic() > deadline:
            break
        sample = store.text(row)
        if sample and (wanted in sample.response.lower() or wanted in sample.prompt.lower()):
            found.append(row)
            if len(found) >= 20 * PAGE:
                break
    return np.array(found, int)


def _number(value: Any) -> float | int | None:
    plain = value.item() if isinstance(value, np.generic) else value
    return plain if isinstance(plain, int) or math.isfinite(plain) else None


def _int(query: Query, name: str, default: int) -> int:
    try:
        return min(max(int(query.get(name) or default), 0 if name == "start" else -1), 2**62)
    except ValueError:
        raise QueryError(f"{name} must be a whole number") from None


def _float(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise QueryError(f"{name} must be a number") from None


def _hash(text: str) -> int:
    try:
        return int(text, 16) & (2**64 - 1)
    except ValueError:
        raise QueryError("a prompt is named by its hash") from None
