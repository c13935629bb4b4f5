"""Patterns over layers as Megatron's scripts write them: `2`, `[0,1,1]`, `[0]*3+[1]*89`."""

from __future__ import annotations

import re

from slime.core.errors import ConfigError

_PART = re.compile(r"\s*(?:\(\s*)?\[([01,\s]*)\](?:\s*\*\s*(\d+))?(?:\s*\))?\s*")


def layer_pattern(text: str | int | list[int], num_layers: int) -> list[int]:
    """One number per layer: 1 for a layer of experts. A plain number N means one such in N layers.

    >>> layer_pattern("[0]*1+[1]*3", 4)
    [0, 1, 1, 1]
    """
    if isinstance(text, list):
        pattern = text
    elif str(text).strip().isdigit():
        every = int(text)
        pattern = [int(layer % every == 0) for layer in range(num_layers)]
    else:
        pattern = [value for part in str(text).split("+") for value in _repeated(part, str(text))]
    if len(pattern) != num_layers:
        raise ConfigError(
            f"--moe-layer-freq {text} describes {len(pattern)} layers and the model has {num_layers}"
        )
    return pattern


def _repeated(part: str, text: str) -> list[int]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(
            f"--moe-layer-freq {text} is not a pattern: write a number or lists as [0]*3+[1]*89"
        )
    values = [int(value) for value in match[1].split(",") if value.strip()]
    return values * int(match[2] or 1)
