"""From the command line to the frozen record that the whole run reads.

    command line ─┐
    --config yaml ┼─▶ merge ─▶ derive what is not given ─▶ validate ─▶ Args (read-only)
    defaults ─────┘

Flags are declared in `slime/utils/flags/`; nothing outside this module and that folder sets a value.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from slime.utils.errors import ConfigError
from slime.utils.eval_config import EvalDataset
from slime.utils.flags import rollout, run, train
from slime.utils.flags.checks import check_all
from slime.utils.flags.derive import derive
from slime.utils.flags.draft import Draft, Origin
from slime.utils.flags.file_checks import check_files
from slime.utils.flags.later import refuse_later
from slime.utils.flags.model_checks import check_model
from slime.utils.flags.parser import read_command_line
from slime.utils.flags.registry import all_flags, own_flags
from slime.utils.flags.value_checks import check_values
from slime.utils.flags.values import convert, nearest

REDACTED = "***"


class Args(
    run.Mode,
    run.Cluster,
    train.Model,
    rollout.Rollout,
    rollout.Data,
    rollout.Reward,
    rollout.Eval,
    train.Algorithm,
    train.Optimizer,
    train.Checkpoint,
    run.Weights,
    run.FaultTolerance,
    run.Tracking,
    train.Sft,
):
    """The resolved values of a run: one attribute per flag, read-only, picklable.

    A flag of Megatron, SGLang or the router that was not set is None: the package's own default
    applies. `replace` gives a changed copy.
    """

    precision: str  # "bf16" or "fp32"
    deterministic: bool
    eval_datasets: list[EvalDataset]
    warnings: tuple[str, ...]

    def __init__(
        self, values: dict[str, Any], origins: dict[str, Origin], warnings: tuple[str, ...] = ()
    ) -> None:
        self.__dict__.update(values, _origins=dict(origins), warnings=warnings)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"args.{name}: arguments are read-only; use args.replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"args.{name}: arguments are read-only")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in all_flags():
            return None
        near = nearest(name, all_flags())
        hint = f"; did you mean {near}?" if near else ""
        raise AttributeError(f"there is no flag for args.{name}{hint}")

    def origin(self, name: str) -> Origin:
        """Where a value came from."""
        getattr(self, name)
        return self._origins.get(name, "default")

    def replace(self, **values: Any) -> Args:
        """A copy with other values, marked as derived."""
        for name in values:
            getattr(self, name)
        origins: dict[str, Origin] = {**self._origins, **dict.fromkeys(values, "derived")}
        return Args({**self.to_dict(redact=False), **values}, origins, self.warnings)

    def to_dict(self, redact: bool = True) -> dict[str, Any]:
        """Every value that is set, by name; secrets are hidden unless asked for."""
        hidden = ("_origins", "warnings")
        values = {name: value for name, value in vars(self).items() if name not in hidden}
        return {name: _redact(name, value) for name, value in values.items()} if redact else values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        shown = {name: v for name, v in self.to_dict().items() if self.origin(name) != "default"}
        return f"Args({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def parse_args(argv: list[str] | None = None) -> Args:
    """The arguments of this process, or of `argv`; ConfigError says what is wrong with them."""
    typed = read_command_line(sys.argv[1:] if argv is None else argv)
    configured = read_config(typed["config"]) if typed.get("config") else {}
    origins: dict[str, Origin] = {
        **dict.fromkeys(configured, "config"),
        **dict.fromkeys(typed, "command line"),
    }
    given = {**configured, **typed}
    draft = Draft(given, origins, offline=bool(given.get("dry_run")))
    check_values(draft)
    derive(draft)
    check_all(draft)
    check_files(draft)
    check_model(draft)
    refuse_later(draft)
    return Args(draft.values, draft.origins, tuple(draft.warnings))


def read_config(path: str) -> dict[str, Any]:
    """The values of a YAML file; names are those of the flags, with dashes or underscores."""
    if not Path(path).is_file():
        raise ConfigError(f"--config: {path} is not there")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold 'flag: value' lines")
    values = {}
    for key, raw in content.items():
        name = str(key).lstrip("-").replace("-", "_")
        flag = all_flags().get(name)
        if flag is None or name == "config":
            near = nearest(name, all_flags())
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"{path}: there is no flag {key!r}{hint}")
        if raw is not None:
            values[name] = convert(flag, raw, f"{path}: {key}")
    return values


def print_resolved(args: Args) -> None:
    """Every value with where it came from, then the placement."""
    for name, value in args.to_dict().items():
        print(f"{name} = {value!r}  [{args.origin(name)}]")


def _redact(name: str, value: Any) -> Any:
    flag = own_flags().get(name) or all_flags().get(name)
    if flag is not None and flag.secret and value is not None:
        return REDACTED
    if isinstance(value, str):
        return re.sub(r"(?<=://)[^/@\s]+@", f"{REDACTED}@", value)
    return value
