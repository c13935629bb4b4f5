"""Records shared by all packages: samples and reports here, batches in batches.py.

Shape letters used across the project: N samples, G group size, T packed tokens, R response tokens,
V vocabulary, H hidden size.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from slime.core.batches import (
    CriticColumns,
    LossInputs,
    LossOutput,
    MetricSum,
    Pixels,
    RolloutBatch,
    Schedule,
    TrainBatch,
)

__all__ = [
    "CriticColumns", "EngineInfo", "Group", "LossInputs", "LossOutput", "MetricSum", "ModelAddress", "ParallelInfo", "Pixels",
    "RolloutBatch", "Sample", "Schedule", "Status", "TrainBatch",
]  # fmt: skip


class Status(str, Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


MAX_COMPONENTS = 64  # of a dictionary reward that are logged

# Fields that may hold nested lists and dictionaries.
_NESTED = ("prompt", "messages", "label", "metadata", "train_metadata", "multimodal_inputs", "reward")  # fmt: skip


@dataclass(kw_only=True)
class Sample:
    """One response to one prompt; what user hooks see, so the field names are public.

    Example: the prompt "1+1=" is tokens [5, 9, 5, 7]; the response "2" is [6], then end-of-text [0]::

        tokens = [5, 9, 5, 7, 6, 0]      prompt and response
        response_length = 2              the last two of them
        loss_mask = [1, 1]               one entry per response token
        rollout_log_probs = [-0.7, -0.1] of each response token, from the engine
        weight_versions = [3, 3]         of the weights that generated each response token
    """

    # set by the data source
    group_index: int | None = None  # which prompt of the run; the samples of a group share it
    index: int | None = None  # unique per sample over the whole run
    rollout_id: int | None = None  # the trajectory it came from; default: index
    prompt: str | list[dict[str, Any]] = ""  # a text, or messages without --apply-chat-template
    messages: list[dict[str, Any]] = field(default_factory=list)  # the prompt, never rendered
    label: Any = None  # the row's value of --label-key
    metadata: dict[str, Any] = field(default_factory=dict)  # --metadata-key, and what hooks add
    session_id: str | None = None  # requests with equal ids go to the same engine
    generate_function_path: str | None = None  # in place of --custom-generate-function-path
    custom_rm_path: str | None = None  # in place of the flag of this name
    multimodal_inputs: dict[str, Any] | None = None  # {"images": bytes of each file, in order}
    # set by generation
    tokens: list[int] = field(default_factory=list)  # prompt and response, including the end token
    response: str = ""  # text of the response, without the token that ended it
    response_length: int = 0  # in tokens, including tool output
    loss_mask: list[int] | None = None  # None: every response token is trained on
    rollout_log_probs: list[float] | None = None  # [R], from the engine
    rollout_routed_experts: np.ndarray | None = None  # [tokens - 1, layers, experts per token]
    weight_versions: list[int] = field(default_factory=list)  # [R]
    status: Status = Status.PENDING  # how generation ended
    # set by scoring and filtering
    reward: float | dict[str, Any] | None = None  # a number, or a dictionary with --reward-key
    teacher_log_probs: list[float] | None = None  # [R], for distillation
    remove_sample: bool = False  # counts in statistics, has weight 0 in training
    train_metadata: dict[str, Any] | None = None  # becomes RolloutBatch.metadata
    non_generation_time: float = 0.0  # seconds that a hook spent on tools, for the metrics

    Status = Status

    def __post_init__(self) -> None:
        if not self.messages and self.prompt:
            self.messages = _copied(as_messages(self.prompt))

    @property
    def image_files(self) -> list[bytes]:
        """Return the image files in token order."""
        return (self.multimodal_inputs or {}).get("images") or []

    @property
    def effective_response_length(self) -> int:
        """Return the number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: list[int] | None = None,
        log_probs: list[float] | None = None,
        trainable: bool = True,
        weight_versions: list[int] | None = None,
        meta_info: dict[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Add tokens to the response, keeping tokens, loss mask, log-probs and versions aligned.

        Tokens that the model did not generate (tool output) are `trainable=False`; their log-probs
        default to 0. `meta_info`, from an engine's reply, sets the status, the weight versions, and tokens
        and log-probs that are not given; with `args` and --use-rollout-routing-replay also the routed
        experts. `text` is added to `response`.
        """
        if meta_info is not None:
            entries = meta_info.get("output_token_logprobs") or []
            tokens = [entry[1] for entry in entries] if tokens is None else tokens
            if log_probs is None and trainable:
                log_probs = [entry[0] for entry in entries]
            weight_versions = weight_versions or _token_versions(meta_info, len(tokens))
        if tokens is None:
            raise ValueError("append_response_tokens needs tokens, or meta_info that holds them")
        self._append(tokens, log_probs, trainable, weight_versions)
        self.response += text or ""
        if meta_info is not None:
            self._read_finish(args, meta_info)

    def append_images(self, images: list[bytes]) -> None:
        """Add images whose tokens are appended to the response; `restart` removes them again."""
        inputs = self.multimodal_inputs or {}
        later = inputs.get("response_images", 0) + len(images)
        files = [*self.image_files, *images]
        self.multimodal_inputs = {**inputs, "images": files, "response_images": later}

    def _read_finish(self, args: Any, meta_info: dict[str, Any]) -> None:
        finish = meta_info.get("finish_reason")
        if finish is not None:
            self.status = _FINISHED[finish["type"]]
        experts = meta_info.get("routed_experts")
        if experts is not None and args is not None and args.use_rollout_routing_replay:
            self.rollout_routed_experts = decode_experts(args.hf_checkpoint, experts)

    def _append(
        self,
        tokens: list[int],
        log_probs: list[float] | None,
        trainable: bool,
        weight_versions: list[int] | None,
    ) -> None:
        count = len(tokens)
        if log_probs is None and trainable:
            raise ValueError("trainable tokens need the log-probs they were sampled with")
        log_probs = [0.0] * count if log_probs is None else log_probs
        if weight_versions is None:
            weight_versions = [self.weight_versions[-1] if self.weight_versions else 0] * count
        for name, column in (("log_probs", log_probs), ("weight_versions", weight_versions)):
            if len(column) != count:
                raise ValueError(f"{count} tokens but {len(column)} {name}")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = self.tokens + list(tokens)
        self.response_length += count
        self.loss_mask += [int(trainable)] * count
        self.rollout_log_probs += log_probs
        self.weight_versions += weight_versions

    def clone(self) -> Sample:
        """Return a copy with copies of its lists and dictionaries, nested ones too."""
        clone = object.__new__(type(self))
        for name, value in self.__dict__.items():
            if name in _NESTED:
                value = _copied(value)
            clone.__dict__[name] = value.copy() if isinstance(value, list) else value
        return clone

    def get_reward_value(self, key: str | Any | None) -> float:
        """Return the scalar reward: `reward` itself, or `reward[key]` if it is a dictionary.

        `key` may also be `args`, whose --reward-key is then used.
        """
        if key is not None and not isinstance(key, str):
            key = key.reward_key
        if isinstance(self.reward, dict):
            if key is None or key not in self.reward:
                raise KeyError(
                    f"the reward is a dictionary with keys {sorted(self.reward)}; "
                    f"--reward-key is {key!r}: set it to one of them"
                )
            return float(self.reward[key])
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward")
        return float(self.reward)

    @property
    def reward_components(self) -> dict[str, float]:
        """Return the finite numbers of a dictionary reward, at most 64; empty for a plain number."""
        parts = self.reward if isinstance(self.reward, dict) else {}
        numbers = {
            str(k): float(v) for k, v in parts.items() if isinstance(v, int | float | np.number)
        }
        finite = [(name, value) for name, value in numbers.items() if np.isfinite(value)]
        return dict(finite[:MAX_COMPONENTS])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and the attributes that hooks added."""
        record = {name: v for name, v in vars(self).items() if not name.startswith("_")}
        record["status"] = self.status.value
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Sample:
        """Return the sample of a record; other keys become attributes."""
        names = {f.name for f in fields(cls)}
        sample = cls(**{name: value for name, value in record.items() if name in names})
        sample.status = Status(sample.status)
        for name in record.keys() - names:
            if not name.startswith("_") and not hasattr(cls, name):
                setattr(sample, name, record[name])
        return sample


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompt as messages: a text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _copied(value: Any, depth: int = 100) -> Any:
    """Copy lists and dictionaries; other objects that a hook stores, such as a connection, are shared.

    Values nested deeper than `depth` are shared too, instead of overflowing the stack.
    """
    if depth and isinstance(value, dict):
        return {key: _copied(inner, depth - 1) for key, inner in value.items()}
    return [_copied(x, depth - 1) for x in value] if depth and isinstance(value, list) else value


# The engine's finish reason -> status.
_FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def _token_versions(meta_info: dict[str, Any], count: int) -> list[int]:
    """Return one weight version per token, from the spans of engines that report them."""
    spans = meta_info.get("weight_versions")
    if not spans:
        return [_version(meta_info.get("weight_version"))] * count
    return [_version(span["version"]) for span in spans for _ in range(span["end"] - span["start"])]


def _version(text: str | None) -> int:
    """Return the version as a number; engines without an update report "default", which is 0."""
    return int(text) if text is not None and text.isdecimal() else 0


def decode_experts(checkpoint: str, text: str) -> np.ndarray:
    """Return [tokens - 1, layers, experts per token] from the engine's base64."""
    layers, width = _expert_shape(checkpoint)
    flat = np.frombuffer(base64.b64decode(text), np.int32)
    return flat.reshape(-1, layers, width).astype(np.int16)


@cache
def _expert_shape(checkpoint: str) -> tuple[int, int]:
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    config = config.get("text_config", config)
    return config["num_hidden_layers"], config["num_experts_per_tok"]


Group = list[Sample]  # the samples of one prompt


@dataclass(kw_only=True, frozen=True)
class ParallelInfo:
    """The coordinates of one rank in the training layout. DP2 x CP2, third rank: dp_rank=1, cp_rank=0."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclass(kw_only=True, frozen=True)
class EngineInfo:
    """The address of one inference engine and its devices ("cpu", or GPU uuids)."""

    url: str
    device_ids: tuple[str, ...] = ("cpu",)
    kind: str = "slime"  # "slime" or "sglang"
    version: str = ""  # of the server, for external engines
    role: str = "regular"  # or "prefill" or "decode", which serve requests together
    bootstrap_port: int | None = None  # of a prefill engine


@dataclass(kw_only=True, frozen=True)
class ModelAddress:
    """Where the requests for one served model go: to its engines, or to the router in front of them."""

    urls: list[str]
    router: str | None = None


# ---- results that actors return to the driver


@dataclass(kw_only=True, frozen=True)
class Activity:
    """What a process did since its last report: phases from start to end in Unix time, memory in bytes.

    `spans=[("train/steps", 1760000000.0, 1760000001.5)], memory={"rss": 500_000_000}`
    """

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class RolloutResult:
    """Result of one generate call: references for the trainer, metrics for the user."""

    rollout_id: int
    batch_refs: list[Any] = field(default_factory=list)  # one per data-parallel rank
    metrics: dict[str, float] = field(default_factory=dict)
    activity: Activity = field(default_factory=Activity)


@dataclass(kw_only=True, frozen=True)
class TrainedTokens:
    """What the trainer computed for the response tokens of one logged row: [R] each."""

    sample_index: int
    prompt_len: int
    columns: dict[str, np.ndarray]  # "trainer_log_probs", "advantages", ...


@dataclass(kw_only=True, frozen=True)
class TrainReport:
    """Result of one call of `train`; metrics are equal on every rank, the rest is the rank's own."""

    metrics: dict[str, float]
    tokens: list[TrainedTokens] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)


@dataclass(kw_only=True, frozen=True)
class Probe:
    """Log-probs of tokens[1:], each given all tokens before it, as computed by the trainer."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    temperature: float
    tolerance: float  # largest difference that rounding can cause
    adapter: str | None = None  # the LoRA adapter that the requests name


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
