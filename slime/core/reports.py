"""Results that actors return to the driver: numbers and references, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class RolloutResult:
    """Result of one generate call: references for the trainer, metrics for the user."""

    batch_refs: list[Any] = field(default_factory=list)  # one per data-parallel rank
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, frozen=True)
class TrainReport:
    """Result of one call of `train`, equal on every rank."""

    metrics: dict[str, float]


@dataclass(kw_only=True, frozen=True)
class Probe:
    """Log-probs of tokens[1:], each given all tokens before it, as computed by the trainer."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    temperature: float
    tolerance: float  # largest difference that rounding can cause


@dataclass(kw_only=True, frozen=True)
class SyncReport:
    """One weight update. 248 MB in 0.5 s, of which 0.1 s are checksums: 0.496 GB/s and 20 %."""

    version: int
    nbytes: int
    num_tensors: int
    num_buckets: int
    num_engines: int
    seconds: float
    checksum_seconds: float  # own checksums, and waiting for the engines'
    probe: Probe | None = None  # for engines whose checksums do not show everything

    def metrics(self) -> dict[str, float]:
        return {
            "perf/update_weights_bytes": float(self.nbytes),
            "perf/update_weights_seconds": self.seconds,
            "perf/update_weights_checksum_seconds": self.checksum_seconds,
            "perf/update_weights_gb_per_s": self.nbytes / max(self.seconds, 1e-9) / 1e9,
            "perf/weight_version": float(self.version),
        }

    def __str__(self) -> str:
        share = 100 * self.checksum_seconds / max(self.seconds, 1e-9)
        return (
            f"weights {self.version}: {self.nbytes / 1e6:.1f} MB in {self.num_buckets} buckets to "
            f"{self.num_engines} engines in {self.seconds:.3f} s "
            f"({self.nbytes / max(self.seconds, 1e-9) / 1e9:.2f} GB/s, checksums {share:.0f} %)"
        )
