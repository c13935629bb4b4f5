"""The Megatron trainer's part of a checkpoint folder, in megatron-core's torch_dist format.

common.pt, *.distcp, .metadata    parameters and optimizer state by global name, for any layout
                                  With LoRA the parameters are adapters and a critic's value head
trainer.json                      number of optimizer steps, model type, layout, base of adapters
rng_<rank>.pt                     RNG state of each rank; restored under the same layout only
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.checkpoint_reader import FileCheck, plain_refusals
from slime.backends.lora import refuse_other_base_weights
from slime.backends.megatron_utils.checkpoint_state import (
    drop_extra_state,
    fp8_state,
    fp8_state_to_load,
    has_stacked_layers,
    is_delayed,
    load_fp8_state,
    load_optimizer_state,
    optimizer_state,
    sharded_tensors,
    split_into_parts,
    use_stored_keys,
    without_extra_state,
)
from slime.backends.megatron_utils.hf_weights.rules import ADAPTERS
from slime.backends.megatron_utils.layers import ValueHead
from slime.backends.megatron_utils.mtp import (
    drop_mtp_layers,
    has_mtp_layers,
    refuse_other_mtp,
)
from slime.backends.megatron_utils.parallel import restore_rng, rng_state, unwrapped
from slime.backends.megatron_utils.patches import patch_checkpoints
from slime.backends.megatron_utils.vision import refuse_dropped_tower
from slime.config.lora import refuse_other_adapters
from slime.core.errors import ConfigError, UserError
from slime.runlog.checkpoint_files import record_checksums
from slime.runlog.checkpoint_folder import damaged, read_meta

if TYPE_CHECKING:
    from slime.backends.megatron_utils.lora import ModelAdapters
    from slime.backends.megatron_utils.optimizer import ScheduledOptimizer

_FACTS = "trainer.json"
_HEAD = "output_layer.weight"
_FP8 = "fp8"  # scales of delayed scaling
# Optimizer state per parameter and each layer under its own name: independent of the layout.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "non_homogeneous_layers": True}

Chunks = Sequence[torch.nn.Module]
Shapes = dict[str, tuple[int, ...]]  # by a tensor's name in the checkpoint

patch_checkpoints()
# megatron-core warns of corruption if the folder has other files, as a run's checkpoint does.
logging.getLogger(dist_checkpointing.serialization.__name__).setLevel(logging.ERROR)


@dataclass(kw_only=True, frozen=True)
class CheckpointFacts:
    """Facts of a checkpoint that are read before its tensors."""

    rollout_id: int
    num_steps: int | None  # None: saved by another tool, so unknown
    has_optimizer: bool
    model_type: str
    layout: list[int]  # tensor, pipeline, context, expert, data parallel sizes
    moment_steps: int | None = None  # updates that the moments contain; None: as many as num_steps
    lora: dict[str, Any] | None = None  # LoraConfig of the adapters, the only parameters here
    base: dict[str, str] | None = None  # path and checksum of the adapters' base weights

    @property
    def num_updates(self) -> int:
        return (self.num_steps or 0) if self.moment_steps is None else self.moment_steps


class Checkpointer:
    """Write and read checkpoints of one model; all ranks call every method together."""

    def __init__(
        self, model_type: str, adapters: ModelAdapters | None = None, base: str = ""
    ) -> None:
        """With `adapters` checkpoints hold only these; `base` is the path of their base weights."""
        self._model_type = model_type
        self._adapters, self._base = adapters, {"path": base}
        self._calls = AsyncCallsQueue()
        self._files = FileCheck()

    def save(
        self,
        path: str | Path,
        rollout_id: int,
        chunks: Chunks,
        optimizer: ScheduledOptimizer | None = None,
        *,
        num_steps: int = 0,
        in_background: bool = False,
        consume: bool = False,
    ) -> None:
        """Write into the existing folder `path`; without `optimizer` only the model.

        An optimizer without updates is not saved: its main parameters equal the model's. With
        `consume` saving takes hardly any extra memory and frees the model's weights.
        """
        self.wait()
        folder = Path(path)
        if optimizer is not None and not optimizer.has_moments:
            optimizer = None
        facts = CheckpointFacts(
            rollout_id=rollout_id,
            num_steps=num_steps,
            has_optimizer=optimizer is not None,
            model_type=self._model_type,
            layout=_layout(),
            moment_steps=None if optimizer is None else optimizer.moment_steps,
            lora=self._adapters and asdict(self._adapters.lora),
            base=self._adapters and self._base | self._adapters.base_checksum,
        )
        state = _state(chunks, optimizer, self._adapters)
        request = dist_checkpointing.save(
            split_into_parts(state) if consume else state,
            str(folder),
            async_sharded_save=in_background,
            content_metadata=dict(_METADATA),
        )
        if request is None:
            _record_checksums_of_files(folder, dist.get_rank())
        else:
            if request.async_fn is not None:
                write = partial(_write_with_checksums, request.async_fn, folder)
                request = request._replace(async_fn=write)
            self._calls.schedule_async_request(request)
        if dist.get_rank() == 0:
            (folder / _FACTS).write_text(json.dumps(asdict(facts)) + "\n")
        torch.save(rng_state(), folder / f"rng_{dist.get_rank()}.pt")

    def wait(self) -> None:
        """Wait until a background save is complete on all ranks; raise its exception."""
        self._calls.maybe_finalize_async_calls(blocking=True)

    def load_model(self, path: str | Path, chunks: Chunks) -> CheckpointFacts:
        """Load the parameters and return the facts of the checkpoint.

        With LoRA, load the base's parameters; `load` loads adapters. A critic may start from an actor's
        checkpoint; its value head then starts at zero. If the checkpoint has no multi-token-prediction
        layers, those of the model are left as they are.
        """
        return self._load(path, chunks, None, None)

    def load(
        self,
        path: str | Path,
        chunks: Chunks,
        optimizer: ScheduledOptimizer,
        *,
        moments: bool = True,
    ) -> CheckpointFacts:
        """Load parameters, optimizer and RNG state; without saved moments they start at zero."""
        facts = self._load(path, chunks, optimizer, self._adapters, moments=moments)
        if not facts.has_optimizer:
            optimizer.inner.reload_model_params()
        if facts.num_steps is not None:
            optimizer.set_num_steps(facts.num_steps)
        optimizer.has_moments = facts.has_optimizer
        optimizer.moment_steps = facts.num_updates if facts.has_optimizer else 0
        if facts.layout == _layout():
            restore_rng(Path(path) / f"rng_{dist.get_rank()}.pt")
        return facts

    def _load(
        self,
        path: str | Path,
        chunks: Chunks,
        optimizer: ScheduledOptimizer | None,
        adapters: ModelAdapters | None,
        *,
        moments: bool = True,
    ) -> CheckpointFacts:
        self._files.verify(path)
        facts = read_facts(path)
        refuse_other_adapters(facts.lora, adapters and adapters.lora, str(path))
        if not moments:
            facts = replace(facts, has_optimizer=False)
        with_optimizer = optimizer if facts.has_optimizer else None
        stored, models = _shapes_in(path), _by_key(chunks)
        config = _config(chunks)
        refuse_dropped_tower(list(models.values()), stored, path)
        if adapters is not None:
            refuse_other_base_weights(facts.base, adapters.base_checksum, path)
            _refuse_other_modules(adapters, path, stored)
        state = _state(chunks, with_optimizer, adapters, stored=stored)
        if optimizer is not None and is_delayed(config):
            state[_FP8] = fp8_state_to_load(list(models.values()), stored)
        headless = _drop_value_head(state, models, stored)
        if with_optimizer is None and not has_mtp_layers(stored):
            headless = drop_mtp_layers(state) or headless
        if with_optimizer:
            refuse_other_mtp(has_mtp_layers(stored), bool(config.mtp_num_layers), path)
        _refuse_other_sizes(state, facts, path, stored)
        _refuse_other_optimizer(state, path, stored)
        with plain_refusals():
            loaded = dist_checkpointing.load(state, str(path))
        assert isinstance(loaded, dict), "a tuple only if `strict` requests the differences"
        for key, model in models.items():
            _fill_in(model, loaded[key], fills_all=not (headless or adapters))
        if with_optimizer is not None:
            load_optimizer_state(with_optimizer.inner, loaded["optimizer"], facts.num_updates)
        load_fp8_state(list(models.values()), loaded.get(_FP8, {}))
        return facts


def _write_with_checksums(
    write: Callable[..., None], folder: Path, rank: int, *args: Any, **kwargs: Any
) -> None:
    """Run megatron-core's writer and checksum its files, both in the writer's process."""
    write(rank, *args, **kwargs)
    _record_checksums_of_files(folder, rank)


def _record_checksums_of_files(folder: Path, rank: int) -> None:
    record_checksums(folder, sorted(folder.glob(f"__{rank}_*.distcp")), rank)


def read_facts(path: str | Path) -> CheckpointFacts:
    file = Path(path) / _FACTS
    if not is_checkpoint(path):
        raise UserError(
            f"{path} is not a checkpoint of the Megatron trainer: it has no metadata.json"
        )
    refuse_other_format(path)
    if not file.exists():  # of another tool, whose optimizer state is not read
        last = read_meta(file.parent).rollout_id
        nothing: dict[str, Any] = {"num_steps": None, "has_optimizer": False, "layout": []}
        return CheckpointFacts(rollout_id=last, model_type="unknown", **nothing)
    try:
        return CheckpointFacts(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise damaged(Path(path), f"{_FACTS} cannot be read ({error})") from None


def refuse_other_format(path: str | Path) -> None:
    """Raise ConfigError unless the format is torch_dist; megatron-core also reads older ones."""
    try:
        found = json.loads((Path(path) / "metadata.json").read_text())["sharded_backend"]
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(Path(path), f"metadata.json cannot be read ({error!r})") from None
    if found != "torch_dist":
        raise ConfigError(
            f"{path} is a checkpoint in the format {found!r:.40}; slime reads torch_dist"
        )


def is_checkpoint(path: str | Path) -> bool:
    """Return whether it is a megatron-core checkpoint, not another folder with a metadata.json."""
    return all((Path(path) / name).exists() for name in ("metadata.json", "common.pt"))


def _by_key(chunks: Chunks) -> dict[str, GPTModel]:
    """Return chunks by Megatron's keys: `model`, or `model0`, `model1`, ... per virtual stage."""
    modules = [unwrapped(chunk) for chunk in chunks]
    if len(modules) == 1:
        return {"model": modules[0]}
    return {f"model{number}": module for number, module in enumerate(modules)}


