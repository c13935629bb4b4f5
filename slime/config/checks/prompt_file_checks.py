"""The prompt files a run names: where they are, and how many prompts they hold."""

from __future__ import annotations

from pathlib import Path

from slime.config.checks.installed import is_installed
from slime.config.data_spec import DataSpec
from slime.config.flags.draft import Draft
from slime.utils.reasoning_tasks import chosen_rows


def data_path(spec: str, option: str = "--prompt-data") -> str:
    """'data.jsonl@[0:100]:weight=2' -> 'data.jsonl'"""
    return str(Path(DataSpec.parse(spec, option).path).expanduser())


def need_data(spec: str, draft: Draft, option: str) -> None:
    """The file, or the package of the task, that a dataset comes from."""
    if DataSpec.parse(spec, option).task is None:
        draft.need_file(data_path(spec, option), option)
    elif not is_installed("reasoning_gym"):
        draft.lacking(f"{option} {spec} needs a package: pip install 'slime[reasoning-gym]'")


def count_prompts(text: str, draft: Draft) -> int:
    """Prompts that one pass over the file hands out, before any filter by length."""
    spec, path = DataSpec.parse(text), data_path(text)
    if spec.task is not None:
        return round(len(chosen_rows(spec.rows)) * spec.weight)
    if not draft.need_file(path, "--prompt-data"):
        return 0
    if path.endswith(".parquet"):
        if not is_installed("pyarrow"):
            draft.lacking(f"{path} needs the package pyarrow: pip install pyarrow")
            return 0
        import pyarrow.parquet

        count = pyarrow.parquet.ParquetFile(path).metadata.num_rows
    else:
        with open(path, "rb") as file:
            count = sum(1 for line in file if line.strip())
    return round(len(range(count)[spec.rows]) * spec.weight)
