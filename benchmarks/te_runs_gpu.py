"""Whole colocated runs of the quickstart's task with Megatron on one GPU: bf16 and FP8, killed and resumed.

usage: python benchmarks/te_runs_gpu.py [--cases te te-fp8 te-fp8-blocks] [--rollouts 20] [--seconds 120]
       [--together 3] [--folder DIR]

A small Qwen3 is warmed up once (FSDP, supervised). Then every case trains by GRPO with the embedded engine
on the same GPU: the run is killed (SIGKILL) once it is half way, started again with the same command, and
must end with every rollout trained once. Printed are the mean reward of the first and last three rollouts
and the gap between the engine's and the trainer's log-probs. The case cpu rehearses this without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Blocks of FP8 scales are 128 wide: all linear layers are multiples of that, in and out.
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TE = ["--bf16", "--transformer-impl", "transformer_engine"]
CASES: dict[str, list[str]] = {
    "cpu": ["--fp32"],
    "local": ["--bf16", "--transformer-impl", "local"],
    "te": TE,
    "te-fp8": [*TE, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "te-fp8-delayed": [*TE, "--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "te-fp8-blocks": [*TE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
}
# Engine and trainer start from an FP8 checkpoint in blocks of 128, so the engine serves FP8 weights.
FP8_ROLLOUT = ("te-fp8-blocks",)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=["te", "te-fp8", "te-fp8-blocks"], choices=list(CASES)
    )
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--warmup-rollouts", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120, help="for one case")
    parser.add_argument(
        "--together", type=int, default=1, help="cases that share the GPU at a time"
    )
    parser.add_argument("--folder", type=Path, help="kept; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        data = prepare(folder, options)
        with ThreadPoolExecutor(options.together) as pool:
            works = pool.map(lambda case: run_case(case, folder, data, options), options.cases)
            failed = [case for case, ok in zip(options.cases, works, strict=True) if not ok]
    sys.exit(f"failed: {failed}" if failed else 0)


def prepare(folder: Path, options: argparse.Namespace) -> Any:
    """Write the data and a model that sorts digits, mostly the wrong way round."""
    from slime.cli.quickstart_task import write_data

    data = write_data(
        folder / "data",
        num_warmup=options.warmup_rollouts * 1280,
        num_train=options.rollouts * 32,
        num_heldout=32,
        seed=1,
    )
    write_model(folder / "model")
    words = [*shared("fsdp"), *("--run-dir", f"{folder}/warmup"), "--loss-type", "sft_loss"]
    words += ["--hf-checkpoint", f"{folder}/model", "--prompt-data", str(data.warmup)]
    words += ["--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"]
    words += ["--num-rollout", str(options.warmup_rollouts), "--rollout-batch-size", "1280"]
    words += ["--num-steps-per-rollout", "10", "--lr", "3e-3", "--lr-warmup-iters", "10"]
    words += ["--save-hf", f"{folder}/warmup/hf"]
    begin = time.monotonic()
    done = finish(start(words), options.seconds)
    print(f"warm-up: {time.monotonic() - begin:.0f} s", flush=True)
    if done.returncode:
        sys.exit(f"the warm-up failed:\n{done.said[-3000:]}")
    if set(options.cases) & set(FP8_ROLLOUT):
        from slime.weights.fp8 import Fp8Format, convert_to_fp8

        blocks = Fp8Format(strategy="block", block=(128, 128))
        convert_to_fp8(folder / "warmup" / "hf", folder / "warmup" / "fp8", blocks)
    return data


def write_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slime.cli.quickstart_task import VOCAB_SIZE, make_tokenizer

    tokenizer: Any = make_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **MODEL,
    )
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_case(case: str, folder: Path, data: Any, options: argparse.Namespace) -> bool:
    run_dir = folder / case
    words = grpo(case, folder, data, options.rollouts)
    begin = time.monotonic()
    process = start(words)
    half = options.rollouts // 2
    while process.poll() is None and len(records(run_dir, "train")) < half:
        if time.monotonic() - begin > options.seconds:
            break
        time.sleep(0.05)
    if process.poll() is not None or len(records(run_dir, "train")) < half:
        said = kill(process)
        print(f"{case:<15} FAILED before rollout {half}:\n{said[-3000:]}", flush=True)
        return False
    kill(process)
    killed_at, middle = len(records(run_dir, "train")), time.monotonic()
    done = finish(start(words), options.seconds)
    if done.returncode:
        print(f"{case:<15} FAILED after the kill:\n{done.said[-3000:]}", flush=True)
        return False
    return report(case, run_dir, options.rollouts, killed_at, (begin, middle))


def report(
    case: str, run_dir: Path, rollouts: int, killed_at: int, times: tuple[float, float]
) -> bool:
    """Return the last record of each rollout: those after the newest checkpoint were made again."""
    trained = {r["rollout_id"]: r for r in records(run_dir, "train")}
    rewards = {r["rollout_id"]: r for r in records(run_dir, "rollout")}
    every = list(trained) == list(range(rollouts)) or sorted(trained) == list(range(rollouts))
    column = [rewards[i]["rollout/reward_mean"] for i in sorted(rewards)]
    gaps = [trained[i]["train/log_prob_gap_mean"] for i in sorted(trained)]
    largest = max(trained[i]["train/log_prob_gap_max"] for i in trained)
    first, last = sum(column[:3]) / 3, sum(column[-3:]) / 3
    ok = every and last > first
    print(
        f"{case:<15} {'ok' if ok else 'FAILED'}: reward {first:.3f} -> {last:.3f}; log-prob gap mean "
        f"{gaps[0]:.1e} (first) {gaps[-1]:.1e} (last), max {largest:.1e}; killed after {killed_at} "
        f"rollouts, {len(trained)} of {rollouts} trained; {times[1] - times[0]:.0f} + "
        f"{time.monotonic() - times[1]:.0f} s",
        flush=True,
    )
    return ok


def grpo(case: str, folder: Path, data: Any, rollouts: int) -> list[str]:
    run_dir = folder / case
    words = [*shared("megatron"), *CASES[case], "--run-dir", str(run_dir)]
    served = "fp8" if case in FP8_ROLLOUT else "hf"
    words += ["--hf-checkpoint", f"{folder}/warmup/{served}", "--prompt-data", str(data.train)]
    words += [
        "--custom-rm-path",
        "slime.cli.quickstart_task.reward",
        "--num-rollout",
        str(rollouts),
    ]
    words += ["--rollout-batch-size", "32", "--n-samples-per-prompt", "8"]
    words += ["--rollout-max-response-len", "8", "--advantage-estimator", "grpo"]
    words += ["--lr", "3e-4", "--lr-decay-style", "constant", "--colocate"]
    words += ["--save", f"{run_dir}/saved", "--load", f"{run_dir}/saved", "--save-interval", "4"]
    if case != "cpu":
        words += ["--sglang-mem-fraction-static", "0.2"]
    return words


def shared(backend: str) -> list[str]:
    return [
        *("--train-backend", backend, "--rollout-engine", "slime"),
        *("--actor-num-gpus-per-node", "1", "--input-key", "prompt", "--label-key", "answer"),
        *("--apply-chat-template", "--rollout-shuffle", "--rollout-seed", "1", "--seed", "1"),
        *("--adam-beta2", "0.95", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"),
    ]


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


class Ended:
    def __init__(self, returncode: int, said: str) -> None:
        self.returncode, self.said = returncode, said


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float) -> Ended:
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Ended(1, kill(process) + f"\nstill running after {seconds:.0f} s")
    return Ended(process.returncode, said)


def kill(process: subprocess.Popen[str]) -> str:
    """Kill the run's process group; Ray's processes follow."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]


if __name__ == "__main__":
    main()
