"""How a matrix product is cut for the programs of a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What a program of a product has before it, and how many loads of it are under way."""

    ROWS: int
    COLUMNS: int
    DEPTH: int
    num_warps: int
    num_stages: int
