"""Runs of a trainer that start from a folder of `peft`, and the same runs by a naive loop over its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from slime.config.lora import PEFT_PREFIX
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
