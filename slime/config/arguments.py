"""Parse the command line into the frozen record that the whole run reads.

    command line ─┐
    --config yaml ┼─▶ merge ─▶ derive the rest ─▶ validate ─▶ Args (read-only)
    defaults ─────┘

The command line wins over --config, both win over derived values and defaults. --megatron-config-path
replaces values of its role, given ones too (`role_config.py`). Environment variables set no flag.
Flags are declared in `slime/config/flags/`, with the rules of each, and derived in `derive.py` (those of
LoRA: `lora.py`). `checks/` refuses combinations; those of batch sizes and lengths: `combinations.py`.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Container
from typing import Any
from urllib.parse import urlsplit

from slime.config.checks.combinations import check_all
from slime.config.checks.engine_checks import check_installed
from slime.config.checks.file_checks import check_files
from slime.config.checks.model_checks import check_model
from slime.config.checks.model_types import check_images
from slime.config.datasets import EvalDataset
from slime.config.derive import derive
from slime.config.engine_groups import ServedModel, engines_of
from slime.config.env import read_env
from slime.config.flags.draft import Draft, Origin, check_values
from slime.config.flags.parser import (
    AddArguments,
    read_command_line,
    read_config,
    read_custom_arguments,
    read_custom_config,
)
from slime.config.flags.registry import OwnFlags, all_flags
from slime.config.flags.registry import redact as redacted
from slime.config.flags.spec import did_you_mean
from slime.config.installed import count_gpus
from slime.config.role_config import apply_role_config
from slime.core.errors import ConfigError
from slime.utils.addresses import port_of
from slime.utils.printable import safe_text

__all__ = ["Args", "EvalDataset", "parse_args", "print_resolved"]

_RESULTS = "Resolved"  # the group of values that are derived and not flags


class Args(OwnFlags):
    """The resolved values of a run: one attribute per flag, read-only, picklable.

    A flag of Megatron, SGLang or the router that was not set is None: the package's own default
    applies. `replace` returns a changed copy. Hooks may set names that are no flags, in their own
    process; --custom-config-path and `parse_args(add_custom_arguments=fn)` set them in all processes.
    """

    precision: str  # "bf16" or "fp32"
    deterministic: bool
    eval_datasets: list[EvalDataset]
    engine_models: list[ServedModel]  # of --sglang-config; empty: one group of equal engines
    critic_overrides: dict[str, Any]  # flags of the optimizer with another value for the critic
    role_replaced: dict[str, Any]  # given values that --megatron-config-path replaced
    warnings: tuple[str, ...]

    def __init__(
        self, values: dict[str, Any], origins: dict[str, Origin], warnings: tuple[str, ...] = ()
    ) -> None:
        self.__dict__.update(values, _origins=dict(origins), warnings=warnings)

    def __setattr__(self, name: str, value: object) -> None:
        if not self.is_free(name):
            raise AttributeError(
                f"args.{name}: flags are read-only; args.replace({name}=...) returns a changed copy"
            )
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if not self.is_free(name) or name not in vars(self):
            raise AttributeError(f"args.{name}: only names that are no flags can be deleted")
        del self.__dict__[name]

    @classmethod
    def is_free(cls, name: str) -> bool:
        """Return whether hooks may set the name: it is no flag, no result of parsing and no method."""
        fixed = ("_origins", *Args.__annotations__)
        return name not in all_flags() and name not in fixed and not hasattr(cls, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in all_flags():
            return None
        raise AttributeError(f"there is no flag for args.{name}{_did_you_mean(name)}")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained beside the actor; its values are the input of GAE."""
        return self.advantage_estimator == "ppo" and self.loss_type != "sft_loss"

    @property
    def num_training_gpus(self) -> int:
        """Return the number of the trainer's GPUs, or of its processes without GPUs."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    def origin(self, name: str) -> Origin:
        """Return where a value came from."""
        getattr(self, name)
        return self._origins.get(name, "default")

    def replace(self, **values: Any) -> Args:
        """Return a copy with other values, marked as derived."""
        for name in values:
            if name not in vars(self) and name not in all_flags():
                hint = _did_you_mean(name) or f": set it with args.{name} = ..."
                raise AttributeError(f"args.{name} is no flag{hint}")
        origins: dict[str, Origin] = {**self._origins, **dict.fromkeys(values, "derived")}
        return Args({**self.to_dict(redact=False), **values}, origins, self.warnings)

    def set_router(self, url: str) -> None:
        """Set --sglang-router-ip and -port to the running router or engine, for hooks that post to it."""
        host, port = _host_and_port(url)
        self.__dict__.update(sglang_router_ip=host, sglang_router_port=port)

    def set_model_routers(self, urls: dict[str, str]) -> None:
        """Set `sglang_model_routers` to {name: (ip, port)} of each served model, for hooks."""
        self.__dict__.update(
            sglang_model_routers={name: _host_and_port(url) for name, url in urls.items()}
        )

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


def parse_args(
    argv: list[str] | None = None,
    *,
    offline: bool = False,
    add_custom_arguments: AddArguments | None = None,
) -> Args:
    """Return the arguments of this process, or of `argv`; raise ConfigError if they are wrong.

    With `offline`, as with --dry-run, files and packages missing here are only warnings.
    `add_custom_arguments(parser)` adds options of the caller's own, which become attributes too.
    """
    argv = sys.argv[1:] if argv is None else argv
    own, given, origins = _read_all(argv, add_custom_arguments)
    offline = offline or bool(given.get("dry_run"))
    cluster = read_env().ray_address is not None
    draft = Draft(given, origins, gpus=count_gpus(), offline=offline, cluster=cluster)
    _add_custom(draft, own, "add_custom_arguments", "own option")
    return resolve(draft)


def _read_all(
    argv: list[str], add: AddArguments | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Origin]]:
    """Return the options that the caller added, the flags that were given, and where each came from."""
    if add is None:
        return {}, *read_given(argv)
    own, rest = read_custom_arguments(add, argv)
    given, origins = read_given(rest, own)
    configured = {name: given.pop(name) for name in own if name in given}
    for name in configured:
        del origins[name]
    return read_custom_arguments(add, argv, configured)[0], given, origins


def read_given(
    argv: list[str], own: Container[str] = ()
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Return the values of a command line and of its --config file, and where each came from.

    `own` are names of options that the caller added; the file may set them too.
    """
    typed = read_command_line(argv)
    configured = read_config(typed["config"], own) if typed.get("config") else {}
    origins: dict[str, Origin] = {
        **dict.fromkeys(configured, "config"),
        **dict.fromkeys(typed, "command line"),
    }
    return {**configured, **typed}, origins


