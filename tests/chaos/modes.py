"""The runs that are broken: small ones of every kind, 8 rollouts of 4 prompts x 4 samples.

`--load` is `--save`, so that the command that resumes is the command that started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e import runs

HOOKS = "tests.chaos.hooks"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout"
SAVE_INTERVAL = 2
EVAL_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class Mode:
    name: str
    script: str = "train.py"
    ranks: int = 1
    engines: int = 1
    critic: bool = False
    bitwise: bool = True  # whether a resumed run ends as the undisturbed one does, bit for bit
    num_rollout: int = 8
    start_s: float = 8.0  # about when the first rollout begins
    flags: dict[str, Any] = field(default_factory=dict)

    def saves_before(self, count: int) -> int:
        """The rollout after which there are `count` checkpoints."""
        return count * SAVE_INTERVAL - 1

    def evaluated(self) -> list[int]:
        return [-1, *range(EVAL_INTERVAL - 1, self.num_rollout, EVAL_INTERVAL)]


_TWO = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}
_PARTIAL = {
    "rollout_num_gpus": 2,
    "over_sampling_batch_size": 8,
    "partial_rollout": True,
    "dynamic_sampling_filter_path": "tests.ledger_hooks.coin",
}
_MEGATRON = {
    "train_backend": "megatron",
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "actor_num_gpus_per_node": 2,
}

MODES = {
    mode.name: mode
    for mode in (
        Mode(name="sync1"),
        Mode(name="sync2", ranks=2, engines=2, flags=_TWO),
        Mode(name="colo", flags={"colocate": True, "rollout_num_gpus": None}),
        Mode(
            name="async",
            script="train_async.py",
            engines=2,
            bitwise=False,
            flags={"rollout_num_gpus": 2},
        ),
        Mode(
            name="fully",
            script="train_async.py",
            engines=2,
            bitwise=False,
            flags={
                "rollout_num_gpus": 2,
                "rollout_function_path": FULLY_ASYNC,
                "max_weight_staleness": 2,
                "over_sampling_batch_size": 8,
                "rollout_max_response_len": 32,
            },
        ),
        Mode(name="partial", engines=2, bitwise=False, flags=_PARTIAL),
        Mode(name="megatron", ranks=2, start_s=12.0, flags=_MEGATRON),
        Mode(
            name="ppo",
            critic=True,
            flags={
                "advantage_estimator": "ppo",
                "num_critic_only_steps": 1,
                "critic_lr": 2e-3,
            },
        ),
        Mode(name="async_save", ranks=2, engines=2, flags={**_TWO, "async_save": True}),
    )
}


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where the parts of one run are; everything the run itself writes is under `disk`."""

    root: Path

    @property
    def disk(self) -> Path:
        return self.root / "disk"

    @property
    def run_dir(self) -> Path:
        return self.disk / "run"

    @property
    def checkpoints(self) -> Path:
        return self.disk / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.disk / "hf"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def signals(self) -> Path:
        return self.root / "signals"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def temporary(self) -> Path:
        return self.root / "t"  # short, for Ray puts sockets below it


def command(mode: Mode, inputs: Path, folders: Folders) -> list[str]:
    flags: dict[str, Any] = {
        "hf_checkpoint": inputs / "model",
        "prompt_data": inputs / "train.jsonl",
        "custom_rm_path": f"{HOOKS}.reward",
        "rollout_data_postprocess_path": f"{HOOKS}.train",
        "rollout_all_samples_process_path": f"{HOOKS}.record_groups",
        "save_debug_rollout_data": folders.samples / "{rollout_id}.pt",
        "num_rollout": mode.num_rollout,
        "sglang_enable_deterministic_inference": True,
        "rollout_health_check_interval": 2,
        "rollout_health_check_timeout": 5,
        "rollout_health_check_first_wait": 0,
        "save": folders.checkpoints,
        "load": folders.checkpoints,
        "save_hf": folders.hf,
        "save_interval": SAVE_INTERVAL,
        "save_total_limit": 3,
        "eval_interval": EVAL_INTERVAL,
        "eval_prompt_data": ["held", inputs / "held.jsonl"],
        "lr_decay_style": "linear",
        "lr_warmup_iters": 2,
        **mode.flags,
    }
    return runs.command(inputs / "model", inputs / "train.jsonl", folders.run_dir, **flags)
