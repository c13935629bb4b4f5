"""Tiny random Hugging Face checkpoints with a byte tokenizer, made on the spot for tests.

make_tiny_checkpoint(tmp_path / "m")                        Qwen3, 2 layers, hidden 64
make_tiny_checkpoint(tmp_path / "m", "qwen3_moe", num_experts=8)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

PAD, EOS = "<|pad|>", "<|eos|>"
PAD_ID, EOS_ID = 256, 257
VOCAB_SIZE = 320  # 256 bytes, pad, eos, 62 reserved
# Messages are joined with nothing around them, so a chat prompt and a plain prompt tokenize alike.
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

_DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}
_SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
_FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, {**_DELTA_NET, **_SHARED_EXPERT}),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, _DELTA_NET),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        {**_DELTA_NET, **_SHARED_EXPERT},
    ),
}


def make_tiny_checkpoint(
    path: str | Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weight_scale: float = 10.0,
    with_tokenizer: bool = True,
    **config_overrides: object,
) -> Path:
    """Write a random checkpoint of the family under `path` and return the path.

    `weight_scale` multiplies the usual 0.02 initialisation of every matrix but the embedding: with it
    a random model's greedy output varies instead of repeating one token.
    """
    path = Path(path)
    config_class, model_class, family_fields = _FAMILIES[family]
    fields: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
        **family_fields,
        **config_overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**fields))
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            weight.data.mul_(weight_scale)
    model.to(dtype)
    model.save_pretrained(path)
    if with_tokenizer:
        make_byte_tokenizer().save_pretrained(path)
        # Readers built for transformers 4 do not know the class name version 5 writes; both load this.
        _set_keys(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return path


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8 text, then <|pad|>, <|eos|> and reserved specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(alphabet) - 2)]
    tokenizer.add_special_tokens([PAD, EOS, *reserved])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _set_keys(path: Path, **keys: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}, indent=2) + "\n")


def module_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (module name, tensor) of all that a checkpoint holds.

    These are parameters and persistent buffers (such as a router's correction bias); tied weights come
    once, under the first name.
    """
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
