"""Both trainers on one GPU: model FLOPs utilisation and peak memory of a training step.

usage: python benchmarks/train_gpu.py [--shapes 0.6B 4B 30B-A3B-4L] [--backends fsdp megatron]
       [--micro-batches 4] [--tokens 16384] [--sample-len 2048] [--recompute] [--profile FILE]
       python benchmarks/train_gpu.py --te      our layers, TransformerEngine's and its FP8, side by side

Random weights of Qwen3's shapes, bf16 with fp32 master weights and moments, packed micro-batches of
`--tokens` tokens; a step is forward, backward, clipping and AdamW over `--micro-batches` of them. FLOPs
are counted from the shape, nothing that is computed twice counts. MFU is against the rate of a large
bf16 matmul measured in the same run; the share of the data sheet's figure is printed beside it.
30B-A3B-4L is four layers of the MoE, Qwen3.5-9B-16L half of the model's: all of them do not fit beside their
fp32 optimizer; the backend megatron-loop computes its experts one after another, as
megatron-core's own module does. megatron-local is made of our layers, megatron-te of TransformerEngine's.
MFU of FP8 is against the bf16 rate too, so it may pass 1. Each backend runs in a process of its own: they
import at the same time and measure one after another; the median of `--steps` steps counts. Where fsdp is
measured alone, its weights are made on the GPU instead of being written and loaded. `plan` is what
`slime plan` predicts for the peak. The last lines are `RATIO train_gpu_mfu_<shape>_<backend> <MFU>` and
`RATIO train_gpu_plan_<shape>_<backend> <predicted / measured>`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.train_shapes import SHAPES, write_config, write_model  # noqa: E402

TE = {"transformer_impl": "transformer_engine"}
BACKENDS: dict[str, dict[str, Any]] = {  # and the flags that make them
    "fsdp": {},
    "megatron": {},
    "megatron-loop": {"transformer_impl": "local"},
    "megatron-local": {"transformer_impl": "local"},
    "megatron-te": TE,
    "megatron-te-fused": {**TE, "attention_backend": "fused"},
    "megatron-te-fp8": {**TE, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "megatron-te-fp8-blocks": {**TE, "fp8_format": "e4m3", "fp8_recipe": "blockwise"},
}


SIDE_BY_SIDE = ["megatron-local", "megatron-te", "megatron-te-fp8", "megatron-te-fp8-blocks"]
NOT_OF_THE_ALLOCATOR = ("CUDA context", "NCCL buffers")


def main() -> None:
    args = parse()
    if args.worker:
        measure(args, *args.worker)
        return
    peak = matmul_rate()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{time.strftime('%Y-%m-%d')} torch {torch.__version__}, {name}")
    print(
        f"bf16 matmul {peak / 1e12:.0f} TFLOP/s; {args.micro_batches} micro-batches of "
        f"{args.tokens} tokens, samples of {args.sample_len}, recompute {args.recompute}",
        flush=True,
    )
    ratios = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
            alone = set(args.backends) == {"fsdp"}
            model = (write_config if alone else write_model)(Path(folder), shape)
            found, planned = run_workers(args, model)
            for backend in args.backends:
                ratios += show(shape, backend, found[backend], planned[backend], peak)
    for name, value in ratios:
        print(f"RATIO {name} {value:.3f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS))
    parser.add_argument("--te", action="store_true", help="the three shapes, all precisions")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--fp8-tokens", type=int, help="instead of --tokens for FP8, which holds more"
    )
    parser.add_argument("--sample-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--recompute", action="store_true", help="recompute the activations of each layer"
    )
    parser.add_argument(
        "--profile", help="write a table of the operations of one step to this file"
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = ["0.6B", "30B-A3B-4L", "4B"] if args.te else ["0.6B", "4B"]
    args.shapes = args.shapes or shapes
    args.backends = args.backends or (SIDE_BY_SIDE if args.te else ["fsdp", "megatron"])
    return args


def show(
    shape: str, backend: str, result: dict[str, float] | None, planned: float, peak: float
) -> list[tuple[str, float]]:
    if result is None:
        print(f"{shape:<15}{backend:<23} failed", flush=True)
        return []
    mfu = result["flops"] / result["seconds"] / peak
    print(
        f"{shape:<15}{backend:<23}{result['seconds']:7.3f} s/step "
        f"{result['tokens'] / result['seconds']:9.0f} tok/s  "
        f"{result['flops'] / result['seconds'] / 1e12:5.0f} TFLOP/s  MFU {mfu:.3f}  "
        f"peak {result['peak'] / 2**30:.1f} GiB, plan {planned / 2**30:.1f} (weights, gradients, "
        f"optimizer {result['resident'] / 2**30:.1f})",
        flush=True,
    )
    ratios = [(f"train_gpu_mfu_{shape}_{backend}", mfu)]
    if result["peak"] and planned:
        ratios.append((f"train_gpu_plan_{shape}_{backend}", planned / result["peak"]))
    return ratios


def run_workers(
    options: argparse.Namespace, model: Path
) -> tuple[dict[str, dict[str, float] | None], dict[str, float]]:
    """Return (what was measured, predicted bytes) of every backend."""
    children = {backend: start_worker(options, backend, model) for backend in options.backends}
    measured: dict[str, dict[str, float] | None] = {}
    free = free_memory()
    for backend, child in children.items():
        wait_until_ready(model, children)
        wait_for_memory(free)  # of a worker that failed it is given back a little later
        (model.parent / f"{backend}.go").touch()
        measured[backend] = finish_worker(child)
    with ThreadPoolExecutor(len(children)) as pool:  # on the CPU, after all that was timed
        sizes = pool.map(lambda backend: predicted(options, backend, str(model)), children)
        return measured, dict(zip(children, sizes, strict=True))


def start_worker(options: argparse.Namespace, backend: str, model: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", backend, str(model)]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def finish_worker(child: subprocess.Popen[str]) -> dict[str, float] | None:
    said = child.communicate()[0]
    for line in said.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    print(said[-3000:])
    return None


def options_of(options: argparse.Namespace, backend: str) -> argparse.Namespace:
    tokens = options.fp8_tokens if "fp8" in backend else None
    return argparse.Namespace(**{**vars(options), "tokens": tokens or options.tokens})


def predicted(options: argparse.Namespace, backend: str, model: str) -> float:
    """Return the plan's bytes of a training step that torch's allocator counts; 0 without a plan."""
    from slime.cli.plan.plan import Machine, make_plan

    options = options_of(options, backend)
    try:
        machine = Machine(gpu_bytes=140 * 2**30, source="benchmark")
        plan = make_plan(make_arguments(options, backend, model), machine)
    except Exception as error:  # the measurement still counts
        print(f"no plan for {backend}: {error}")
        return 0.0
    return training_bytes(plan)


def training_bytes(plan: Any) -> float:
    training = next(phase for phase in plan.phases if phase.name == "training")
    items = [i for i in training.items if not i.name.endswith(NOT_OF_THE_ALLOCATOR)]
    return float(sum(item.nbytes for item in items))


def wait_until_ready(model: Path, children: dict[str, subprocess.Popen[str]]) -> None:
    """Return when every worker has imported what it needs, or has ended."""
    for backend, child in children.items():
        while child.poll() is None and not (model.parent / f"{backend}.ready").exists():
            time.sleep(0.05)


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def wait_for_memory(wanted: int, seconds: float = 20.0) -> None:
    """Return when about as much of the GPU is free as before, or after some seconds."""
    end = time.perf_counter() + seconds
    while free_memory() < wanted - 2**30 and time.perf_counter() < end:
        time.sleep(0.2)


def wait_for_turn(model: Path, backend: str) -> None:
    (model.parent / f"{backend}.ready").touch()
    while not (model.parent / f"{backend}.go").exists():
        time.sleep(0.05)


def fast_folder() -> str | None:
    """Return a folder in memory, if there is enough for models of gigabytes."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        return None
    free = os.statvfs(memory)
    return str(memory) if free.f_bavail * free.f_frsize > 40 * 2**30 else None


