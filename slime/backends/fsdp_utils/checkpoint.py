"""The FSDP trainer's part of a checkpoint folder.

fsdp/             parameters, optimizer moments and an updated reference model, written by
                  torch.distributed.checkpoint; can be loaded with any number of ranks. With LoRA
                  the parameters are the adapters; trainer.json names the base and its checksum
trainer.json      `CheckpointFacts`: rollout id, optimizer steps, the shape of every parameter ...
rng_<rank>.pt     RNG state of each rank
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor

from slime.backends.checkpoint_reader import DataReader, FileCheck, load_object
from slime.backends.fsdp_utils.loading import ShardedModel, zero_value_head
from slime.backends.fsdp_utils.lora import is_adapter
from slime.backends.fsdp_utils.optimizer import ShardedOptimizer
from slime.backends.lora import refuse_other_base_weights
from slime.config.lora import refuse_other_adapters
from slime.core.errors import UserError
from slime.runlog.checkpoint_files import record_checksums
from slime.runlog.checkpoint_folder import damaged

Tensors = dict[str, torch.Tensor | DTensor]

_FOLDER, _FACTS = "fsdp", "trainer.json"


@dataclass(kw_only=True, frozen=True)
class CheckpointFacts:
    """Contents of trainer.json: the metadata needed before tensors are read."""

    rollout_id: int
    num_steps: int
    has_optimizer: bool
    model_type: str
    shapes: dict[str, list[int]]
    optimizer: str = "adam"
    moment_steps: int | None = None  # updates that the moments contain; None: as many as num_steps
    has_ref: bool = False  # contains a reference model, updated by --ref-update-interval
    lora: dict[str, Any] | None = None  # LoraConfig of the adapters, the only parameters here
    base: dict[str, str] | None = None  # path and checksum of the adapters' base weights


class Checkpointer:
    """Save and load checkpoints of one model; every method is collective."""

    def __init__(self, timeout: timedelta | None = None, base: str = "") -> None:
        """`base` is the path of the weights that adapters are trained on."""
        self._base = {"path": base}
        # A separate group, so that a background save cannot interleave with training's collectives.
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self._group = group
        self._pending: Future[None] | None = None
        self._background = ThreadPoolExecutor(1)
        self._files = FileCheck(self._group)

    def save(
        self,
        path: str,
        rollout_id: int,
        model: ShardedModel,
        optimizer: ShardedOptimizer,
        *,
        ref: ShardedModel | None = None,
        with_optimizer: bool,
        in_background: bool,
    ) -> None:
        self.wait()
        folder = Path(path)
        base = None if model.lora is None else self._base | model.base_checksum
        if dist.get_rank() == 0:
            params = _saved_params(model, own=model.lora is not None)
            facts = CheckpointFacts(
                rollout_id=rollout_id,
                num_steps=optimizer.num_steps,
                has_optimizer=with_optimizer,
                model_type=model.module.hf.config.model_type,
                shapes={name: list(param.shape) for name, param in params.items()},
                optimizer=optimizer.kind,
                moment_steps=optimizer.moment_steps,
                has_ref=ref is not None,
                lora=None if model.lora is None else asdict(model.lora),
                base=base,
            )
            (folder / _FACTS).write_text(json.dumps(asdict(facts)) + "\n")
        torch.save(_rng_state(), folder / f"rng_{dist.get_rank()}.pt")
        tensors = _model_tensors(model, own=model.lora is not None)
        if with_optimizer:
            tensors |= _optimizer_tensors(optimizer)
        if ref is not None:
            tensors |= _ref_tensors(ref)
        if in_background:
            written = state_dict_saver.async_save(
                tensors, checkpoint_id=folder / _FOLDER, process_group=self._group
            )
            assert isinstance(written, Future)
            self._pending = self._background.submit(_record_checksums_of_files, folder, written)
        else:
            state_dict_saver.save(
                tensors, checkpoint_id=folder / _FOLDER, process_group=self._group
            )
            _record_checksums_of_files(folder)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def load_model(
        self, path: str, model: ShardedModel, *, adapters: bool = False
    ) -> CheckpointFacts:
        """Load the parameters and return the checkpoint's metadata.

        Of a model with LoRA load the base or, with `adapters`, the adapters to resume training.
        A critic can load an actor's checkpoint; its value head is then initialized to zero.
        """
        self._files.verify(path)
        facts = read_facts(path)
        only_own = adapters and model.lora is not None
        refuse_other_adapters(facts.lora, model.lora if only_own else None, path)
        if only_own:
            refuse_other_base_weights(facts.base, model.base_checksum, path)
        head = model.value_head
        absent = head if head and facts.shapes.get(head, [0])[0] != 1 else None
        _refuse_other_architecture(facts, _saved_params(model, own=only_own), path, absent)
        if absent:
            zero_value_head(model)
        self._read(path, _model_tensors(model, own=only_own, without=absent))
        return facts

    def load_optimizer(
        self, path: str, optimizer: ShardedOptimizer, *, moments: bool = True
    ) -> None:
        """Load moments, step count and RNG state; moments that were not saved stay at zero."""
        self._files.verify(path)
        facts = read_facts(path)
        moment_steps = 0
        if facts.has_optimizer and moments:
            _refuse_other_optimizer(facts, optimizer, path)
            self._read(path, _optimizer_tensors(optimizer))
            moment_steps = facts.num_steps if facts.moment_steps is None else facts.moment_steps
        optimizer.set_num_steps(facts.num_steps, moment_steps)
        _restore_rng(Path(path) / f"rng_{dist.get_rank()}.pt")

    def load_ref(self, path: str, ref: ShardedModel) -> None:
        self._read(path, _ref_tensors(ref))

    def _read(self, path: str, tensors: Tensors) -> None:
        reader = DataReader(Path(path) / _FOLDER)
        reader.refuse_objects(tensors)
        state_dict_loader.load(tensors, storage_reader=reader, process_group=self._group)


def _record_checksums_of_files(folder: Path, written: Future[object] | None = None) -> None:
    """Record the checksums of this rank's files, after waiting for `written`."""
    if written is not None:
        written.result()
    rank = dist.get_rank()
    record_checksums(folder, sorted((folder / _FOLDER).glob(f"__{rank}_*.distcp")), rank)


