"""Read --sglang-config and --prefill-num-servers into the models that engines serve.

The file of --sglang-config lists models, and for each of them groups of equal engines::

    sglang:
      - name: policy                # the first model that receives weights generates by default
        server_groups:
          - {worker_type: regular, num_gpus: 2}
          - {worker_type: regular, num_gpus: 1, overrides: {max_running_requests: 8}}
      - name: judge
        model_path: /models/judge   # another model than --hf-checkpoint: frozen
        server_groups:
          - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}
      - name: free
        server_groups:
          - {worker_type: placeholder, num_gpus: 1}   # GPUs without an engine

GPUs are counted in the order of the file: here 0 and 1 for two engines of the policy, 2 for the third, 3 and
4 for the judge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config.engine_groups import (
    DEFAULT_MODEL,
    ServedModel,
    ServerGroup,
    WorkerType,
    gpu_ranges,
    serving_groups,
)
from slime.config.flags.draft import Draft
from slime.config.flags.engine_options import OWNED
from slime.config.flags.parser import convert, load_mapping
from slime.config.flags.registry import all_flags, options
from slime.config.flags.spec import Flag, did_you_mean, flags_of, option_of
from slime.core.errors import ConfigError

# option -> what to write in its place
_OF_THE_FILE = {
    **OWNED,
    "model_path": "give the model another model_path",
    "tp_size": "use num_gpus_per_engine",
    "disaggregation_mode": "use worker_type",
}


@dataclass(frozen=True, kw_only=True)
class _ModelRow:
    """The keys of a model in the file."""

    name: str
    server_groups: list[dict[str, Any]]
    model_path: str | None = None
    update_weights: bool | None = None
    num_gpus_per_engine: int | None = None


_MODEL = {flag.name: flag for flag in flags_of(_ModelRow)}
_GROUP = {flag.name: flag for flag in flags_of(ServerGroup)}


def derive_models(draft: Draft) -> None:
    """Set engine_models: from --sglang-config, or from --prefill-num-servers; empty with neither."""
    for name in ("sglang_config", "prefill_num_servers"):
        if draft[name] and draft["rollout_external"]:
            raise ConfigError(f"{option_of(name)} is for engines that slime starts: remove it")
    draft.derive("engine_models", [])
    path = draft["sglang_config"]
    if path and draft.need_file(path, "--sglang-config"):
        draft.derive("engine_models", _read_file(path, draft))


def derive_split(draft: Draft) -> None:
    """Make the first --prefill-num-servers engines prefill and the others decode."""
    prefill, size = draft["prefill_num_servers"], draft["rollout_num_gpus_per_engine"]
    if prefill is None or not draft["rollout_num_gpus"]:
        return
    engines = draft["rollout_num_gpus"] // size
    if not prefill < engines:
        raise ConfigError(
            f"--prefill-num-servers {prefill} leaves none of the {engines} engines for decode: lower it, or "
            "raise --rollout-num-gpus"
        )
    parts: list[tuple[WorkerType, int]] = [("prefill", prefill), ("decode", engines - prefill)]
    groups = [
        ServerGroup(worker_type=role, num_gpus=count * size, num_gpus_per_engine=size)
        for role, count in parts
    ]
    model = ServedModel(
        name=DEFAULT_MODEL,
        model_path=draft["hf_checkpoint"],
        update_weights=True,
        groups=tuple(groups),
    )
    draft.derive("engine_models", [model])


def derive_total(draft: Draft, training: int) -> None:
    """Set --rollout-num-gpus to the sum of the groups, or refuse another value."""
    path = draft["sglang_config"]
    total = sum(group.num_gpus for model in draft["engine_models"] for group in model.groups)
    wanted, what = draft["rollout_num_gpus"], "--rollout-num-gpus is"
    if wanted is None and draft["colocate"]:
        wanted, what = training, "with --colocate the training GPUs are"
    if wanted is not None and wanted != total:
        raise ConfigError(
            f"{path}: the groups have {total} GPUs in all and {what} {wanted}: make them equal; a group "
            "with worker_type: placeholder leaves GPUs without an engine"
        )
    if draft["colocate"]:
        _check_colocated(draft, training)
    draft.derive_if_unset("rollout_num_gpus", total)


def _check_colocated(draft: Draft, training: int) -> None:
    """Refuse updated engines outside the training GPUs: weights are shared through the GPU's memory."""
    models = draft["engine_models"]
    updated = [m.update_weights for m, g in serving_groups(models) for _ in range(g.num_engines)]
    for receives, gpus in zip(updated, gpu_ranges(models, 0, 1), strict=True):
        if receives and gpus.stop > training:
            raise ConfigError(
                f"{draft['sglang_config']}: with --colocate, models that receive weights need engines on "
                f"the {training} training GPUs, the first of the file: move frozen models behind them"
            )


