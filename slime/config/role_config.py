"""The file of --megatron-config-path: values of flags for one of the models of a run.

    actor:
      lr: 1.0e-6
    critic:
      lr: 1.0e-5
      load: /checkpoints/critic
    ref:
      load: /checkpoints/sft
      ckpt_step: 100

The same as a list, below `megatron` or not: [{role: critic, overrides: {lr: 1.0e-5}}].
"""

from __future__ import annotations

from typing import Any

from slime.config.flags.draft import Draft
from slime.config.flags.parser import convert, load_mapping
from slime.config.flags.registry import all_flags
from slime.config.flags.spec import flags_of, option_of
from slime.config.flags.train import Optimizer
from slime.core.errors import ConfigError

_OPTION = "--megatron-config-path"
# role -> name in the file -> the flag that sets it for that model alone
_OF_ROLE = {
    "critic": {"load": "critic_load", "save": "critic_save", "lr": "critic_lr"},
    "ref": {"load": "ref_load", "ckpt_step": "ref_ckpt_step"},
}
_OPTIMIZER = {flag.name for flag in flags_of(Optimizer)}


# Where a run starts: the command line overrides the file, as when a run is resumed.
_STARTS = ("load", "critic_load", "ref_load", "ckpt_step", "ref_ckpt_step")


def apply_role_config(draft: Draft) -> None:
    """Set the values of the file. They replace those of the command line, which are for all models.

    `critic_overrides` then holds the critic's own values, including --critic-lr, and `role_replaced`
    the replaced values of the command line, so that a repeated run reads both again.
    """
    path, critic, roles = draft["megatron_config_path"], {}, {}
    if path is not None and draft.need_file(path, _OPTION):
        roles = _read_roles(path)
    draft.derive("role_replaced", {})
    if "critic" in roles and draft["advantage_estimator"] != "ppo":
        draft.warn(f"{path}: critic has no effect without --advantage-estimator ppo")
    for name, value in roles.get("critic", {}).items():
        flag = _OF_ROLE["critic"].get(name)
        if flag is not None:
            _set(draft, flag, value)
        elif name in _OPTIMIZER:
            critic[name] = value
        elif value != roles.get("actor", {}).get(name, draft[name]):
            raise ConfigError(
                f"{path}: critic: {name}: the critic is trained with {option_of(name)} of the actor: "
                "remove it; it may have its own load, save and flags of the optimizer"
            )
    for name, value in roles.get("ref", {}).items():
        if name not in _OF_ROLE["ref"]:
            raise ConfigError(f"{path}: ref: {name}: the reference has load and ckpt_step only")
        _set(draft, _OF_ROLE["ref"][name], value)
    for name, value in roles.get("actor", {}).items():
        if name in _OPTIMIZER:  # the critic keeps what it has without the file
            own = _OF_ROLE["critic"].get(name)
            if own is None:
                critic.setdefault(name, draft[name])
            elif not draft.given(own):
                _set(draft, own, draft[name])
        _set(draft, name, value)
    if draft["critic_lr"] is not None:
        critic["lr"] = draft["critic_lr"]
    draft.derive("critic_overrides", critic)


def _set(draft: Draft, name: str, value: Any) -> None:
    if draft.given(name):
        if name in _STARTS:
            if draft[name] != value:
                draft.warn(f"{option_of(name)} {draft[name]} is used, not {value} of {_OPTION}")
            return
        draft["role_replaced"].setdefault(name, draft[name])
    draft.values[name], draft.origins[name] = value, "role file"


def _read_roles(path: str) -> dict[str, dict[str, Any]]:
    content: Any = load_mapping(path, _OPTION)
    if list(content) == ["megatron"]:
        content = content["megatron"]
    if isinstance(content, list):
        content = _from_list(content, path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold the flags of 'actor', 'critic' or 'ref'")
    return {str(role): _flags(role, values, path) for role, values in content.items()}


def _from_list(rows: list[Any], path: str) -> dict[str, Any]:
    roles: dict[str, Any] = {}
    for row in rows:
        if not isinstance(row, dict) or str(row.get("role")) in ("None", *roles):
            raise ConfigError(f"{path}: every entry needs a 'role' of its own and 'overrides'")
        roles[str(row["role"])] = row.get("overrides") or {}
    return roles


def _flags(role: Any, values: Any, path: str) -> dict[str, Any]:
    if role not in ("actor", "critic", "ref"):
        raise ConfigError(f"{path}: there is no role {role!r}: use actor, critic or ref")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {role} must hold 'flag: value' lines")
    found = {}
    for key, raw in values.items():
        name = str(key).removeprefix("--").replace("-", "_")
        flag = all_flags().get(name)
        if flag is None:
            raise ConfigError(f"{path}: {role}: there is no flag {option_of(name)}")
        value = convert(flag, raw, f"{path}: {role}: {key}")
        if flag.bounds and not flag.allows(value):
            raise ConfigError(f"{path}: {role}: {key} must be {flag.bounds}, not {value}")
        found[name] = value
    return found