def _state(
    chunks: Chunks,
    optimizer: ScheduledOptimizer | None,
    adapters: ModelAdapters | None,
    *,
    stored: Shapes | None = None,
) -> dict[str, Any]:
    """Return the sharded state dict to save or, with `stored` (a checkpoint's tensors), to load into.

    It holds the adapters if given, else all other parameters.
    """
    state: dict[str, Any] = {}
    metadata = _METADATA | {"non_homogeneous_layers": not has_stacked_layers(stored or ())}
    for key, chunk in _by_key(chunks).items():
        if adapters is not None:
            state[key] = adapters.sharded_state(chunk)
            continue
        whole = chunk.sharded_state_dict(metadata=dict(metadata))
        state[key] = {name: value for name, value in whole.items() if ADAPTERS not in name}
        drop_extra_state(state[key])
        if stored is not None:
            use_stored_keys(state[key], stored)
    if optimizer is not None:
        state["optimizer"] = optimizer_state(
            optimizer.inner, dict(state), _METADATA, is_loading=stored is not None
        )
    if stored is None and is_delayed(_config(chunks)):
        state[_FP8] = fp8_state(list(_by_key(chunks).values()))
    return state


def _config(chunks: Chunks) -> TransformerConfig:
    return unwrapped(chunks[0]).config


