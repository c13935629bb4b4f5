"""One GRPO step on one GPU, engine and trainer sharing it: seconds, share of each part, and TRL beside it.

usage: python benchmarks/step_gpu.py [--shape 0.6B] [--prompts 32] [--samples 8] [--lengths 128-1024]
       [--steps 3] [--trl-path SITE_PACKAGES [--vllm-path SITE_PACKAGES]]

Random weights of Qwen3's shape in bf16 with fp32 master weights, 32 prompts x 8 samples whose sample
number i ends at the same length on both sides, one optimizer step per rollout. A step of slime is all of
it: rollout, rewards, log-probs, training, weights to the engine with their check, memory handed back and
forth, logging. TRL 1.16 generates with transformers, and with `--vllm-path` a second time with vLLM on the
same GPU, its best configuration; both with the first micro-batch of `--trl-micro-batches` that fits. A run's first
step is warm-up; medians count. Without `--trl-path` only slime is measured; `--shape tiny` runs on a CPU.
The last lines are `RATIO step_gpu_vs_trl <TRL's seconds / slime's>` and `RATIO step_gpu_vs_trl_vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.arithmetic import longest_response, make_rows, response_length  # noqa: E402
from benchmarks.train_shapes import SHAPES, write_model  # noqa: E402
from benchmarks.vs_trl_cpu import run, timed_metrics  # noqa: E402
from tests.tiny import make_byte_tokenizer  # noqa: E402

PARTS = {
    "rollout and rewards": "perf/generate_time",
    "training": "perf/train_time",
    "of it log-probs": "perf/train/old_log_probs_time",
    "weights to the engine": "perf/update_weights_time",
}


def main() -> None:
    options = parse_options()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{time.strftime('%Y-%m-%d')} torch {torch.__version__}, {name}")
    count = options.prompts * options.samples
    tokens = sum(response_length(options.lengths, i) for i in range(count, 2 * count))
    print(
        f"shape {options.shape}, {options.prompts} prompts x {options.samples} samples, responses of "
        f"{options.lengths} tokens, about {tokens} a step",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = write_model(work, options.shape)
        make_byte_tokenizer().save_pretrained(model)
        rows = make_rows(options.prompts * (2 + options.steps))
        (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ours = run_slime(options, model, work)
        theirs = {}
        if options.trl_path and options.vllm_path:
            theirs["step_gpu_vs_trl_vllm"] = run_trl(options, model, work, vllm=True)
        if options.trl_path and not options.only_vllm:
            theirs["step_gpu_vs_trl"] = run_trl(options, model, work)
    for ratio, seconds in theirs.items():
        if seconds is not None:
            print(f"RATIO {ratio} {seconds / ours:.2f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--lengths", default="128-1024", help="64, 128-1024 or mixed (16-256)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of slime's micro-batches")
    parser.add_argument("--trl-path", help="folder of packages that holds trl")
    parser.add_argument("--vllm-path", help="folders of packages that hold vllm and what it needs")
    parser.add_argument("--only-vllm", action="store_true", help="leave TRL with transformers out")
    parser.add_argument("--trl-micro-batches", type=int, nargs="+", default=[64, 32, 16, 8])
    return parser.parse_args()


def run_slime(options: argparse.Namespace, model: Path, work: Path) -> float:
    """Return the seconds of the median step; print where they go."""
    run_dir = work / "run"
    command = [sys.executable, ROOT / "train.py", "--train-backend", "fsdp", "--colocate"]
    command += ["--rollout-engine", "slime", "--actor-num-gpus-per-node", "1"]
    command += ["--run-dir", run_dir, "--hf-checkpoint", model]
    command += ["--bf16"] if torch.cuda.is_available() else []
    command += [
        "--prompt-data",
        work / "data.jsonl",
        "--input-key",
        "prompt",
        "--label-key",
        "label",
    ]
    command += ["--custom-rm-path", "benchmarks.slime_side.reward"]
    command += ["--custom-generate-function-path", "benchmarks.slime_side.generate_past_ends"]
    command += ["--num-rollout", 1 + options.steps, "--rollout-batch-size", options.prompts]
    command += ["--n-samples-per-prompt", options.samples, "--num-steps-per-rollout", "1"]
    command += ["--rollout-max-response-len", longest_response(options.lengths)]
    command += ["--lr", "1e-6", "--lr-decay-style", "constant"]
    command += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", options.max_tokens]
    run(command, options.lengths)
    timed = timed_metrics(run_dir, options.steps)
    steps = [row["perf/step_time"] for row in timed]
    seconds = statistics.median(steps)
    print(f"slime  {seconds:7.3f} s per step  ({' '.join(f'{s:.3f}' for s in steps)})")
    for part, metric in PARTS.items():
        values = [row[metric] for row in timed if metric in row]
        if values:
            value = statistics.median(values)
            print(f"  {part:<22}{value:7.3f} s  {value / seconds:4.0%}")
    rate = statistics.median(row["perf/rollout_tokens_per_second"] for row in timed)
    print(f"  generation {rate:.0f} tok/s", flush=True)
    return seconds


def run_trl(
    options: argparse.Namespace, model: Path, work: Path, *, vllm: bool = False
) -> float | None:
    """Return the same of TRL, with the first micro-batch that fits; None if none does."""
    packages = [options.trl_path, *([options.vllm_path] if vllm else [])]
    path = [*packages, os.environ.get("PYTHONPATH", "")]
    name = "TRL with vLLM" if vllm else "TRL"
    for micro_batch in options.trl_micro_batches:
        command = [sys.executable, ROOT / "benchmarks" / "trl_side.py", model, work / "data.jsonl"]
        command += ["--lengths", options.lengths, "--steps", options.steps, "--lr", "1e-6"]
        command += ["--prompts", options.prompts, "--samples-per-prompt", options.samples]
        command += ["--micro-batch", micro_batch, "--threads", os.cpu_count()]
        command += ["--cuda"] if torch.cuda.is_available() else []
        command += ["--vllm"] if vllm else []
        try:
            output = run(command, options.lengths, PYTHONPATH=os.pathsep.join(path))
        except SystemExit as error:
            words = str(error).strip().splitlines()
            print(f"{name}, micro-batches of {micro_batch}: {words[-1][:200]}", flush=True)
            continue
        # A progress bar may stand before it in the same line.
        result = json.loads(output.rsplit("RESULT ", 1)[1].splitlines()[0])
        steps = result["step_seconds"]
        seconds = statistics.median(steps)
        print(
            f"{name:<14}{seconds:7.3f} s per step  ({' '.join(f'{s:.3f}' for s in steps)})  "
            f"micro-batch {micro_batch}, {result['versions']}",
            flush=True,
        )
        return seconds
    return None


if __name__ == "__main__":
    main()
