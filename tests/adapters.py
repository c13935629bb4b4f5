"""LoRA adapters for tests, made by PEFT, which is also what their effect is compared with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    base: Path, folder: Path, *, seed: int = 0, rank: int = 4, targets: Any = ALL, **options: Any
) -> Path:
    """Save a PEFT adapter of the base whose B is not zero, so that it changes the output."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **options)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3 / math.sqrt(rank))
    adapted.save_pretrained(str(folder))
    return folder


@torch.inference_mode()
def peft_log_probs(base: Path, folder: Path | None, token_ids: list[int]) -> torch.Tensor:
    """Return the log-probs of all tokens but the first by PEFT on the Hugging Face model."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder).eval()
    ids = torch.tensor([token_ids])
    log_probs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None]).squeeze(1)
