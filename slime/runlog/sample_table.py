"""The numbers of every sample of a run as fixed-size records, for lists and filters over millions of them.

samples.table       records of SAMPLE_DTYPE, appended; little-endian, no header
samples.table.json  {"format": 1, "datasets": ["train", "eval/gsm8k"], "statuses": [...], "dtype": [...]}
prompts.jsonl       {"hash": "099290565e74443b", "text": "the end of the prompt"}, once per prompt

`text` is the byte offset of the sample's line in samples.jsonl, which holds the text of a few samples of
every rollout; -1 without one. A rollout of more than MAX_ROWS samples keeps whole groups, evenly chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.core.types import Status
from slime.runlog.jsonl import append_lines, parse_line, read_lines, replace_file, write_whole
from slime.utils.untrusted_files import read_regular

if TYPE_CHECKING:
    from slime.runlog.sample_log import SampleRow

TABLE_FILE = "samples.table"
HEADER_FILE = "samples.table.json"
PROMPTS_FILE = "prompts.jsonl"
MAX_ROWS = 1024  # of one rollout and dataset
MAX_PROMPTS = 100_000
MOST_RECORDS = 1 << 24  # that are read of one table, 1.3 GB
_MAX_HEADER = 1 << 24  # bytes
_PROMPT_CHARS = 240
STATUSES = [status.value for status in Status]
SAMPLE_DTYPE = np.dtype(
    [
        ("rollout_id", "<i4"),
        ("dataset", "<i2"),  # place in the header's list
        ("status", "u1"),  # place in the header's list
        ("removed", "u1"),  # 1: has no weight in training
        ("group", "<i8"),  # -1: none
        ("index", "<i8"),
        ("trajectory", "<i8"),
        ("prompt", "<u8"),  # hash of the prompt, the same in every rollout
        ("reward", "<f4"),  # NaN: none
        ("advantage", "<f4"),  # NaN: none
        ("prompt_len", "<i4"),
        ("response_len", "<i4"),
        ("trained_len", "<i4"),  # response tokens that count in the loss
        ("oldest_version", "<i4"),  # of the weights that generated the response; -1: unknown
        ("newest_version", "<i4"),
        ("text", "<i8"),
    ]
)
IsKept = Callable[[np.ndarray, list[str]], np.ndarray]


def append_table(
    run_dir: str | Path, rollout_id: int, rows: Sequence[SampleRow], texts: dict[int, int]
) -> None:
    """Append the rows of one rollout and kind; `texts` are offsets in samples.jsonl by row number."""
    if not rows:
        return
    numbers = _whole_groups(rows, set(texts))
    codes = _dataset_codes(Path(run_dir), {rows[n].kind for n in numbers})
    table = np.zeros(len(numbers), SAMPLE_DTYPE)
    for place, number in enumerate(numbers):
        table[place] = row_record(
            rows[number], rollout_id, codes[rows[number].kind], texts.get(number, -1)
        )
    path = Path(run_dir) / TABLE_FILE
    _drop_partial_record(path)
    with path.open("ab", buffering=0) as file:
        write_whole(file, table.tobytes())


class PromptLog:
    """Writes the end of every prompt once, for lists of groups whose texts were not kept."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / PROMPTS_FILE
        self._known: set[str] | None = None

    def add(self, prompts: Iterable[str]) -> None:
        if self._known is None:
            self._known = {str(record.get("hash")) for record in read_lines(self._path)}
        free = MAX_PROMPTS - len(self._known)
        hashed = {f"{prompt_hash(prompt):016x}": prompt for prompt in dict.fromkeys(prompts)}
        new = [name for name in hashed if name not in self._known][: max(free, 0)]
        if new:
            records = [{"hash": name, "text": hashed[name][-_PROMPT_CHARS:]} for name in new]
            append_lines(self._path, records)
            self._known.update(new)


