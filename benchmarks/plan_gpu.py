"""The plan's memory against what one GPU measures: training of two shapes, and an engine.

usage: python benchmarks/plan_gpu.py [--cases engine 0.6B-fsdp 4B-megatron 0.6B-megatron 4B-fsdp]
       [--seconds 110]

Training: `benchmarks/train_gpu.py` in a process of its own, two micro-batches of 16384 tokens, and
torch.cuda.max_memory_allocated of a step that is not the first; predicted are the items of the plan's
training phase that the allocator counts (all but the CUDA context). Engine: the embedded one with
Qwen3-0.6B's shape and half of the GPU, by nvidia-smi after 64 requests, and the tokens of its KV cache.
A case that would not end in time is left out and said so. Lines `RATIO plan_gpu_<name>` are predicted /
measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import train_gpu  # noqa: E402
import train_shapes  # noqa: E402

from slime.cli.plan.memory import GIB, Phase  # noqa: E402
from slime.cli.plan.plan import Machine, Plan, make_plan  # noqa: E402
from slime.config.env import child_env  # noqa: E402
from slime.utils.machine import gpus  # noqa: E402

CASES = ("engine", "0.6B-fsdp", "4B-megatron", "0.6B-megatron", "4B-fsdp")
# Seconds a case may take, with writing its model: to leave out those that would not end in time.
NEEDS = {"0.6B": 22, "4B": 40, "engine": 40, "tiny": 15}
FRACTION = 0.5
OF_THE_TRAINER = ("CUDA context", "NCCL buffers")
STEP = ["--steps", "1", "--micro-batches", "2"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--seconds", type=float, default=110)
    args = parser.parse_args()
    started = time.perf_counter()
    card = gpus()
    capacity = card[0].memory_mib * 2**20 if card else 80 * GIB
    print(
        f"{time.strftime('%Y-%m-%d')} {card[0].name if card else 'CPU'}, {capacity / GIB:.1f} GiB"
    )
    ratios: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases:
            need = NEEDS[case.split("-")[0]]
            if time.perf_counter() - started + need > args.seconds:
                print(f"{case}: left out, {args.seconds:.0f} s would not be enough", flush=True)
                continue
            begin = time.perf_counter()
            run = measure_engine if case == "engine" else measure_training
            try:
                ratios += run(case, Path(folder), Machine(gpu_bytes=capacity, source="measured"))
            except (Exception, SystemExit) as error:  # the other cases still count
                print(f"{case} failed: {error}", flush=True)
            print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)
    for name, value in ratios:
        print(f"RATIO plan_gpu_{name} {value:.3f}")


def measure_training(case: str, folder: Path, machine: Machine) -> list[tuple[str, float]]:
    shape, backend = case.split("-")
    model = folder / shape
    if not model.exists():
        model = train_shapes.write_model(folder, shape)
    predicted = training_phase(backend, str(model), machine)
    command = [sys.executable, str(ROOT / "benchmarks" / "train_gpu.py"), *STEP]
    env = child_env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    command += ["--worker", backend, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        print(f"{case} failed:\n{(done.stdout + done.stderr)[-1500:]}")
        return []
    measured = json.loads(found[0].removeprefix("RESULT "))
    total = allocated(predicted)
    print(f"{case}: predicted {total / GIB:.2f} GiB, measured {measured['peak'] / GIB:.2f}")
    for item in predicted.items:
        print(f"    {item.name:<24}{item.nbytes / GIB:8.2f}  {item.note}")
    return [(case.replace("-", "_"), total / measured["peak"])] if measured["peak"] else []


def training_phase(backend: str, model: str, machine: Machine) -> Phase:
    options = argparse.Namespace(
        micro_batches=2, tokens=16384, sample_len=2048, recompute=False, steps=1
    )
    plan = make_plan(train_gpu.make_arguments(options, backend, model), machine)
    return next(phase for phase in plan.phases if phase.name == "training")


def allocated(phase: Phase) -> int:
    """Return the planned bytes without what torch's allocator does not count."""
    return sum(item.nbytes for item in phase.items if not item.name.endswith(OF_THE_TRAINER))


def measure_engine(case: str, folder: Path, machine: Machine) -> list[tuple[str, float]]:
    import engine_server
    import engine_shapes

    checkpoint = folder / "engine"
    engine_shapes.write_checkpoint(checkpoint, "0.6b")
    plan = engine_plan(checkpoint, machine)
    command = [*engine_server.engine_command(checkpoint), "--mem-fraction-static", str(FRACTION)]
    before = used_memory()
    with engine_server.Server("engine", command, folder, None, 100.0) as server:
        server.generate(engine_shapes.make_load()[:64])
        used, tokens = used_memory() - before, server_tokens(server)
    rollout = next(phase for phase in plan.phases if phase.name == "rollout")
    items = [item for item in rollout.items if item.name not in OF_THE_TRAINER]
    total = sum(item.nbytes for item in items)
    assert plan.cache is not None
    print(f"engine: predicted {total / GIB:.2f} GiB, nvidia-smi {used / GIB:.2f}")
    for item in items:
        print(f"    {item.name:<24}{item.nbytes / GIB:8.2f}  {item.note}")
    print(f"    KV cache: predicted {plan.cache.tokens} tokens, the engine has {tokens}")
    return [("engine", total / used), ("engine_kv_tokens", plan.cache.tokens / tokens)]


def engine_plan(checkpoint: Path, machine: Machine) -> Plan:
    from tests.args import make_args

    args = make_args(
        train_backend="fsdp",
        hf_checkpoint=str(checkpoint),
        actor_num_gpus_per_node=1,
        colocate=True,  # the trainer sleeps meanwhile
        bf16=True,
        sglang_mem_fraction_static=FRACTION,
        rollout_max_response_len=1024,
    )
    return make_plan(args, machine)


def used_memory() -> int:
    """Return the bytes in use on the GPU by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(command, text=True).splitlines()[0]) * 2**20


def server_tokens(server: Any) -> int:
    from engine_server import TOKEN

    from slime.utils.sync_http import get_json

    return get_json(f"{server.url}/get_server_info", token=TOKEN)["max_total_num_tokens"]


if __name__ == "__main__":
    main()