def resolve(draft: Draft) -> Args:
    """Derive the values that were not given and check everything."""
    own = draft["custom_config_path"]
    if own is not None and draft.need_file(own, "--custom-config-path"):
        _add_custom(draft, read_custom_config(own), f"--custom-config-path {own}", "custom")
    apply_role_config(draft)
    check_values(draft)
    derive(draft)
    check_all(draft)
    check_files(draft)
    check_installed(draft)
    check_model(draft)
    check_images(draft)
    return Args(draft.values, draft.origins, tuple(draft.warnings))


def _add_custom(draft: Draft, values: dict[str, Any], where: str, origin: Origin) -> None:
    """Add values that are no flags, for hooks."""
    for name, value in values.items():
        if not Args.is_free(name) or name in draft.values:
            raise ConfigError(f"{where}: args.{name} is already taken: choose another name")
        draft.values[name] = value
        draft.origins[name] = origin


@functools.cache
def _did_you_mean(name: str) -> str:
    """Return a suggestion for a name; cached, since hooks call getattr(args, name, default) often."""
    return did_you_mean(name, all_flags())


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if parts.port is not None:
        host = host.rpartition(":")[0]
    return host, port_of(parts)


def resolved_lines(args: Args, *, every: bool = True) -> list[str]:
    """Return all values by group, each with its origin; without `every`, those that were set or derived."""
    lines = []
    for group, rows in (_grouped(args) if every else _not_default(args)).items():
        width = max(len(name) for name, _, _ in rows)
        lines += ["", group]
        lines += [
            f"  {name:<{width}}  {origin:<12}  {_text(value)}" for name, value, origin in rows
        ]
    return lines[1:]


