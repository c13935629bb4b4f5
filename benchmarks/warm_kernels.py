"""Compile flash-linear-attention's kernels for the shapes of the benchmarks, on many cores.

    python benchmarks/warm_kernels.py [--workers 12]

Triton compiles up to 25 variants of each kernel, one after another, before it times them. Here every process compiles
some of them for forward and backward, and then one process tunes with all. Processes that start later find
the variants, and what was chosen, in the caches of Triton.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# (key heads, value heads, backward): Qwen3.5-4B, 9B and Qwen3-Next; Qwen3.5-27B, which is only served
SHAPES = [(16, 32, True), (16, 32, False), (16, 48, False)]
LIMIT_S = 400


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        compile_part(options.part, options.workers)
        return 0
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--workers", str(options.workers), "--part"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([*command, str(part)], env=env, stdout=subprocess.DEVNULL)
        for part in range(options.workers)
    ]
    failed = [child.wait(LIMIT_S) for child in children]
    print(f"compiled in {time.perf_counter() - begin:.0f} s, status {failed}", flush=True)
    for shape in SHAPES:
        error = run(*shape)
        print(f"{shape}: error {error:.2g}, {time.perf_counter() - begin:.0f} s", flush=True)
    return max(map(abs, failed))


def compile_part(part: int, workers: int) -> None:
    """Run the kernels with every `workers`-th variant; later processes time them again."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.prune_configs = lambda self, _: self.configs[part::workers] or self.configs[:1]  # type: ignore[method-assign]
    for shape in SHAPES:
        run(*shape)


def run(num_key: int, num_value: int, backward: bool) -> float:
    """Return the error of the comparison that trainers and engines make before their first use.

    slime's own kernels have one variant each; they are compiled along.
    """
    import torch

    from slime.algorithms.delta_kernels import largest_error, run_fla, run_triton
    from slime.algorithms.gated_delta import DeltaHeads

    heads = DeltaHeads(num_key=num_key, num_value=num_value, key_dim=128, value_dim=128)
    where = (heads, torch.bfloat16, torch.device("cuda", 0))
    own = largest_error(run_triton, *where, backward)
    return max(own, largest_error(run_fla, *where, backward))


if __name__ == "__main__":
    sys.exit(main())
