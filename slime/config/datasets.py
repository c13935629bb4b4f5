"""Parse datasets: PATH@[0:100]:weight=2 on the command line, and the file of --eval-config.

The file of --eval-config has settings for all datasets and for each of them. Both keys may be nested
in `eval:`, and n_samples_per_eval_prompt is another name of n_samples_per_prompt:

    defaults:
      n_samples_per_prompt: 4
      temperature: 0.6
    datasets:
      - name: aime
        path: aime-2024.jsonl
        n_samples_per_prompt: 16
      - {name: gsm8k, path: gsm8k.jsonl, rm_type: math}
      - {name: tools, path: tools.jsonl, custom_generate_function_path: my.agent, stop: ["</call>"]}
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.config.flags.parser import convert, load_mapping
from slime.config.flags.spec import Flag, did_you_mean, flags_of
from slime.config.reward_types import Grading
from slime.core.errors import ConfigError

_SPEC = re.compile(
    r"(?P<path>.*?)(?:@\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?(?::weight=(?P<weight>[^:]*))?"
)

_TASK = "reasoning-gym:"


@dataclass(kw_only=True, frozen=True)
class DataSpec:
    """`train.jsonl@[0:100]:weight=2` is path="train.jsonl", rows=slice(0, 100), weight=2.0."""

    path: str
    rows: slice = field(default_factory=lambda: slice(None))
    weight: float = 1.0

    @property
    def task(self) -> str | None:
        """Return `leg_counting` of `reasoning-gym:leg_counting`; None for a file."""
        return self.path.removeprefix(_TASK) if self.path.startswith(_TASK) else None

    @classmethod
    def parse(cls, text: str, flag: str = "--prompt-data") -> DataSpec:
        match = _SPEC.fullmatch(text)
        path = match["path"] if match else ""
        if not match or path in ("", _TASK) or re.search(r"@\[.*\]$", path):
            raise ConfigError(
                f"{flag} {text}: write a path or reasoning-gym:<task>, with @[0:100] or :weight=2"
            )
        return cls(
            path=path, rows=_parse_slice(match), weight=_parse_weight(match["weight"], flag, text)
        )


def dataset_names(specs: list[str]) -> list[str]:
    """Return a name for each dataset, such as "gsm8k" for gsm8k.jsonl@[0:100]; equal ones get a number."""
    stems = [Path(DataSpec.parse(spec).path).stem for spec in specs]
    return [
        stem if stems.count(stem) == 1 else f"{stem}-{number}" for number, stem in enumerate(stems)
    ]


def _parse_slice(match: re.Match[str]) -> slice:
    if match["start"] is None:
        return slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return slice(start, stop)


def _parse_weight(text: str | None, flag: str, spec: str) -> float:
    if text is None:
        return 1.0
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < 1e6:
        raise ConfigError(f"{flag} {spec}: weight must be a number above 0, not {text!r}")
    return weight


@dataclass(frozen=True, kw_only=True)
class EvalDataset:
    """One evaluation dataset with its settings; default: those of the --eval-* flags.

    EvalDataset(name="aime", path="aime-2024.jsonl", n_samples_per_prompt=16, temperature=0.6, ...)
    """

    name: str
    path: str
    n_samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    input_key: str
    label_key: str | None
    max_context_len: int | None = None
    max_prompt_len: int | None = None
    min_new_tokens: int | None = None
    # None: the value of the run's flag with that name
    rm_type: str | None = None
    rm_grading: Grading | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    custom_generate_function_path: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None


def pair_datasets(values: list[str], defaults: dict[str, Any]) -> list[EvalDataset]:
    """Return the datasets of --eval-prompt-data NAME PATH NAME PATH ..., or of one PATH."""
    if len(values) == 1 and (name := Path(DataSpec.parse(values[0]).path).stem):
        values = [name, *values]
    if len(values) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes NAME PATH pairs, not {len(values)} values: "
            "--eval-prompt-data aime /data/aime.jsonl"
        )
    return [
        EvalDataset(**{**defaults, "name": name, "path": path})
        for name, path in zip(values[::2], values[1::2], strict=True)
    ]


def read_eval_config(path: str, defaults: dict[str, Any]) -> list[EvalDataset]:
    """Return the datasets of an --eval-config file; errors name the file and the key."""
    content = load_mapping(path, "--eval-config")
    if list(content) == ["eval"] and isinstance(content["eval"], dict):
        content = content["eval"]
    for key in content:
        if key not in ("defaults", "datasets"):
            raise ConfigError(f"{path}: there is no key {key!r}: use 'defaults' and 'datasets'")
    shared = _settings(content.get("defaults") or {}, f"{path}: defaults")
    rows = content.get("datasets")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path}: datasets must be a list with at least one dataset")
    defaults = {**defaults, **shared}
    return [_dataset(row, f"{path}: datasets[{i}]", defaults) for i, row in enumerate(rows)]


def _dataset(row: Any, where: str, defaults: dict[str, Any]) -> EvalDataset:
    settings = _settings(row, where)
    for key in ("name", "path"):
        if key not in settings:
            raise ConfigError(f"{where}: {key} is missing")
    return EvalDataset(**{**defaults, **settings})


def _settings(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must hold 'key: value' lines")
    settings: dict[str, Any] = {}
    for key, raw in row.items():
        known = _known(key, where)
        if known.name in settings:
            raise ConfigError(f"{where}: {known.name} is given twice, once as {key}: remove one")
        settings[known.name] = convert(known, raw, f"{where}: {key}")
    return settings


def _known(key: Any, where: str) -> Flag:
    name = str(key).replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    if name not in _FIELDS:
        hint = did_you_mean(name, _FIELDS) or f": use one of {', '.join(_FIELDS)}"
        raise ConfigError(f"{where}: there is no key {key!r}{hint}")
    return _FIELDS[name]


_OTHER_NAMES = {"n_samples_per_eval_prompt": "n_samples_per_prompt"}
_FIELDS = {flag.name: flag for flag in flags_of(EvalDataset)}
