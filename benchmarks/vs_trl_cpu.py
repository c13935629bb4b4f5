"""One GRPO step of slime on a CPU, all its processes included, against TRL's GRPOTrainer.

usage: python benchmarks/vs_trl_cpu.py [--rounds 3] [--steps 3] [--wait-quiet]

Same checkpoint (Qwen3, hidden 256, 4 layers, fp32), prompts, reward, 16 prompts x 8 samples, one
optimizer step per rollout. Once with 64 tokens per response, once with responses that end at 16..256
tokens: the run's sample number i ends at the same length on both sides. Runs of both sides take turns;
a run's first step is warm-up. A step is all of it: generation, rewards, training, logging, and for
slime the transfer of the weights to the engine with its check.

TRL is installed into build/trl-<version>, an environment of its own, with slime's torch and
transformers. Both sides keep freed memory (see MALLOC): glibc otherwise maps the KV cache of plain
`generate` anew at every token, and the comparison would be one with that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.arithmetic import longest_response, make_rows  # noqa: E402
from benchmarks.quiet import OthersWatch, wait_quiet  # noqa: E402
from benchmarks.slime_side import LENGTHS  # noqa: E402
from tests.tiny import make_tiny_checkpoint  # noqa: E402

TRL_VERSION = "1.16.0"
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
PROMPTS, SAMPLES, LR = 16, 8, 1e-4
CLEAN_SHARE, MAX_ATTEMPTS = 0.05, 10
WORKLOADS = {"fixed": "64", "mixed": "mixed"}


def main() -> None:
    options = parse_options()
    trl_python = trl_environment()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_tiny_checkpoint(work / "ckpt", weight_scale=1.0, **MODEL)
        rows = make_rows(512)
        (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print_header(options)
        ratios = {name: compare(name, options, trl_python, work) for name in options.workloads}
    for name, ratio in ratios.items():
        print(f"RATIO vs_trl_cpu_{name} {ratio:.2f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per run")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trl-micro-batch", type=int, default=32, help="completions per forward")
    parser.add_argument("--slime-args", default="", help="more flags for train.py, in one string")
    parser.add_argument(
        "--wait-quiet",
        action="store_true",
        help="wait for an idle machine, redo runs that others disturbed",
    )
    return parser.parse_args()


def trl_environment() -> Path:
    """Return the Python of an environment with TRL and slime's own torch and transformers."""
    folder = ROOT / "build" / f"trl-{TRL_VERSION}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists():
        print(f"installing TRL {TRL_VERSION} into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        pins = [f"{name}=={version(name)}" for name in ("torch", "transformers")]
        install = [python, "-m", "pip", "install", "-q", f"trl=={TRL_VERSION}", *pins]
        if subprocess.run(install).returncode:  # a CPU build of torch is not on PyPI
            index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
            subprocess.run([*install, *index], check=True)
        stamp.touch()
    return python


def print_header(options: argparse.Namespace) -> None:
    print(
        f"slime {version('slime')} torch {version('torch')} transformers {version('transformers')} "
        f"ray {version('ray')}, TRL {TRL_VERSION} with the same torch and transformers"
    )
    print(
        f"{os.cpu_count()} cores, {PROMPTS} prompts x {SAMPLES} samples, fp32, one optimizer step per "
        f"rollout; {options.rounds} runs of {options.steps} timed steps per side, taking turns"
    )
    print(f"model {json.dumps(MODEL)}, TRL micro-batch {options.trl_micro_batch}", flush=True)


def compare(name: str, options: argparse.Namespace, trl_python: Path, work: Path) -> float:
    seconds: dict[str, list[float]] = {"trl": [], "slime": []}
    for number in range(options.rounds):
        for side in ("trl", "slime"):
            run_dir = work / f"{name}_{side}_{number}"
            seconds[side] += one_run(name, side, options, trl_python, run_dir)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    print(f"{name}: median s/step TRL {medians['trl']:.3f}, slime {medians['slime']:.3f}")
    return medians["trl"] / medians["slime"]


def one_run(
    name: str, side: str, options: argparse.Namespace, trl_python: Path, run_dir: Path
) -> list[float]:
    """Return the seconds per timed step; with --wait-quiet, of a run that others left alone."""
    for attempt in range(MAX_ATTEMPTS):
        if options.wait_quiet:
            wait_quiet(window=5.0, limit=1800.0, share=0.03)
        with OthersWatch(LENGTHS) as others:
            if side == "trl":
                steps, length = run_trl(WORKLOADS[name], options, trl_python, run_dir.parent)
            else:
                target = run_dir.with_suffix(f".{attempt}")
                steps, length = run_slime(WORKLOADS[name], options, run_dir.parent, target)
        shown = " ".join(f"{step:.2f}" for step in steps)
        print(
            f"{name} {side:5} s/step {shown} (mean response {length:.1f} tokens, "
            f"other programs {others.share:.1%} of the machine)",
            flush=True,
        )
        if not options.wait_quiet or others.share < CLEAN_SHARE:
            return steps
        print("  disturbed, once more", flush=True)
    sys.exit(f"the machine did not stay quiet for one run in {MAX_ATTEMPTS}; try again later")


def run_trl(
    lengths: str, options: argparse.Namespace, trl_python: Path, work: Path
) -> tuple[list[float], float]:
    command = [trl_python, ROOT / "benchmarks" / "trl_side.py", work / "ckpt", work / "data.jsonl"]
    command += ["--lengths", lengths, "--steps", str(options.steps), "--prompts", str(PROMPTS)]
    command += ["--samples-per-prompt", str(SAMPLES), "--lr", str(LR)]
    command += ["--micro-batch", str(options.trl_micro_batch), "--threads", str(options.threads)]
    output = run(command, lengths)
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    return result["step_seconds"], statistics.mean(result["mean_response_lengths"])


def run_slime(
    lengths: str, options: argparse.Namespace, work: Path, run_dir: Path
) -> tuple[list[float], float]:
    command = [sys.executable, ROOT / "train.py", "--train-backend", "fsdp"]
    command += ["--rollout-engine", "slime", "--colocate", "--run-dir", run_dir]
    command += ["--hf-checkpoint", work / "ckpt", "--prompt-data", work / "data.jsonl"]
    command += ["--input-key", "prompt", "--label-key", "label"]
    command += ["--custom-rm-path", "benchmarks.slime_side.reward"]
    command += ["--custom-generate-function-path", "benchmarks.slime_side.generate"]
    command += ["--num-rollout", str(1 + options.steps), "--rollout-batch-size", str(PROMPTS)]
    command += ["--n-samples-per-prompt", str(SAMPLES), "--num-steps-per-rollout", "1"]
    command += ["--rollout-max-response-len", str(longest_response(lengths))]
    command += ["--lr", str(LR), "--lr-decay-style", "constant"]
    command += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"]
    # One trainer rank and one engine that take turns, each with every core (docs/LOG.md).
    command += ["--actor-num-gpus-per-node", "1"]
    command += ["--no-offload-train", "--no-offload-rollout"]  # no GPU memory to make room in
    command += options.slime_args.split()
    run(command, lengths)
    timed = timed_metrics(run_dir, options.steps)
    lens = [row["rollout/response_len_mean"] for row in timed]
    return [row["perf/step_time"] for row in timed], statistics.mean(lens)


def timed_metrics(run_dir: Path, steps: int) -> list[dict[str, float]]:
    """Return all metrics of each rollout after the first."""
    metrics: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        metrics.setdefault(row["rollout_id"], {}).update(row)
    return [metrics[rollout_id] for rollout_id in range(1, 1 + steps)]


def run(command: Sequence[object], lengths: str, **env: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env={**os.environ, **MALLOC, LENGTHS: lengths, **env},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