def placement_lines(args: Args) -> list[str]:
    """Return the GPUs, or CPU processes, of trainer and engines, and the sizes of a rollout."""
    unit = "GPU" if count_gpus() else "CPU process"
    training = args.num_training_gpus
    layout = "colocated: the engines share them" if args.colocate else "disaggregated"
    total = training if args.colocate else training + args.rollout_num_gpus
    nodes = f"{args.actor_num_nodes} x {args.actor_num_gpus_per_node}"
    return [
        f"trainer    {_count(training, unit)} ({nodes}), {args.train_backend}, {args.precision}",
        *(f"engines    {line}, {args.rollout_engine}" for line in _engine_lines(args, unit)),
        f"in all     {_count(total, unit)}, {layout}",
        f"weights    {args.update_weight_transport}, {args.update_weight_buffer_size / 2**20:g} MiB "
        "at a time" + (", verified" if args.check_weight_update_equal else ", not verified"),
        f"rollout    {args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = "
        f"{args.rollout_batch_size * args.n_samples_per_prompt} = "
        f"{_count(args.num_steps_per_rollout, 'step')} x {args.global_batch_size} samples",
        f"run        {args.num_rollout} rollouts, "
        f"{_count(args.num_rollout * args.num_steps_per_rollout, 'optimizer step')}",
    ]


def _engine_lines(args: Args, unit: str) -> list[str]:
    """Return one line for each kind of engine, such as "judge (frozen): 2 of 1 GPU each"."""
    if not args.engine_models:
        engines = args.rollout_num_gpus // args.rollout_num_gpus_per_engine
        return [f"{engines} of {_count(args.rollout_num_gpus_per_engine, unit)} each"]
    kinds = Counter(
        (spec.model, "" if spec.update_weights else " (frozen)", spec.worker_type, len(spec.gpus))
        for spec in engines_of(args)
    )
    return [
        f"{model}{frozen}: {count} {role} of {_count(size, unit)} each"
        for (model, frozen, role, size), count in kinds.items()
    ]


def print_resolved(args: Args, *, every: bool = True) -> None:
    lines = resolved_lines(args, every=every)
    sections = [lines, ["Placement", *("  " + li for li in placement_lines(args))]]
    if args.warnings:
        sections.append(["Warnings", *("  " + warning for warning in args.warnings)])
    print(safe_text("\n\n".join("\n".join(lines) for lines in sections)))


def _not_default(args: Args) -> dict[str, list[tuple[str, Any, str]]]:
    """Return what the user set, and what was derived and is not empty."""
    rows = [(name, value, args.origin(name)) for name, value in args.to_dict().items()]
    rows = [row for row in rows if row[2] != "default" and row[0] != "dry_run"]
    derived = [row for row in rows if row[2] == "derived" and row[1] not in (None, [], {})]
    groups = {"Set": [row for row in rows if row[2] != "derived"], "Derived": derived}
    return {group: rows for group, rows in groups.items() if rows}


def _grouped(args: Args) -> dict[str, list[tuple[str, Any, str]]]:
    flags = all_flags()
    groups: dict[str, list[tuple[str, Any, str]]] = {flag.group: [] for flag in flags.values()}
    groups[_RESULTS] = []
    for name, value in args.to_dict().items():
        group = flags[name].group if name in flags else _RESULTS
        groups[group].append((name, value, args.origin(name)))
    return {group: rows for group, rows in groups.items() if rows}


def _text(value: Any) -> str:
    if isinstance(value, list) and value and hasattr(value[0], "path"):  # evaluation datasets
        return ", ".join(f"{item.name} ({item.path})" for item in value)
    if isinstance(value, list) and value and isinstance(value[0], ServedModel):
        return ", ".join(f"{item.name} ({item.model_path})" for item in value)
    return "-" if value is None else str(value)


def _count(number: int, unit: str) -> str:
    plural = "es" if unit.endswith("ss") else "s"
    return f"{number} {unit}{'' if number == 1 else plural}"
