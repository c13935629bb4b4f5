"""`slime quickstart`: train a tiny model from scratch with the same loop as any other run.

    data, tiny Qwen3 ──▶ warm-up (supervised) ──▶ GRPO on the reward, evaluated on held-out prompts
                         RUN_DIR/warmup           RUN_DIR/grpo

The task and the model are in quickstart_task.py. Both stages are ordinary command lines of `slime train`,
printed as you would type them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from slime.cli.quickstart_task import TaskData, start_making_model, write_data
from slime.core.errors import ConfigError

_GOAL = 0.8


@dataclass(kw_only=True, frozen=True)
class Size:
    """Sizes of both stages; a warm-up rollout is ten optimizer steps, a GRPO rollout is one."""

    warmup_rollouts: int
    warmup_batch: int  # samples per optimizer step
    grpo_rollouts: int
    prompts: int
    samples_per_prompt: int
    heldout: int
    eval_interval: int


FULL = Size(
    warmup_rollouts=12,
    warmup_batch=128,
    grpo_rollouts=50,
    prompts=32,
    samples_per_prompt=8,
    heldout=256,
    eval_interval=5,
)
SMOKE = Size(
    warmup_rollouts=1,
    warmup_batch=16,
    grpo_rollouts=2,
    prompts=4,
    samples_per_prompt=4,
    heldout=8,
    eval_interval=1,
)
_STEPS_PER_WARMUP_ROLLOUT = 10


def run_quickstart(argv: list[str]) -> int:
    options = _parse(argv)
    size = SMOKE if options.smoke else FULL
    run_dir = _new_folder(options.run_dir)
    started = time.monotonic()
    making_model = start_making_model(run_dir / "model", options.seed)
    data = write_data(
        run_dir / "data",
        num_warmup=size.warmup_rollouts * _STEPS_PER_WARMUP_ROLLOUT * size.warmup_batch,
        num_train=size.grpo_rollouts * size.prompts,
        num_heldout=size.heldout,
        seed=options.seed,
    )
    started_ray = _start_ray()
    from slime.cli.loop import main as train

    num_parameters = making_model()
    print(
        f"A Qwen3 of {num_parameters / 1e6:.1f} million parameters, random so far, is to learn to "
        f"sort digits:\nSort 53816 -> 13568. Everything is kept in {run_dir}."
    )
    stages = {
        "Stage 1, warm-up: imitate a teacher who mostly sorts the wrong way round": warmup_command,
        "Stage 2, GRPO: learn from the reward alone": grpo_command,
    }
    for title, command in stages.items():
        words = [*command(run_dir, data, size, options.seed), *options.flags]
        print(f"\n{title}\n\n{as_typed(words)}\n", flush=True)
        if status := train(words, print_summary=command is grpo_command):
            return status
    if not options.smoke:
        print(_summary(run_dir / "grpo", time.monotonic() - started))
    if started_ray:
        from slime.ray.local_ray import stop

        stop()
    return 0


def warmup_command(run_dir: Path, data: TaskData, size: Size, seed: int) -> list[str]:
    rollout_batch = size.warmup_batch * _STEPS_PER_WARMUP_ROLLOUT
    return [
        *_shared(seed),
        *("--run-dir", f"{run_dir}/warmup"),
        *("--hf-checkpoint", f"{run_dir}/model"),
        *("--prompt-data", str(data.warmup)),
        *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"),
        *("--loss-type", "sft_loss"),
        *("--num-rollout", str(size.warmup_rollouts)),
        *("--rollout-batch-size", str(rollout_batch)),
        *("--num-steps-per-rollout", str(_STEPS_PER_WARMUP_ROLLOUT)),
        *("--lr", "3e-3", "--lr-warmup-iters", "10"),
        *("--save-hf", f"{run_dir}/warmup/hf"),
    ]


def grpo_command(run_dir: Path, data: TaskData, size: Size, seed: int) -> list[str]:
    return [
        *_shared(seed),
        *("--run-dir", f"{run_dir}/grpo"),
        *("--hf-checkpoint", f"{run_dir}/warmup/hf"),
        *("--prompt-data", str(data.train)),
        *("--custom-rm-path", "slime.cli.quickstart_task.reward"),
        *("--eval-prompt-data", "sorting", str(data.heldout)),
        *("--eval-interval", str(size.eval_interval)),
        *("--num-rollout", str(size.grpo_rollouts)),
        *("--rollout-batch-size", str(size.prompts)),
        *("--n-samples-per-prompt", str(size.samples_per_prompt)),
        *("--rollout-max-response-len", "8"),
        *("--advantage-estimator", "grpo"),
        *("--lr", "1e-4", "--lr-decay-style", "constant"),
        *("--save", f"{run_dir}/grpo/checkpoints"),
        *("--save-hf", f"{run_dir}/grpo/hf"),
    ]


def as_typed(words: list[str], width: int = 96) -> str:
    """Format the command line, with line breaks between flags."""
    flags: list[str] = []
    for word in words:
        if word.startswith("--"):
            flags.append(word)
        else:
            flags[-1] += f" {shlex.quote(word)}"
    lines = ["slime train"]
    for flag in flags:
        if len(lines[-1]) + len(flag) >= width:
            lines.append(" ")
        lines[-1] += f" {flag}"
    return " \\\n".join(lines)


def _shared(seed: int) -> list[str]:
    return [
        *("--train-backend", "fsdp"),
        *("--rollout-engine", "slime"),
        *("--actor-num-gpus-per-node", "1"),
        *("--input-key", "prompt"),
        *("--label-key", "answer"),
        "--apply-chat-template",
        "--rollout-shuffle",
        *("--rollout-seed", str(seed)),
        *("--seed", str(seed)),
        *("--adam-beta2", "0.95"),
        "--use-dynamic-batch-size",
        *("--max-tokens-per-gpu", "8192"),
    ]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slime quickstart",
        allow_abbrev=False,
        description="Make a tiny model, warm it up and train it by GRPO; minutes on two CPU cores.",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="new folder for all files; default: runs/quickstart-<time>"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of everything (default: 1)")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of each stage; nothing is learned"
    )
    parser.add_argument(
        "flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of slime train for both stages, e.g. -- --train-backend megatron",
    )
    return parser.parse_args(argv)


def _new_folder(chosen: Path | None) -> Path:
    folder = chosen or Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--run-dir {folder} already exists; name a new folder, or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _start_ray() -> bool:
    """Start Ray once for both stages; return whether this process must stop it."""
    from slime.ray.cluster import connect

    ours = connect()
    importlib.import_module("slime.ray.run")  # import it while the model is being made
    return ours


def _summary(run_dir: Path, seconds: float) -> str:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [r["eval/sorting/reward"] for r in records if "eval/sorting/reward" in r]
    first, last = rewards[0], rewards[-1]
    verdict = "." if last > _GOAL else f"; above {_GOAL} was expected."
    return (
        f"The whole quickstart took {seconds:.0f} s. On {FULL.heldout} prompts that neither stage saw, "
        f"mean reward went from {first:.2f} to {last:.2f}{verdict}"
    )
