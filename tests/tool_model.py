"""A tiny model that has learned, by imitation, to sometimes call a calculator and otherwise answer at random.

    3+9=<calc>3+9</calc>            its turn, ended by the stop string
    \\n<output>12</output>\\n         the tool
    \\boxed{12}                      its answer: right if it read the output
    3+9=\\boxed{7}                   a random answer: right one time in ten

What reinforcement learning can find is that calling the tool pays.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_PIECES = ("<calc>", "</calc>", "\n<output>", "</output>\n", "\\boxed{")
_SPECIAL = ("<|pad|>", "<|eos|>")
CALLS = 0.3  # share of the demonstrations that use the tool


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, the pieces around a call as one token each, and two special tokens."""
    to_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for piece in _PIECES:
        ((text, _),) = to_byte.pre_tokenize_str(piece)
        for end in range(1, len(text)):
            pair = (text[:end], text[end])
            if pair not in merges:
                merges.append(pair)
                vocab.append(text[: end + 1])
    bpe = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(vocab)}, merges=merges))
    bpe.pre_tokenizer, bpe.decoder = to_byte, decoders.ByteLevel()
    bpe.add_special_tokens(list(_SPECIAL))
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|eos|>", model_max_length=128
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def write_prompts(path: Path) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_tool_model(folder: Path, *, steps: int = 150, seed: int = 0) -> Path:
    """Train on new random demonstrations in every step; write model and tokenizer."""
    tokenizer, rng = make_tokenizer(), random.Random(seed)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, head_dim=16, initializer_range=0.05,
            max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(steps):
        ids, trained = _batch(tokenizer, rng)
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        labels = torch.where(trained, ids, -100)[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, rows: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and a mask of the tokens that the model generates, padded to one length."""
    rows_and_masks = [_demonstration(tokenizer, rng) for _ in range(rows)]
    width = max(len(ids) for ids, _ in rows_and_masks)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows_and_masks])
    trained = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows_and_masks])
    return ids, trained


def _demonstration(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[list[int], list[bool]]:
    a, b = rng.randrange(10), rng.randrange(10)
    parts = [(f"{a}+{b}=", False)]
    answer = rng.randrange(19)
    if rng.random() < CALLS:
        answer = a + b
        parts += [(f"<calc>{a}+{b}</calc>", True), (f"\n<output>{answer}</output>\n", False)]
    parts.append((f"\\boxed{{{answer}}}", True))
    ids, said = [], []
    for text, on in parts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids += tokens
        said += [on] * len(tokens)
    return [*ids, tokenizer.eos_token_id], [*said, True]
