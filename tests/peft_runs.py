"""Runs of a trainer that start from a folder of `peft`, and the same runs by a naive loop over its model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize

from slime.config.peft_files import PEFT_PREFIX
from tests.fsdp import Case, Outcome, naive_model, train_naively

KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}
BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48}


def peft_case(model: str, folder: Path, config: dict[str, Any], flags: dict[str, Any]) -> Case:
    """Return a run that starts from an adapter with A and B other than zero."""
    torch.manual_seed(1)
    init = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    peft = get_peft_model(naive_model(Case(model=model)), LoraConfig(**config, **init))
    peft.save_pretrained(str(folder))
    start = {"lora_adapter_path": str(folder), "lora_merge_for_rollout": True}
    steps = 8 // flags.get("global_batch_size", 8)
    return Case(model=model, steps=steps, flags={**flags, **start})


def peft_outcome(case: Case) -> Outcome:
    outcome = train_naively(case, peft_model(case, trainable=True))
    outcome.grads, outcome.weights = hf_names(outcome.grads), hf_names(outcome.weights)
    return outcome


def peft_model(case: Case, path: str | None = None, *, trainable: bool = False) -> PeftModel:
    path = path or case.flags["lora_adapter_path"]
    return PeftModel.from_pretrained(naive_model(case), path, is_trainable=trainable)


def hf_names(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(PEFT_PREFIX).replace(".default.", "."): t for name, t in named.items()
    }


# ---- experts with shared outer matrices

INNER, OUTER = "experts.base_layer.lora_A", "experts.lora_B"  # A of gate_up_proj, B of down_proj


def with_shared_outer(case: Case, folder: Path, num_experts: int) -> Case:
    """Return the case with the outer matrices of the first expert in all of them."""
    source = Path(case.flags["lora_adapter_path"])
    rank = json.loads((source / "adapter_config.json").read_text())["r"]
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if (repeated := _repeated(name, rank, num_experts)) is not None:
            tensors[name] = repeated(repeated.right_inverse(tensor))
    save_file(tensors, folder / "adapter_model.safetensors")
    flags = {"lora_adapter_path": str(folder), "lora_experts_shared_outer": True}
    return replace(case, flags={**case.flags, **flags})


def shared_outcome(case: Case, rank: int, num_experts: int) -> Outcome:
    """Train `peft`'s model naively; torch derives its outer matrices from those that experts share."""
    model = peft_model(case, trainable=True)
    for name, module in list(model.named_modules()):
        repeated = _repeated(name.removesuffix(".default") + ".weight", rank, num_experts)
        if repeated is not None and isinstance(module, torch.nn.Linear):
            parametrize.register_parametrization(module, "weight", repeated)
    outcome = train_naively(case, model)
    outcome.grads, outcome.weights = (
        {n.replace("parametrizations.weight.original", "weight"): t for n, t in hf_names(o).items()}
        for o in (outcome.grads, outcome.weights)
    )
    return outcome


class Repeated(torch.nn.Module):
    """The matrices of all experts in PEFT's layout, of one that they share."""

    def __init__(self, num_experts: int, dim: int, rank: int) -> None:
        super().__init__()
        self.num_experts, self.dim, self.rank = num_experts, dim, rank

    def forward(self, one: torch.Tensor) -> torch.Tensor:
        if self.dim == 0:
            return one.repeat(self.num_experts, 1)
        return one.repeat_interleave(self.num_experts, dim=1)

    def right_inverse(self, every: torch.Tensor) -> torch.Tensor:
        return every[: self.rank] if self.dim == 0 else every[:, :: self.num_experts]


def _repeated(name: str, rank: int, num_experts: int) -> Repeated | None:
    if name.endswith(f"{INNER}.weight"):
        return Repeated(num_experts, 0, rank)
    return Repeated(num_experts, 1, rank) if name.endswith(f"{OUTER}.weight") else None