def measure(options: argparse.Namespace, backend: str, model: str) -> None:
    options = options_of(options, backend)
    args = make_arguments(options, backend, model)
    import_trainer(backend)
    wait_for_turn(Path(model), backend)
    actor = start(args, backend)
    progress(f"{backend}: started")
    batch = make_batch(args, options)
    result = measure_steps(options, actor, batch, model)
    print("RESULT " + json.dumps(result), flush=True)
    if options.profile:
        profile(actor, batch(), f"{options.profile}.{backend}.{Path(model).name}")


def measure_steps(
    options: argparse.Namespace, actor: Any, batch: Any, model: str
) -> dict[str, float]:
    from slime.runlog.perf_metrics import ModelShape, train_flops

    cuda = torch.cuda.is_available()
    resident = torch.cuda.memory_allocated() if cuda else 0
    actor.train(0, batch())
    synchronize()
    progress("first step done")
    if cuda:
        resident = max(resident, torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(options.steps):
        rows = batch()
        synchronize()
        begin = time.perf_counter()
        actor.train(step + 1, rows)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    lens = [options.sample_len] * (options.micro_batches * (options.tokens // options.sample_len))
    shape = ModelShape.from_hf_config(json.loads((Path(model) / "config.json").read_text()))
    return {
        "seconds": statistics.median(seconds),
        "flops": train_flops(shape, lens),
        "tokens": sum(lens),
        "peak": torch.cuda.max_memory_allocated() if cuda else 0,
        "resident": resident,
    }


def make_arguments(options: argparse.Namespace, backend: str, model: str, **more: object) -> Any:
    from tests.args import make_args

    rows = options.micro_batches * (options.tokens // options.sample_len)
    family = backend.split("-")[0]
    flags: dict[str, Any] = {
        "train_backend": family,
        "hf_checkpoint": model,
        "rollout_batch_size": rows,
        "n_samples_per_prompt": 1,
        "global_batch_size": rows,
        "micro_batch_size": options.tokens // options.sample_len,
        "lr": 1e-6,
        "rollout_max_prompt_len": options.sample_len - options.sample_len // 2,
        "rollout_max_response_len": options.sample_len // 2,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "colocate": True,
        "offload_train": False,  # a step does not give memory back for an engine
        "bf16": True,
        "advantage_estimator": "grpo",
        **BACKENDS[backend],
    }
    if options.recompute and family == "fsdp":
        flags["gradient_checkpointing"] = True
    elif family == "megatron" and not options.recompute:
        # Norms are cheap to compute again, and 4B would not fit beside fp32 gradients otherwise.
        flags |= {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    elif options.recompute:
        flags |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return make_args(**{**flags, **more})


def import_trainer(backend: str) -> Any:
    if backend == "fsdp":
        from slime.backends.fsdp_utils.actor import FSDPTrainRayActor as Actor
    else:
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor as Actor
    return Actor


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@torch.no_grad()
def random_weights(model: Any, path: str) -> None:
    for tensor in model.tensors().values():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local.normal_(0, 0.02) if tensor.ndim > 1 else local.fill_(1)


def start(args: Any, backend: str) -> Any:
    Actor = import_trainer(backend)
    if backend == "fsdp" and not any(Path(args.hf_checkpoint).glob("*.safetensors")):
        from slime.backends.fsdp_utils import actor as fsdp

        fsdp.load_hf_weights = random_weights
    actor: Any = Actor(args, 0, 1)
    actor.init(args)
    if backend == "megatron-loop":
        from megatron.core.transformer.moe.experts import SequentialMLP

        for layer in actor.chunks[0].decoder.layers:
            if isinstance(getattr(layer.mlp, "experts", None), SequentialMLP):
                layer.mlp.experts.__class__ = SequentialMLP
    return actor


def make_batch(args: Any, options: argparse.Namespace) -> Any:
    """Return a function that makes the batch anew, since training adds columns to it."""
    from slime.core.types import RolloutBatch
    from slime.rollout.train_data import split_batch

    count = args.global_batch_size
    length = options.sample_len
    rng = np.random.default_rng(0)
    responses = length // 2

    def make() -> RolloutBatch:
        batch = RolloutBatch(
            tokens=[rng.integers(0, 1000, length) for _ in range(count)],
            response_lens=[responses] * count,
            loss_masks=[np.ones(responses)] * count,
            rewards=rng.normal(size=count),
            raw_rewards=np.zeros(count),
            truncated=np.zeros(count),
            group_indices=np.arange(count),
            sample_indices=np.arange(count),
            trajectory_ids=np.arange(count),
            rollout_log_probs=[np.full(responses, -7.0)] * count,
        )
        return split_batch(args, batch, dp_size=1, cp_size=1)[0]

    return make


def matmul_rate(size: int = 8192, rounds: int = 20) -> float:
    """Return the FLOP/s of a square bf16 matmul."""
    if not torch.cuda.is_available():
        size, rounds = 512, 3
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    synchronize()
    begin = time.perf_counter()
    for _ in range(rounds):
        torch.mm(a, b)
    synchronize()
    return 2 * size**3 * rounds / (time.perf_counter() - begin)


def profile(actor: Any, batch: Any, path: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    # Events of a CPU beside those of a GPU take minutes to add up.
    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[kind]) as record:
        actor.train(99, batch)
        synchronize()
    table = record.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70
    )
    Path(path).write_text(table)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
