"""Verify that engines hold exactly the weights that were sent: version, checksums and a probe.

The embedded engine computes our own checksums (checksum.py) of what it holds. An SGLang server computes its own,
of parameters it has fused, padded and sharded; sglang_checksums.py predicts them from what was sent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer

from slime.config.checks.model_types import in_tower
from slime.config.lora import served_adapter
from slime.core.errors import WeightMismatchError
from slime.core.types import EngineInfo, Probe, RolloutBatch, Schedule, SyncReport
from slime.utils.concurrency import call_all
from slime.weights.buckets import Bucket
from slime.weights.checksum import RunningChecksums
from slime.weights.engine_client import EngineClient, HeldWeights, RankChecksums
from slime.weights.sglang_checksums import ModelFacts, PredictedChecksums, Sharding, sharding_of
from slime.weights.transport import WeightSyncError

if TYPE_CHECKING:
    from slime.config.arguments import Args

_MAX_NAMES = 3  # in a message
_PROBE_LENGTH = 9
_PROBE_TEXT = "The capital of France is Paris, and two plus two is four."


class SentWeights:
    """The names of one update and, if wanted, checksums of its tensors.

    Engines are verified to hold the bits of these tensors: the trainer's own or, after a cast, its
    output. The cast itself is not verified.
    """

    def __init__(self, *, with_checksums: bool) -> None:
        self._names: set[str] = set()
        self._checksums = RunningChecksums() if with_checksums else None

    def __len__(self) -> int:
        return len(self._names)

    def add(self, bucket: Bucket) -> None:
        names = {name for name, _ in bucket.tensors}
        if len(names) < len(bucket.tensors) or names & self._names:
            raise WeightSyncError(f"bucket {bucket.index} holds a name that was sent before")
        self._names |= names
        if self._checksums is not None:
            self._checksums.add(bucket.tensors)

    def checksums(self) -> dict[str, int]:
        """Return the checksums of all tensors, read back from the device only now."""
        return {} if self._checksums is None else self._checksums.read()


def check_versions(engines: list[EngineClient], held: list[HeldWeights], version: int) -> None:
    wrong = [
        f"{engine.url} reports {found.version!r}"
        for engine, found in zip(engines, held, strict=True)
        if found.version != str(version)
    ]
    if wrong:
        raise WeightMismatchError(f"weights {version} were sent, but {'; '.join(wrong)}")


def check_checksums(
    engines: list[EngineClient], held: list[HeldWeights], sent: dict[str, int], version: int
) -> None:
    """Raise unless each embedded engine holds exactly the tensors that were sent, bit by bit.

    Both sides name what a checkpoint holds: parameters and persistent buffers, tied weights once. A vision
    tower that is not trained is not sent: engines have it from --hf-checkpoint.
    """
    tower = any(in_tower(name) for name in sent)

    def expected(held: dict[str, int]) -> dict[str, int]:
        return held if tower else {n: value for n, value in held.items() if not in_tower(n)}

    problems = [
        f"engine {engine.url}: {problem}"
        for engine, found in zip(engines, held, strict=True)
        if engine.info.kind == "slime" and (problem := difference(sent, expected(found.checksums)))
    ]
    if problems:
        raise WeightMismatchError(f"weights {version} did not arrive intact. {'; '.join(problems)}")


def difference(sent: dict[str, int], held: dict[str, int]) -> str:
    """Describe how `held` differs from `sent`; empty if it does not."""
    if sent == held:
        return ""
    groups = {
        "differ": [name for name, value in sent.items() if name in held and held[name] != value],
        "are missing in the engine": [name for name in sent if name not in held],
        "are in the engine but were not sent": [name for name in held if name not in sent],
    }
    return _describe(groups, f"{len(sent)} tensors")


class SGLangCheck:
    """Predicts the checksums of SGLang servers during one update and compares them with the servers'.

    If the layout of a server is not known, its checksums are compared with those of the other engines;
    what neither comparison covers is left to the probe prompt.
    """

    def __init__(self, engines: list[EngineClient], model: ModelFacts) -> None:
        def sharding(engine: EngineClient) -> Sharding | None:
            architectures = engine.get("/model_info").get("architectures")
            return sharding_of(engine.get("/server_info"), architectures, model)

        self._engines, self._fp8 = engines, model.fp8
        self._shardings = call_all(engines, sharding)
        self._sums = {one: PredictedChecksums(one) for one in self._shardings if one is not None}
        self._comparable, self._last_columns = True, 1

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._fp8 is not None and name.endswith(".weight_scale_inv"):
            # SGLang's checksum divides columns by scales, and fails where the last block is not whole.
            self._comparable &= self._last_columns % tensor.shape[1] == 0
        self._last_columns = tensor.shape[-1] if tensor.ndim else 1
        for sums in self._sums.values():
            sums.add(name, tensor)

    def compare(self, version: int) -> None:
        if not self._comparable:
            return
        held = call_all(self._engines, EngineClient.rank_checksums)
        for engine, sharding, ranks in zip(self._engines, self._shardings, held, strict=True):
            problem = "" if sharding is None else _sglang_difference(self._sums[sharding], ranks)
            if problem:
                raise WeightMismatchError(
                    f"weights {version} did not arrive intact. engine {engine.url}: {problem}"
                )
            self._compare_with_first(engine, ranks, held[0], version)

    def _compare_with_first(
        self,
        engine: EngineClient,
        ranks: list[RankChecksums],
        first: list[RankChecksums],
        version: int,
    ) -> None:
        if len(ranks) != len(first) or ranks == first:
            return
        names = [
            name
            for mine, other in zip(ranks, first, strict=True)
            for name, value in mine.checksums.items()
            if other.checksums.get(name) != value
        ]
        raise WeightMismatchError(
            f"weights {version}: engines {engine.url} and {self._engines[0].url} hold different "
            f"values of {len(names)} parameters ({_some(names)})"
        )


def _sglang_difference(expected: PredictedChecksums, ranks: list[RankChecksums]) -> str:
    """Describe the difference; empty if there is none.

    A tied output layer is sent once and held once or twice.
    """
    groups: dict[str, list[str]] = {"differ": [], "are in the engine but were not sent": []}
    held = {name for rank in ranks for name in rank.checksums}
    for rank in ranks:
        sums = expected.sums[rank.tp_rank]
        groups["differ"] += [
            name for name, value in rank.checksums.items() if sums.get(name, value) != value
        ]
        groups["are in the engine but were not sent"] += [
            name for name in rank.checksums if name not in sums and not expected.may_be_unsent(name)
        ]
    groups["were sent but are not in the engine"] = [n for n in expected.sums[0] if n not in held]
    return _describe(groups, f"{len(held)} parameters")


def _describe(groups: dict[str, list[str]], total: str) -> str:
    return ", ".join(
        f"{len(names)} of {total} {problem} ({_some(names)})"
        for problem, names in groups.items()
        if names
    )


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def add_probe(
    report: SyncReport,
    args: Args,
    engines: list[EngineInfo],
    log_probs: Callable[[RolloutBatch], list[np.ndarray]],
    *,
    pp_size: int,
) -> SyncReport:
    """Add a probe to the report if SGLang is to be checked with one; a collective call."""
    if not args.check_weight_update_equal or all(info.kind != "sglang" for info in engines):
        return report
    return replace(report, probe=score_probe(args, log_probs, pp_size=pp_size))


def score_probe(
    args: Args, log_probs: Callable[[RolloutBatch], list[np.ndarray]], *, pp_size: int
) -> Probe:
    """Score a fixed token sequence: equal weights assign it equal log-probs in trainer and engines.

    SGLang's checksums cannot always be predicted; the probe detects a missing, swapped or stale
    weight in any layout. A collective call with an equal result on every rank.
    """
    tokens = probe_tokens(args.hf_checkpoint)
    batch = _probe_batch(tokens, copies=pp_size)  # one micro-batch per pipeline stage
    column = log_probs(batch)[0]
    return Probe(
        tokens=tuple(tokens),
        log_probs=tuple(float(value) for value in column),
        temperature=args.rollout_temperature,
        tolerance=0.002 if args.precision == "fp32" else 0.5,
        adapter=served_adapter(args),
    )


def probe_tokens(hf_checkpoint: str) -> list[int]:
    """Return the tokens of a plain sentence; random ones, used without a tokenizer, have log-probs
    below -20, which bf16 resolves only to about 1 or 2."""
    config = json.loads((Path(hf_checkpoint) / "config.json").read_text())
    vocab_size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    tokenizer = Path(hf_checkpoint) / "tokenizer.json"
    if tokenizer.exists():
        tokens = Tokenizer.from_file(str(tokenizer)).encode(_PROBE_TEXT).ids[:_PROBE_LENGTH]
        if len(tokens) == _PROBE_LENGTH and max(tokens) < vocab_size:
            return tokens
    return [random.Random(position).randrange(vocab_size) for position in range(_PROBE_LENGTH)]


def _probe_batch(tokens: list[int], *, copies: int) -> RolloutBatch:
    response = len(tokens) - 1
    weights = np.full(response, 1 / response)
    micro_batches = [[row] for row in range(copies)]
    return RolloutBatch(
        tokens=[np.asarray(tokens)] * copies,
        response_lens=np.full(copies, response),
        loss_masks=[np.ones(response)] * copies,
        rewards=np.zeros(copies),
        raw_rewards=np.zeros(copies),
        truncated=np.zeros(copies),
        group_indices=np.arange(copies),
        sample_indices=np.arange(copies),
        trajectory_ids=np.arange(copies),
        loss_weights=[weights] * copies,
        schedule=Schedule(steps=[micro_batches], log_prob_micro_batches=micro_batches),
    )
