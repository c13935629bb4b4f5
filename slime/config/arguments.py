"""Parse the command line into the frozen record that the whole run reads.

    command line ─┐
    --config yaml ┼─▶ merge ─▶ derive the rest ─▶ validate ─▶ Args (read-only)
    defaults ─────┘

Flags are declared in `slime/config/flags/`; nothing outside this module and that folder sets a value.
"""

from __future__ import annotations

import sys
from typing import Any

from slime.config.checks.combinations import check_all
from slime.config.checks.declared import check_values
from slime.config.checks.engine_checks import check_installed
from slime.config.checks.file_checks import check_files
from slime.config.checks.model_checks import check_model
from slime.config.datasets import EvalDataset
from slime.config.derive import derive
from slime.config.env import read_env
from slime.config.flags import algorithm, rollout, run, train
from slime.config.flags.draft import Draft, Origin
from slime.config.flags.parser import read_command_line, read_config
from slime.config.flags.registry import all_flags
from slime.config.flags.registry import redact as redacted
from slime.config.flags.show import print_resolved
from slime.config.flags.values import nearest
from slime.config.installed import count_gpus

__all__ = ["Args", "EvalDataset", "parse_args", "print_resolved"]


class Args(
    run.Mode,
    run.Cluster,
    train.Model,
    rollout.Rollout,
    rollout.Data,
    rollout.Reward,
    rollout.Eval,
    algorithm.Algorithm,
    train.Optimizer,
    train.Checkpoint,
    run.Weights,
    run.FaultTolerance,
    run.Tracking,
    algorithm.Sft,
):
    """The resolved values of a run: one attribute per flag, read-only, picklable.

    A flag of Megatron, SGLang or the router that was not set is None: the package's own default
    applies. `replace` returns a changed copy.
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
        """Return where a value came from."""
        getattr(self, name)
        return self._origins.get(name, "default")

    def replace(self, **values: Any) -> Args:
        """Return a copy with other values, marked as derived."""
        for name in values:
            getattr(self, name)
        origins: dict[str, Origin] = {**self._origins, **dict.fromkeys(values, "derived")}
        return Args({**self.to_dict(redact=False), **values}, origins, self.warnings)

    def to_dict(self, redact: bool = True) -> dict[str, Any]:
        """Return every value that is set, by name; without `redact` also secrets."""
        hidden = ("_origins", "warnings")
        values = {name: value for name, value in vars(self).items() if name not in hidden}
        return {name: redacted(name, value) for name, value in values.items()} if redact else values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = {name: v for name, v in self.to_dict().items() if self.origin(name) != "default"}
        return f"Args({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def parse_args(argv: list[str] | None = None, *, offline: bool = False) -> Args:
    """Return the arguments of this process, or of `argv`; raise ConfigError if they are wrong.

    With `offline`, as with --dry-run, files and packages missing here are only warnings.
    """
    typed = read_command_line(sys.argv[1:] if argv is None else argv)
    configured = read_config(typed["config"]) if typed.get("config") else {}
    origins: dict[str, Origin] = {
        **dict.fromkeys(configured, "config"),
        **dict.fromkeys(typed, "command line"),
    }
    given = {**configured, **typed}
    offline = offline or bool(given.get("dry_run"))
    cluster = read_env().ray_address is not None
    return resolve(Draft(given, origins, gpus=count_gpus(), offline=offline, cluster=cluster))


def resolve(draft: Draft) -> Args:
    """Derive the values that were not given and check everything."""
    check_values(draft)
    derive(draft)
    check_all(draft)
    check_files(draft)
    check_installed(draft)
    check_model(draft)
    return Args(draft.values, draft.origins, tuple(draft.warnings))
