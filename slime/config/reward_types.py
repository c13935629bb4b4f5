"""The reward types: the only table from names of `--rm-type` to reward functions.

Graders are named by import path, so that the command line can be checked without importing them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from slime.config.flags.spec import did_you_mean
from slime.core.errors import ConfigError

BOXED = "boxed_"
Grading = Literal["lenient", "strict", "strict_box"]
_HUB = "slime.rollout.rm_hub"


@dataclass(kw_only=True, frozen=True)
class RewardType:
    """The reward function of a type, and what it needs before a run may start."""

    grader: str  # import path of `async fn(args, sample) -> reward`
    needs_label: bool = False  # others read the metadata, or nothing
    sandboxed: bool = False  # runs in the sandbox, or does not start
    reads_box: bool = False  # looks for \boxed{} itself, so boxed_ makes no sense
    keys: tuple[str, ...] = ()  # of the dictionary it returns
    strict: dict[str, str] = field(default_factory=dict)  # graders of other values of --rm-grading

    def grader_of(self, grading: Grading) -> str:
        """Return the import path of the grader; `strict_box` differs from `strict` for dapo alone."""
        if grading == "lenient":
            return self.grader
        return self.strict.get(grading) or self.strict.get("strict") or self.grader


REWARD_TYPES = {
    "math": RewardType(
        grader=f"{_HUB}.math_reward.math",
        strict={"strict": f"{_HUB}.strict_math.math"},
        needs_label=True,
        sandboxed=True,
        reads_box=True,
    ),
    "deepscaler": RewardType(
        grader=f"{_HUB}.math_reward.deepscaler",
        strict={"strict": f"{_HUB}.strict_math.deepscaler"},
        needs_label=True,
        sandboxed=True,
        reads_box=True,
    ),
    "dapo": RewardType(
        grader=f"{_HUB}.math_reward.dapo",
        strict={
            "strict": f"{_HUB}.strict_math.dapo",
            "strict_box": f"{_HUB}.strict_math.dapo_box",
        },
        needs_label=True,
        keys=("score", "acc", "pred"),
    ),
    "f1": RewardType(grader=f"{_HUB}.simple_rewards.f1", needs_label=True),
    "gpqa": RewardType(
        grader=f"{_HUB}.gpqa.reward", strict={"strict": f"{_HUB}.gpqa.strict_reward"}
    ),
    "ifbench": RewardType(grader=f"{_HUB}.simple_rewards.ifbench", sandboxed=True),
    "code": RewardType(grader=f"{_HUB}.code.reward", sandboxed=True),
    "reasoning_gym": RewardType(grader=f"{_HUB}.simple_rewards.reasoning_gym", sandboxed=True),
    "remote_rm": RewardType(grader=f"{_HUB}.simple_rewards.remote_rm"),
    "random": RewardType(grader=f"{_HUB}.simple_rewards.random"),
}


def reward_type(name: str, where: str = "--rm-type") -> RewardType:
    """Return the type called `name` or `boxed_<name>`; raise ConfigError if there is none."""
    base = name.removeprefix(BOXED)
    if base not in REWARD_TYPES:
        raise ConfigError(
            f"{where} {name}: choose one of {', '.join(REWARD_TYPES)}, or boxed_ and one of them"
            + did_you_mean(base, REWARD_TYPES)
        )
    if base != name and REWARD_TYPES[base].reads_box:
        raise ConfigError(f"{where} {name}: {base} reads the box itself; write {where} {base}")
    return REWARD_TYPES[base]


def check_grading(grading: Grading, names: Iterable[str], where: str) -> None:
    """Raise ConfigError if none of these types has graders for this value of --rm-grading."""
    if grading == "lenient":
        return
    kinds = [REWARD_TYPES[name.removeprefix(BOXED)] for name in names]
    if not any(grading in kind.strict for kind in kinds):
        having = [name for name, kind in REWARD_TYPES.items() if grading in kind.strict]
        raise ConfigError(
            f"{where} {grading} is for the reward types {', '.join(having)}, and none of them is used: "
            "remove it, or set --rm-type"
        )


def needs_label(name: str | None) -> bool:
    return name is not None and REWARD_TYPES[name.removeprefix(BOXED)].needs_label


def check_row_type(wanted: Any, allowed: Iterable[str | None], where: str) -> None:
    """Raise ConfigError if a data row names a reward type that the user did not allow.

    Rows are downloaded: without this a row could choose which code reads the response.
    """
    if wanted in (None, "") or (isinstance(wanted, str) and wanted in set(allowed)):
        return
    raise ConfigError(
        f"{where}: metadata['rm_type'] is {wanted!r}, which is not the --rm-type of this run: remove it "
        f"from the data, or add --allow-row-rm-types {wanted}"
    )