def read_facts(path: str) -> CheckpointFacts:
    file = Path(path) / _FACTS
    if not file.exists():
        raise UserError(f"{path} is not a checkpoint of the FSDP trainer: it has no {_FACTS}")
    try:
        return CheckpointFacts(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise damaged(Path(path), f"{_FACTS} cannot be read ({error})") from None


def is_checkpoint(path: str) -> bool:
    return (Path(path) / _FACTS).exists()


def _saved_params(model: ShardedModel, *, own: bool) -> dict[str, DTensor]:
    """Return the parameters that a checkpoint holds; with `own`, adapters and a critic's value head."""
    return model.own if own else {n: p for n, p in model.params.items() if not is_adapter(n)}


def _refuse_other_architecture(
    facts: CheckpointFacts, params: dict[str, DTensor], path: str, but: str | None
) -> None:
    shapes = {name: list(param.shape) for name, param in params.items()}
    names = (facts.shapes.keys() | shapes.keys()) - {but}
    differing = sorted(n for n in names if facts.shapes.get(n) != shapes.get(n))
    if not differing:
        return
    name = differing[0]
    raise UserError(
        f"{path} is a checkpoint of another architecture ({facts.model_type}) than --hf-checkpoint: "
        f"{name} is {facts.shapes.get(name, 'absent')} there and {shapes.get(name, 'absent')} here"
    )


def _refuse_other_optimizer(facts: CheckpointFacts, optimizer: ShardedOptimizer, path: str) -> None:
    if facts.optimizer != optimizer.kind:
        raise UserError(
            f"{path} was saved with --optimizer {facts.optimizer}, this run has {optimizer.kind}: use "
            f"--optimizer {facts.optimizer}, or start from its weights with --ref-load instead of --load"
        )


def _model_tensors(model: ShardedModel, *, own: bool, without: str | None = None) -> Tensors:
    named = model.tensors(without=without)
    if own:
        named = {name: param for name, param in model.own.items() if name != without}
    return {f"model.{name}": tensor.detach() for name, tensor in named.items()}


def _ref_tensors(ref: ShardedModel) -> Tensors:
    return {f"ref.{name}": tensor.detach() for name, tensor in ref.tensors().items()}


def _optimizer_tensors(optimizer: ShardedOptimizer) -> Tensors:
    return {f"optimizer.{name}": tensor for name, tensor in optimizer.state_tensors().items()}


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(file: Path) -> None:
    """Restore this rank's RNG state; a rank without a saved state keeps the seeded one."""
    if not file.exists():
        return
    state = load_object(file, file)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
