"""The results of rollout functions, and one Protocol per hook of the rollout side.

Hooks of the trainer are in `slime/config/hook_types.py`. A hook may omit parameters that have a default
here. `tests/contracts` has a good, a minimal and a wrong implementation of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime.core.errors import UserError
from slime.core.types import Group, Sample

if TYPE_CHECKING:
    from slime.config.arguments import Args


Reward = float | dict[str, Any]


@dataclass(kw_only=True)
class RolloutFnTrainOutput:
    """Scored groups to train on, in group order, and metrics to log."""

    samples: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class EvalResult:
    """Results on one evaluation dataset. Two prompts x two samples: rewards = [1, 0, 1, 1], truncated = [F, F, F, T]."""

    rewards: list[float]
    truncated: list[bool]
    samples: list[Sample] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        """Return a field by name, for log functions that read `data[dataset]["rewards"]`."""
        return vars(self)[name]


@dataclass(kw_only=True)
class RolloutFnEvalOutput:
    """Results by dataset; instead of an EvalResult, a dictionary with rewards, truncated and samples."""

    data: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, frozen=True)
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None  # counted as rollout/dropped_<reason>
    # If too few groups of --over-sampling-batch-size were kept, use the rejected group instead of
    # generating another one.
    keep_when_insufficient: bool = False


class DataSource(Protocol):
    def __init__(self, args: Args) -> None: ...
    def get_samples(self, num_samples: int) -> list[Group]: ...
    def add_samples(self, samples: list[Group]) -> None: ...
    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...
    def __len__(self) -> int: ...


class RolloutFunction(Protocol):
    def __call__(
        self, args: Args, rollout_id: int, data_source: DataSource, *, evaluation: bool
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput | list[Group] | dict[str, Any]: ...


class GenerateFunction(Protocol):
    async def __call__(
        self, args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Sample | list[Sample]: ...


class RewardArgs(Protocol):
    """The attributes that scoring needs; hooks may pass an object of their own."""

    rm_type: str | None
    custom_rm_path: str | None
    rm_url: str | None
    reward_key: str | None


class RewardFunction(Protocol):
    async def __call__(self, args: Args, sample: Sample) -> Reward: ...


class GroupRewardFunction(Protocol):
    async def __call__(
        self, args: Args, samples: list[Sample]
    ) -> list[float] | list[dict[str, Any]]: ...


class DynamicSamplingFilter(Protocol):
    def __call__(
        self, args: Args, samples: list[Sample], **kwargs: Any
    ) -> bool | DynamicFilterOutput: ...


class BufferFilter(Protocol):
    def __call__(
        self, args: Args, rollout_id: int | None, buffer: list[Group], num_samples: int
    ) -> list[Group]: ...


class RolloutSampleHook(Protocol):
    def __call__(self, args: Args, sample: Sample) -> Sample | list[Sample] | None: ...


class RolloutSampleFilter(Protocol):
    def __call__(self, args: Args, groups: list[Group]) -> None: ...


class AllSamplesProcess(Protocol):
    def __call__(self, args: Args, all_groups: list[Group], data_source: DataSource) -> None: ...


class RewardPostProcess(Protocol):
    def __call__(self, args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]: ...


class ConvertSamples(Protocol):
    def __call__(self, args: Args, samples: list[Sample]) -> dict[str, Any]: ...


class RolloutLogFunction(Protocol):
    def __call__(
        self,
        rollout_id: int,
        args: Args,
        samples: list[Sample],
        extra_metrics: dict[str, float],
        rollout_time: float,
    ) -> bool | None: ...


class EvalLogFunction(Protocol):
    def __call__(
        self,
        rollout_id: int,
        args: Args,
        data: dict[str, EvalResult],
        extra_metrics: dict[str, float],
    ) -> bool | None: ...


def as_train_output(result: Any, path: str) -> RolloutFnTrainOutput:
    """Check and wrap the result of a rollout function, which may be a bare list of groups.

    The samples of one trajectory may be nested as a list inside their group; they are flattened.
    """
    groups = result.samples if isinstance(result, RolloutFnTrainOutput) else result
    if isinstance(groups, list) and all(isinstance(group, list) for group in groups):
        flat = [_flatten(group) for group in groups]
        if all(isinstance(sample, Sample) for group in flat for sample in group):
            metrics = result.metrics or {} if isinstance(result, RolloutFnTrainOutput) else {}
            return RolloutFnTrainOutput(samples=flat, metrics=metrics)
    raise UserError(
        f"--rollout-function-path {path} returned {_describe(result)}; expected "
        "RolloutFnTrainOutput(samples=[[Sample, ...], ...]) or the list of groups itself"
    )


def as_eval_output(result: Any, path: str) -> RolloutFnEvalOutput:
    """Check and wrap the result of an evaluation function, which may be a bare dictionary by dataset."""
    data = result.data if isinstance(result, RolloutFnEvalOutput) else result
    if isinstance(data, Mapping):
        metrics = result.metrics or {} if isinstance(result, RolloutFnEvalOutput) else {}
        results = {name: _eval_result(value, path) for name, value in data.items()}
        return RolloutFnEvalOutput(data=results, metrics=metrics)
    raise UserError(
        f"--eval-function-path {path} returned {_describe(result)}; expected "
        "RolloutFnEvalOutput(data={name: EvalResult(...)}) or the dictionary itself"
    )


def _eval_result(value: Any, path: str) -> EvalResult:
    if isinstance(value, EvalResult):
        return value
    if isinstance(value, Mapping) and {"rewards", "truncated"} <= set(value):
        return EvalResult(
            rewards=list(value["rewards"]),
            truncated=list(value["truncated"]),
            samples=list(value.get("samples", [])),
        )
    raise UserError(
        f"--eval-function-path {path} returned {_describe(value)} for a dataset; expected "
        "EvalResult or a dictionary with rewards, truncated and samples"
    )


def _flatten(group: list[Any]) -> list[Any]:
    return [one for item in group for one in (_flatten(item) if isinstance(item, list) else [item])]


def _describe(value: Any) -> str:
    if isinstance(value, RolloutFnTrainOutput):
        return f"a RolloutFnTrainOutput with samples {_describe(value.samples)}"
    if isinstance(value, list) and value:
        return f"a list of {type(value[0]).__name__}"
    return f"a {type(value).__name__}"


def __getattr__(name: str) -> Any:
    if name == "call_rollout_fn":  # for hooks of earlier versions
        from slime.compat.rollout_calls import call_rollout_fn

        return call_rollout_fn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
