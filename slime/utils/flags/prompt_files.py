"""How prompt files are written on the command line, and how many prompts they hold."""

from __future__ import annotations

import re
from pathlib import Path

from slime.utils.flags.draft import Draft
from slime.utils.flags.gpus import is_installed

_SPEC = re.compile(r"(.+?)(?:@\[(-?\d*):(-?\d*)\])?(?::weight=([\d.]+))?")


def data_path(spec: str) -> str:
    """'data.jsonl@[0:100]:weight=2' -> 'data.jsonl'"""
    return str(Path(_split(spec)[0]).expanduser())


def count_prompts(spec: str, draft: Draft) -> int:
    """Prompts that one pass over `spec` hands out, before any filter by length."""
    path, rows, weight = _split(spec)
    if not draft.need_file(path, "--prompt-data"):
        return 0
    if path.endswith(".parquet"):
        if not is_installed("pyarrow"):
            draft.lacking(f"{path} needs the package pyarrow: pip install pyarrow")
            return 0
        import pyarrow.parquet

        count = pyarrow.parquet.ParquetFile(path).metadata.num_rows
    else:
        with Path(path).expanduser().open("rb") as file:
            count = sum(1 for line in file if line.strip())
    return round(len(range(count)[rows]) * weight)


def _split(spec: str) -> tuple[str, slice, float]:
    match = _SPEC.fullmatch(spec)
    if match is None:
        return spec, slice(None), 1.0
    start, stop = (int(text) if text else None for text in match.group(2, 3))
    return match[1], slice(start, stop), float(match[4] or 1)
