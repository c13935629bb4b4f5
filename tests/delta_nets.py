"""Tiny checkpoints of models with gated delta nets as they are published, and samples to pack."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from slime.core.types import RolloutBatch
from tests.fsdp import EPS, LR, Outcome

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
PUBLISHED = [*FAMILIES, "qwen3_5_moe_unfused"]
UNTRAINED = ("mtp.", "model.visual.")
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_MTP = {"mtp.fc.weight": (64, 128), "mtp.layers.0.self_attn.q_proj.weight": (64, 64)}
_MTP_EXPERTS = {"mtp.layers.0.mlp.experts.gate_up_proj": (4, 64, 64)}


def publish(models: dict[str, str], folder: Path) -> dict[str, str]:
    """Write checkpoints as they are published: MTP layers, a vision tower, experts fused or one by one."""
    found = {"qwen3_next": _with_mtp(Path(models["qwen3_next"]), folder / "qwen3_next")}
    for family, config_class in (("qwen3_5", Qwen3_5Config), ("qwen3_5_moe", Qwen3_5MoeConfig)):
        text = AutoConfig.from_pretrained(models[family]).to_dict()
        config = config_class(text_config=text, vision_config=_VISION, dtype="float32")
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        model.save_pretrained(folder / f"{family}_unfused")
        found[family] = _with_mtp(folder / f"{family}_unfused", folder / family, fused=True)
    found["qwen3_5_moe_unfused"] = str(folder / "qwen3_5_moe_unfused")
    return found


def _with_mtp(source: Path, target: Path, *, fused: bool = False) -> str:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors |= {name: torch.randn(shape) for name, shape in _MTP.items()}
    if fused:
        tensors = _fuse_experts(tensors)
    if any(name.endswith(".experts.gate_up_proj") for name in tensors):
        tensors |= {name: torch.randn(shape) for name, shape in _MTP_EXPERTS.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def _fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    single = {name for name in tensors if re.search(r"\.experts\.\d+\.", name)}
    fused = {name: tensor for name, tensor in tensors.items() if name not in single}
    for prefix in {name.partition(".experts.")[0] + ".experts" for name in single}:
        parts = [
            [tensors[f"{prefix}.{i}.{part}_proj.weight"] for i in range(4)]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = map(torch.stack, parts)
        fused[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"{prefix}.down_proj"] = down
    return fused


def make_sample_rows(lens: list[int]) -> RolloutBatch:
    """Samples of these lengths in which every token but the first is trained."""
    rng, count = np.random.default_rng(sum(lens)), len(lens)
    return RolloutBatch(
        tokens=[rng.integers(0, 256, length) for length in lens],
        response_lens=[length - 1 for length in lens],
        loss_masks=[np.ones(length - 1, np.int8) for length in lens],
        rewards=np.zeros(count),
        raw_rewards=np.zeros(count),
        truncated=np.zeros(count),
        group_indices=np.arange(count),
        sample_indices=np.arange(count),
        trajectory_ids=np.arange(count),
        loss_weights=[np.ones(length - 1, np.float32) for length in lens],
    )


def single_log_probs(model: torch.nn.Module, rows: RolloutBatch) -> list[torch.Tensor]:
    """Log-probs of the tokens after the first, by Hugging Face's model on one sample at a time."""
    columns = []
    for tokens in map(torch.tensor, rows.tokens):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        columns.append(torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1))
    return columns


def log_probs_and_gradient(
    model: torch.nn.Module, columns: list[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs by sample, and the gradient of a sum that weighs every token otherwise."""
    weighted = sum((c * torch.arange(1, len(c) + 1).cos()).sum() for c in columns)
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(weighted, params)
    return [c.detach() for c in columns], dict(zip(names, grads, strict=True))


def assert_same_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        # The decay's sums over tokens nearly cancel: rounding alone changes them by up to 1e-5.
        noisy = name.endswith(("A_log", "dt_bias", "in_proj_a.weight"))
        scale = grad.abs().max().clamp(min=1e-2 if noisy else 1e-9)
        atol = 5e-3 if noisy else 3e-5
        torch.testing.assert_close(found[name] / scale, grad / scale, rtol=0, atol=atol, msg=name)


def assert_same_weights(
    found: dict[str, torch.Tensor], expected: Outcome, steps: int, name: str
) -> None:
    """Allow what Adam makes of the error that `assert_same_gradient` allows, in two rollouts.

    A step is LR * m / (sqrt(v) + EPS): an error of the clipped gradient changes it by at most LR / EPS
    times the error, and most where the gradient is near zero.
    """
    norm = torch.stack([grad.norm() for grad in expected.grads.values()]).norm()
    for parameter, weight in expected.weights.items():
        error = 3e-5 * expected.grads[parameter].abs().max() / norm.clamp(min=1)
        allowed = 5e-6 + 1e-5 * weight.abs().max() + 2 * steps * LR / EPS * error
        gap = (found[parameter] - weight).abs().max()
        assert gap < allowed, f"{name}: {parameter} is off by {gap}, more than {allowed}"


def load_all(folder: str) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}