def _fill_in(chunk: torch.nn.Module, loaded: dict[str, Any], *, fills_all: bool) -> None:
    missing, unexpected = chunk.load_state_dict(loaded, strict=False)
    missing = [name for name in without_extra_state(missing) if ADAPTERS not in name]
    if unexpected or (missing and fills_all):
        raise RuntimeError(f"the checkpoint lacks {missing} and has unexpected {unexpected}")


def _drop_value_head(state: dict[str, Any], models: dict[str, GPTModel], stored: Shapes) -> bool:
    """Remove a critic's head from `state` if the checkpoint is an actor's; return whether it is."""
    for key, model in models.items():
        head = getattr(model, "output_layer", None)
        if isinstance(head, ValueHead) and stored.get(_HEAD, (0,))[0] != 1:
            state[key].pop(_HEAD, None)
            with torch.no_grad():
                head.weight.zero_()
            return True
    return False


def _refuse_other_sizes(
    state: dict[str, Any], facts: CheckpointFacts, path: str | Path, stored: Shapes
) -> None:
    for tensor in sharded_tensors({k: v for k, v in state.items() if k.startswith("model")}):
        found = stored.get(tensor.key)
        if found == tuple(tensor.global_shape) or (found and tensor.allow_shape_mismatch):
            continue
        raise UserError(
            f"{path} is a checkpoint of another architecture ({facts.model_type}) than "
            f"--hf-checkpoint: {tensor.key} is {list(found) if found else 'absent'} there and "
            f"{list(tensor.global_shape)} here"
        )


def _refuse_other_modules(adapters: ModelAdapters, path: str | Path, stored: Shapes) -> None:
    """Raise if the checkpoint has more adapters; `_refuse_other_sizes` refuses missing ones."""
    held = [k for k in stored if k.endswith(".lora_A") and not k.startswith("optimizer.")]
    if len(held) > len(adapters.map.modules):
        raise UserError(
            f"{path} was saved with adapters of other modules ({len(held)}) than this run has "
            f"({len(adapters.map.modules)}): use the --lora-target-modules of that run"
        )


def _refuse_other_optimizer(state: dict[str, Any], path: str | Path, stored: Shapes) -> None:
    missing = (t.key for t in sharded_tensors(state.get("optimizer")) if t.key not in stored)
    first = next(missing, None)
    if first is not None:
        raise UserError(
            f"{path} has no optimizer state {first}: it was saved with another choice of "
            "--optimizer, --use-distributed-optimizer or frozen parameters. Use those of that run, or start from "
            "its weights with --ref-load instead of --load"
        )


def _shapes_in(path: str | Path) -> Shapes:
    stored = dist_checkpointing.load_tensors_metadata(str(path))
    return {key: tuple(tensor.global_shape) for key, tensor in stored.items()}


def _layout() -> list[int]:
    state = parallel_state
    return [
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_data_parallel_world_size(),
    ]
