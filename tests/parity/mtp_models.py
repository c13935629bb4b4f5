"""Tiny checkpoints with multi-token-prediction (MTP) layers, and a naive loss of those layers.

The layers inside are Hugging Face's own decoder layers: a model is made with more layers than its config
says in the end, and the last ones become the inside of MTP layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime.core.types import RolloutBatch
from slime.weights.buckets import hf_views
from tests.fsdp import ROLLOUT_IDS
from tests.parity.tiny_families import NUM_LAYERS, make_family

VOCAB_SIZE = 260  # tests.fsdp samples tokens below 256
# name -> family, number of MTP layers
MODELS = {
    "mimo": ("mimo", 1),
    "mimo with two": ("mimo", 2),
    "glm4_moe": ("glm4_moe", 1),
    "deepseek_v3": ("deepseek_v3", 1),
    "glm4_moe_lite": ("glm4_moe_lite", 1),
}
NEXTN = {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"}
MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "proj": "input_proj",
    "norm": "final_layernorm",
}


def make_mtp_model(folder: Path, name: str) -> Path:
    """Write the checkpoint `folder`, and what `naive_model` needs beside it."""
    family, count = MODELS[name]
    whole = folder.with_name(f"{folder.name} whole")
    make_family(whole, family, num_hidden_layers=NUM_LAYERS + count, vocab_size=VOCAB_SIZE)
    stored = load_file(whole / "model.safetensors")
    kept = {n: t for n, t in stored.items() if "mtp_layers" not in n and "eh_proj" not in n}
    renamed = {_mtp_name(n, family): tensor for n, tensor in kept.items()}
    generator = torch.Generator().manual_seed(7)
    for layer in range(count):
        renamed |= _own_tensors(family, layer, renamed, generator)
    folder.mkdir()
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": count}
    config.pop("layer_types", None)
    config.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prefix(family: str, layer: int) -> str:
    if family == "mimo":
        return f"model.mtp_layers.{layer}."
    return f"model.layers.{NUM_LAYERS + layer}."


def _mtp_name(name: str, family: str) -> str:
    for layer in range(2):
        name = name.replace(f"model.layers.{NUM_LAYERS + layer}.", prefix(family, layer))
    return name


def _own_tensors(
    family: str, layer: int, tensors: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Norms and projection, and the copies that DeepSeek and GLM publish of what is shared."""
    names = MIMO if family == "mimo" else NEXTN
    hidden = tensors["model.norm.weight"].shape[0]
    here = prefix(family, layer)
    own = {
        f"{here}{names[part]}.weight": 1 + 0.2 * torch.randn(hidden, generator=generator)
        for part in ("enorm", "hnorm", "norm")
    }
    own[f"{here}{names['proj']}.weight"] = 0.2 * torch.randn(
        hidden, 2 * hidden, generator=generator
    )
    if family != "mimo":
        own[f"{here}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{here}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return own


class NaiveMtp:
    """One sample at a time, unpacked, the whole logits; the trunk and the layers are Hugging Face's."""

    def __init__(self, folder: Path, name: str) -> None:
        self.family, self.count = MODELS[name]
        whole = folder.with_name(f"{folder.name} whole")
        if self.family == "mimo":  # which transformers does not have: it is a Qwen2
            config = json.loads((whole / "config.json").read_text())
            config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
            (whole / "config.json").write_text(json.dumps(config))
        self.model: Any = AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager")
        self.model.set_experts_implementation("eager")
        self.layers = list(self.model.model.layers[NUM_LAYERS:])
        self.model.config.num_hidden_layers = NUM_LAYERS
        self.model.model.layers = self.model.model.layers[:NUM_LAYERS]
        stored = load_file(folder / "model.safetensors")
        names = MIMO if self.family == "mimo" else NEXTN
        self.own = [
            {
                part: stored[f"{prefix(self.family, layer)}{hf}.weight"].requires_grad_()
                for part, hf in names.items()
            }
            for layer in range(self.count)
        ]
        self._names = names

    def loss(self, rows: RolloutBatch) -> torch.Tensor:
        """Sum over samples of weight x cross-entropy, averaged over the MTP layers."""
        trained = {
            i: sum(rows.loss_masks[j].sum() for j, other in enumerate(ROLLOUT_IDS) if other == i)
            for i in ROLLOUT_IDS
        }
        total = torch.zeros(())
        for row, tokens in enumerate(rows.tokens):
            weight = 1 / (len(trained) * max(int(trained[ROLLOUT_IDS[row]]), 1))
            mask = torch.zeros(len(tokens))
            mask[-int(rows.response_lens[row]) :] = torch.from_numpy(rows.loss_masks[row]).float()
            total = total + weight * self._loss_of(torch.from_numpy(tokens).long(), mask)
        return total / self.count

    def _loss_of(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.model.model(input_ids=tokens[None], use_cache=False).last_hidden_state
            embedding = self.model.model.embed_tokens(tokens)[None]
        head, total = self.model.lm_head.weight.detach(), torch.zeros(())
        for depth, (layer, own) in enumerate(zip(self.layers, self.own, strict=True)):
            shift = depth + 1
            if len(tokens) - shift < 2:
                break
            hidden = hidden[:, : len(tokens) - shift]
            both = [
                self._norm(embedding[:, shift:], own["enorm"]),
                self._norm(hidden, own["hnorm"]),
            ]
            if self.family == "mimo":
                both.reverse()
            hidden = self._decoder_layer(layer, F.linear(torch.cat(both, dim=-1), own["proj"]))
            hidden = self._norm(hidden, own["norm"])
            logits = F.linear(hidden[0, :-1], head)
            losses = F.cross_entropy(logits, tokens[shift + 1 :], reduction="none")
            total = total + (losses * mask[shift + 1 :]).sum()
        return total

    def _decoder_layer(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        output = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(hidden, positions),
        )
        return output[0] if isinstance(output, tuple) else output

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = hidden.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps
        return hidden * scale.rsqrt() * weight

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of MTP layers, by checkpoint name."""
        grads = {
            f"model.layers.{NUM_LAYERS + number}.{name}": param.grad
            for number, layer in enumerate(self.layers)
            for name, param in layer.named_parameters()
            if param.grad is not None
        }
        views = dict(hf_views(grads.items(), model_type=self.model.config.model_type))
        found = {_mtp_name(name, self.family): grad for name, grad in views.items()}
        for layer, own in enumerate(self.own):
            for part, tensor in own.items():
                assert tensor.grad is not None
                found[f"{prefix(self.family, layer)}{self._names[part]}.weight"] = tensor.grad
        return found
