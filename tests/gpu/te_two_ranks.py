"""TransformerEngine over two tensor-parallel processes that share one GPU, against one process.

usage: python -m tests.gpu.te_two_ranks [--impl transformer_engine|local] [--families qwen3 qwen3_moe]
       [--seconds 60]

NCCL refuses two ranks on one GPU, so collectives go over gloo, which copies through host memory. Prints for
every family and layout how far gradients are from those of one process, or which collective did not work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": TP,
    "TP2 SP": {**TP, "sequence_parallel": True},
    "TP2 SP EP2": {
        **TP,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "PP2": {"pipeline_model_parallel_size": 2},
}
# Sums over two ranks round otherwise than one: bf16 has 8 bits, and norms of queries have small gradients.
TOLERANCE = 0.1


def cases_of(family: str) -> list[str]:
    from tests.parity.tiny_families import MOE

    return ["TP2 SP EP2", "PP2"] if family in MOE else ["TP2", "TP2 SP", "PP2"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--impl", default="transformer_engine")
    parser.add_argument("--families", nargs="+", default=["qwen3", "qwen3_moe"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        family, layout, rank, world, folder = options.worker
        worker(options.impl, family, layout, int(rank), int(world), Path(folder))
        return
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, family, Path(folder))


def compare(options: argparse.Namespace, family: str, folder: Path) -> None:
    """One process first, then all layouts of two at the same time."""
    from tests.parity.tiny_families import make_family

    make_family(folder / family, family, dtype="bfloat16", hidden_size=64)
    (one,) = start(options, family, "one", 1, folder)
    layouts = {name: start(options, family, name, 2, folder) for name in cases_of(family)}
    print(f"{family:<10} one process: {outcome([one], options.seconds)}", flush=True)
    for name, children in layouts.items():
        said = outcome(children, options.seconds)
        print(f"{family:<10} {name:<11} {said if said else distance(folder, name)}", flush=True)


def start(
    options: argparse.Namespace, family: str, layout: str, world: int, folder: Path
) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.gpu.te_two_ranks", "--impl", options.impl, "--worker"]
    return [
        subprocess.Popen(
            [*command, family, layout, str(rank), str(world), str(folder)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]


def outcome(children: list[subprocess.Popen[str]], seconds: float) -> str:
    """Return why it did not work, an empty string if it did."""
    said = ""
    for child in children:
        try:
            _, errors = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            said = said or f"did not end within {seconds:.0f} s"
            continue
        if child.returncode and not said:
            lines = [line for line in errors.splitlines() if line.strip()]
            said = f"FAILED: {lines[-1] if lines else child.returncode}"
    return said


def distance(folder: Path, layout: str) -> str:
    import torch

    wanted = torch.load(folder / "one.pt", weights_only=True)
    found = torch.load(folder / f"{layout}.pt", weights_only=True)
    if found.keys() != wanted.keys():
        return f"FAILED: other tensors: {sorted(found.keys() ^ wanted.keys())[:4]}"
    far = {n: float((found[n] - w).norm() / w.norm()) for n, w in wanted.items()}
    worst = max(far, key=lambda name: far[name])
    verdict = "ok" if far[worst] < TOLERANCE else "TOO FAR"
    return f"{verdict}: largest gradient gap {far[worst]:.1e} of the norm ({worst})"


def worker(impl: str, family: str, layout: str, rank: int, world: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from tests.args import make_args
    from tests.parity.megatron_model import MegatronTrainer
    from tests.parity.test_families import tokens

    cuda = torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:gloo" if cuda else "gloo",
        init_method=f"file://{folder}/{layout.replace(' ', '-')}.store",
        rank=rank,
        world_size=world,
    )
    os.environ["LOCAL_RANK"] = "0"
    flags: dict[str, Any] = {"train_backend": "megatron", "actor_num_gpus_per_node": 1}
    if cuda:
        flags |= {"rollout_num_gpus": None, "colocate": True, "offload_train": False}
    args = make_args(
        hf_checkpoint=str(folder / family),
        bf16=True,
        transformer_impl=impl,
        use_distributed_optimizer=False,
        **flags,
    )
    model = MegatronTrainer(args.replace(**LAYOUTS.get(layout, {})))
    model.load(folder / family)
    gradients = model.gradients(tokens())
    if rank == 0:
        torch.save({n: g.float().cpu() for n, g in gradients.items()}, folder / f"{layout}.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