def row_record(row: SampleRow, rollout_id: int, dataset: int, text: int) -> tuple[Any, ...]:
    """Return the fields of SAMPLE_DTYPE."""
    index = -1 if row.index is None else row.index
    oldest, newest = row.weight_versions or (-1, -1)
    return (
        rollout_id,
        dataset,
        STATUSES.index(row.status) if row.status in STATUSES else 0,
        row.removed,
        -1 if row.group_index is None else row.group_index,
        index,
        index if row.trajectory is None else row.trajectory,
        prompt_hash(row.prompt),
        np.nan if row.reward is None else row.reward,
        np.nan if row.advantage is None else row.advantage,
        row.prompt_length,
        row.response_length,
        row.response_length if row.trained_length is None else row.trained_length,
        oldest,
        newest,
        text,
    )


def is_train(dataset: str) -> bool:
    """Return whether a dataset is trained on: "train", or "train/<name>" of several."""
    return dataset == "train" or dataset.startswith("train/")


def prompt_hash(prompt: str) -> int:
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def read_header(run_dir: Path) -> list[str]:
    """Return the names of the datasets, by their number in the table."""
    try:
        datasets = json.loads(read_regular(run_dir / HEADER_FILE, _MAX_HEADER))["datasets"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [str(name) for name in datasets] if isinstance(datasets, list) else []


def read_table(run_dir: Path, start: int = 0) -> np.ndarray:
    """Return the records from number `start` on; without a partially written one."""
    path = run_dir / TABLE_FILE
    try:
        count = min(path.stat().st_size // SAMPLE_DTYPE.itemsize, MOST_RECORDS) - start
        if count <= 0:
            return np.zeros(0, SAMPLE_DTYPE)
        offset = start * SAMPLE_DTYPE.itemsize
        return np.fromfile(path, SAMPLE_DTYPE, count=count, offset=offset)
    except OSError:
        return np.zeros(0, SAMPLE_DTYPE)


def cut_table(run_dir: Path, is_kept: IsKept, samples_file: Path) -> None:
    """Keep the records that `is_kept` accepts; update their offsets in samples.jsonl, which was cut before."""
    if not (run_dir / TABLE_FILE).exists():
        return
    table, datasets = read_table(run_dir), read_header(run_dir)
    table = table[is_kept(table, datasets)]
    table["text"] = -1
    places = {
        (datasets[record["dataset"]], record["rollout_id"], record["index"]): place
        for place, record in enumerate(table)
    }
    for offset, record in _lines(samples_file):
        key = (record.get("kind", "train"), record.get("rollout_id"), record.get("index"))
        if key in places:
            table["text"][places[key]] = offset
    replace_file(run_dir / TABLE_FILE, table.tobytes())


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    found, offset = [], 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                record = parse_line(line)
                if record is not None:
                    found.append((offset, record))
                offset += len(line)
    return found


def _whole_groups(rows: Sequence[SampleRow], wanted: set[int]) -> list[int]:
    """Return the numbers of at most about MAX_ROWS rows: the groups of the `wanted` rows, then evenly chosen groups."""
    if len(rows) <= MAX_ROWS:
        return list(range(len(rows)))
    groups: dict[int | None, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group_index, []).append(number)
    first = [name for name, members in groups.items() if wanted & set(members)]
    others = [name for name in groups if name not in first]
    count = max(0, MAX_ROWS * len(groups) // len(rows) - len(first))
    stride = max(1, -(-len(others) // count)) if count else len(others) + 1
    kept = first + (others[::stride] if count else [])
    return sorted(number for name in kept for number in groups[name])


def _dataset_codes(run_dir: Path, kinds: set[str]) -> dict[str, int]:
    """Return the number of each dataset; new ones are added to the header before a record names them."""
    names = read_header(run_dir)
    new = sorted(kinds - set(names))
    if new or not (run_dir / HEADER_FILE).exists():
        names += new
        dtype = [[name, SAMPLE_DTYPE[name].str] for name in SAMPLE_DTYPE.names or ()]
        header = {"format": 1, "datasets": names, "statuses": STATUSES, "dtype": dtype}
        replace_file(run_dir / HEADER_FILE, json.dumps(header).encode())
    return {name: number for number, name in enumerate(names)}


def _drop_partial_record(path: Path) -> None:
    if path.exists() and path.stat().st_size % SAMPLE_DTYPE.itemsize:
        with path.open("rb+") as file:
            size = path.stat().st_size
            file.truncate(size - size % SAMPLE_DTYPE.itemsize)
