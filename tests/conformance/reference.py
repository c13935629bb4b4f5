"""What a model of transformers says, to compare servers with."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@cache
def model(path: Path):
    return AutoModelForCausalLM.from_pretrained(path).eval()


@torch.no_grad()
def log_probs(path: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of every next token: row k is behind ids[: k + 1]."""
    logits = model(path)(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits / temperature, -1)  # [T, V]


def check_greedy(path: Path, ids: list[int], output: list[int], most: int = 1000) -> None:
    """Every token (of the first ones) is the likeliest behind those before it, or as likely as that."""
    output = output[:most]
    table = log_probs(path, ids + output)[len(ids) - 1 : -1]
    chosen = table.gather(1, torch.tensor(output)[:, None])
    assert (table.max(-1, keepdim=True).values - chosen).max() < 1e-3


def greedy(path: Path, ids: list[int], count: int) -> list[int]:
    """Without regard to the end of text."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(int(log_probs(path, tokens)[-1].argmax()))
    return tokens[len(ids) :]