def _read_file(path: str, draft: Draft) -> list[ServedModel]:
    content = load_mapping(path, "--sglang-config")
    for key in content:
        if key != "sglang":
            raise ConfigError(f"{path}: there is no key {key!r}: list the models under 'sglang'")
    rows = content.get("sglang")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path}: sglang must be a list with at least one model")
    models = [_model(row, f"{path}: sglang[{i}]", draft) for i, row in enumerate(rows)]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: two models are named {name!r}: give each its own name")
    if not any(model.update_weights for model, _ in serving_groups(models)):
        raise ConfigError(
            f"{path}: no engine would receive the trained weights: one model must be --hf-checkpoint (no "
            "model_path), without update_weights: false, and have a group that is no placeholder"
        )
    return models


def _model(row: Any, where: str, draft: Draft) -> ServedModel:
    values = _read(row, _MODEL, where, required=("name", "server_groups"))
    if not re.fullmatch(r"[\w.-]+", values["name"]):
        raise ConfigError(
            f"{where}: name: {values['name']!r} names a log file: use letters, digits, '.', '_' and '-'"
        )
    trained = draft["hf_checkpoint"]
    path = str(Path(values.get("model_path", trained)).expanduser())
    same = Path(path).resolve() == Path(trained).expanduser().resolve()
    if draft.offline and not Path(path).exists() and Path(path).name == Path(trained).name:
        path, same = trained, True  # `slime plan` replaced it by a config.json of its own
    updates = values.get("update_weights", same)
    if updates and not same:
        raise ConfigError(
            f"{where}: update_weights: true needs the model that is trained, and model_path {path} is not "
            f"--hf-checkpoint {trained}: remove one of the two"
        )
    size = values.get("num_gpus_per_engine", draft["rollout_num_gpus_per_engine"])
    read = [
        _group(group, f"{where}.server_groups[{i}]", size, updates)
        for i, group in enumerate(values["server_groups"])
    ]
    model = ServedModel(
        name=values["name"], model_path=path, update_weights=updates, groups=tuple(read)
    )
    _check_roles(model, where)
    return model


def _group(row: Any, where: str, size: int, updates: bool) -> ServerGroup:
    values = _read(row, _GROUP, where, required=("worker_type", "num_gpus"))
    size = values.get("num_gpus_per_engine", size)
    given = values.get("overrides", {})
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: overrides must hold 'option: value' lines")
    group = ServerGroup(
        worker_type=values["worker_type"],
        num_gpus=values["num_gpus"],
        num_gpus_per_engine=size,
        overrides=dict(_override(key, raw, where, updates) for key, raw in given.items()),
    )
    if group.num_gpus < 1 or size < 1:
        raise ConfigError(f"{where}: num_gpus and num_gpus_per_engine must be at least 1")
    if group.num_gpus % size and group.worker_type != "placeholder":
        raise ConfigError(
            f"{where}: num_gpus {group.num_gpus} cannot be split into engines of num_gpus_per_engine {size}"
        )
    return group


def _override(key: Any, raw: Any, where: str, updates: bool) -> tuple[str, Any]:
    name = str(key).removeprefix("--").replace("-", "_")
    flag = all_flags().get(f"sglang_{name}") or options().get(option_of(f"sglang_{name}"))
    if flag is None or flag.family != "sglang":
        known = [n.removeprefix("sglang_") for n, f in all_flags().items() if f.family == "sglang"]
        raise ConfigError(
            f"{where}: SGLang's server has no option {key!r}{did_you_mean(name, known)}"
        )
    short = flag.name.removeprefix("sglang_")
    if short in _OF_THE_FILE:
        raise ConfigError(f"{where}: {key} is set by slime: {_OF_THE_FILE[short]}")
    if short == "dtype" and updates:
        raise ConfigError(
            f"{where}: dtype: all engines that receive weights hold them in one type: use --sglang-dtype"
        )
    return flag.name, convert(flag, raw, f"{where}: {key}")


def _read(row: Any, known: dict[str, Flag], where: str, required: Sequence[str]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must hold 'key: value' lines")
    for key in row:
        if key not in known:
            hint = did_you_mean(str(key), known) or f": use {', '.join(known)}"
            raise ConfigError(f"{where}: there is no key {key!r}{hint}")
    given = {key: raw for key, raw in row.items() if raw is not None}
    for key in required:
        if not given.get(key):
            raise ConfigError(f"{where}: {key} is missing")
    return {key: convert(known[key], raw, f"{where}: {key}") for key, raw in given.items()}


def _check_roles(model: ServedModel, where: str) -> None:
    roles = {group.worker_type for group in model.groups} - {"placeholder"}
    if model.split and roles != {"prefill", "decode"}:
        raise ConfigError(
            f"{where}: the groups of a model are either all regular, or prefill and decode, at least one of "
            f"each; this model has {', '.join(sorted(roles))}"
        )
