"""Weights from a trainer to the embedded engine on the same GPU, over CUDA IPC, checksums included.

usage: python benchmarks/weight_sync_gpu.py [--shapes 0.6B 4B] [--rounds 5] [--buffer-size BYTES ...] [--profile]

An FSDP trainer in this process (fp32 master weights, sent in bf16) and the engine's server in another,
both on one GPU, random weights of Qwen3's shapes. One update is all of it: pausing the engine, casting
and packing, the engine's copies, its prefix cache dropped, the checksums of both sides compared,
generation resumed. The first one is warm-up; the median of `--rounds` counts. "device copy" is the rate of
copying the same bytes within the GPU, the upper limit. Without a GPU it runs over shared memory, with
`--shapes tiny` in seconds; `--shapes tiny-deep --buffer-size 400000`, as many tensors and about as many
buckets as 4B, measures what an update costs besides the copies (sums apart: a CPU takes them one by one).
Several sizes of `--buffer-size` are measured one after another on the same two processes, and the best one
counts. The last lines are `RATIO weight_sync_gb_per_s_<shape> <value>`.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("SLIME_ENGINE_TOKEN", "benchmark")

import torch  # noqa: E402

from benchmarks.train_gpu import start, synchronize  # noqa: E402
from benchmarks.train_shapes import SHAPES, write_model  # noqa: E402
from slime.core.types import EngineInfo  # noqa: E402
from slime.utils.device import device_id  # noqa: E402
from tests.args import make_args  # noqa: E402
from tests.engines import engine_server  # noqa: E402

# What an update consists of, in the files of slime/weights and where buckets are made.
PHASES = r"(sync|buckets|transport|engine_client|verify|ipc|gathering|update_weight)\.py"
MAX_TOKENS = 20000  # of the engine's KV cache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "4B"], choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--buffer-size", type=int, nargs="+", help="bytes of a bucket; default: the run's"
    )
    parser.add_argument("--profile", action="store_true", help="where one more update spends it")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "CPU, shared memory"
    print(f"{time.strftime('%Y-%m-%d')} torch {torch.__version__}, {name}", flush=True)
    rates = {shape: measure(shape, options) for shape in options.shapes}
    for shape, rate in rates.items():
        print(f"RATIO weight_sync_gb_per_s_{shape} {rate:.1f}")


def measure(shape: str, options: argparse.Namespace) -> float:
    """Return the GB/s of the median update."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape)
        actor = start(make_arguments(model), "fsdp")
        sizes = options.buffer_size or [actor.args.update_weight_buffer_size]
        with serve(model) as engine:
            return max(measure_buffers(shape, actor, engine, size, options) for size in sizes)


def measure_buffers(
    shape: str, actor: Any, engine: EngineInfo, size: int, options: argparse.Namespace
) -> float:
    actor.args = actor.args.replace(update_weight_buffer_size=size)
    versions = range(1, 2 + options.rounds)
    reports = [actor.update_weights([engine], version) for version in versions][1:]
    seconds = statistics.median(report.seconds for report in reports)
    sums = statistics.median(report.checksum_seconds for report in reports)
    first = reports[0]
    rate = first.nbytes / seconds / 1e9
    print(
        f"{shape:<6}{first.nbytes / 1e9:6.2f} GB in {first.num_tensors} tensors, {first.num_buckets} "
        f"buckets: {1000 * seconds:7.1f} ms (checksums {1000 * sums:.1f}), {rate:.1f} GB/s; "
        f"device copy {copy_rate(first.nbytes):.0f} GB/s; "
        f"all: {' '.join(f'{1000 * r.seconds:.1f}' for r in reports)} ms",
        flush=True,
    )
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(actor.update_weights, [engine], 2 + options.rounds)
        stats = pstats.Stats(profile).strip_dirs()
        stats.sort_stats("tottime").print_stats(8)
        stats.sort_stats("cumtime").print_stats(PHASES, 30)
    return rate


def make_arguments(model: Path) -> Any:
    flags: dict[str, Any] = {
        "train_backend": "fsdp",
        "hf_checkpoint": str(model),
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        "colocate": True,
        "bf16": torch.cuda.is_available(),
    }
    return make_args(**flags)


@contextlib.contextmanager
def serve(model: Path, *more: str) -> Iterator[EngineInfo]:
    """Use a small KV cache: the trainer has the rest of the GPU."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    words = ["--dtype", dtype, "--skip-tokenizer-init", "--max-total-tokens", str(MAX_TOKENS)]
    token = os.environ["SLIME_ENGINE_TOKEN"]
    with engine_server(model, *words, *more, token=token) as server:
        yield EngineInfo(url=server.url, device_ids=(device_id(),))


def copy_rate(nbytes: int) -> float:
    """Return the GB/s of a copy within the device, counted once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.empty(min(nbytes, 8 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return source.numel() / min(seconds) / 1e9


if __name__ == "__main__":
    main()
