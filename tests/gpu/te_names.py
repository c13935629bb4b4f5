"""Record the names and shapes of every family's tensors when the layers are TransformerEngine's.

usage: python -m tests.gpu.te_names [--out tests/data/te_names] [--impl transformer_engine|local]

Each family is built at tiny size as each of the four ranks of TP2 x PP2 (experts: EP2 x PP2), over torch's
fake process group, in a process of its own; one file of JSON per family:

    {"family": "qwen3", "impl": ..., "layout": {...}, "ranks": [{"rank": 0, "layers": [0, 1], "experts": 0,
      "tensors": {NAME: SHAPE}, "stored": {KEY: SHAPE}}, ...]}      or {"family": ..., "error": ...}

`tensors` are those of the module, `stored` the keys of a torch_dist checkpoint with their global shapes.
tests/unit/test_te_names.py compares them with the weight rules where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "te_names"
WORLD = 4
DENSE = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
}
MOE_LAYOUT = {**DENSE, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def main() -> None:
    from tests.parity.tiny_families import FAMILIES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--impl", default="transformer_engine")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        write(options.out, options.worker, record_or_error(options.worker, options.impl))
        return
    command = [sys.executable, "-m", "tests.gpu.te_names", "--out", str(options.out)]
    command += ["--impl", options.impl, "--worker"]
    children = {name: subprocess.Popen([*command, name], cwd=ROOT) for name in options.families}
    for name, child in children.items():
        try:
            child.wait(options.seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            write(options.out, name, {"family": name, "error": "did not end in time"})
        if child.returncode:
            write(options.out, name, {"family": name, "error": f"ended with {child.returncode}"})
        print(name, summary(json.loads((options.out / f"{name}.json").read_text())), flush=True)


def write(folder: Path, family: str, found: dict[str, Any]) -> None:
    (folder / f"{family}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def summary(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"FAILED: {found['error'].strip().splitlines()[-1]}"
    stored = [rank["stored"] for rank in found["ranks"]]
    errors = [one["error"] for one in stored if set(one) == {"error"}]
    return f"{[len(rank['tensors']) for rank in found['ranks']]} tensors per rank" + (
        f"; checkpoint keys FAILED: {errors[0]}" if errors else ""
    )


def record_or_error(family: str, impl: str) -> dict[str, Any]:
    try:
        return record(family, impl)
    except Exception:  # the other families still count
        return {"family": family, "error": traceback.format_exc()}


def record(family: str, impl: str) -> dict[str, Any]:
    import torch

    from tests.args import make_args
    from tests.parity.tiny_families import MOE, make_family

    layout = MOE_LAYOUT if family in MOE else DENSE
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_family(Path(folder) / family, family, dtype="bfloat16")
        flags: dict[str, Any] = {"train_backend": "megatron", "actor_num_gpus_per_node": 1}
        if torch.cuda.is_available():
            flags |= {"rollout_num_gpus": None, "colocate": True, "offload_train": False}
        args = make_args(
            hf_checkpoint=str(checkpoint), bf16=True, transformer_impl=impl, **flags
        ).replace(**layout)
        ranks = [rank_tensors(args, rank) for rank in range(WORLD)]
    return {"family": family, "impl": impl, "layout": layout, "ranks": ranks}


def rank_tensors(args: Any, rank: int) -> dict[str, Any]:
    """Build this rank's model on the GPU, or on the CPU, and list what it holds."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from slime.backends.megatron_utils.cpu import install_cpu_adapter

    install_cpu_adapter()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from slime.backends.megatron_utils.model import build_chunks
    from slime.backends.megatron_utils.model_config import model_config, read_config
    from slime.backends.megatron_utils.passes import prepare_config
    from slime.backends.megatron_utils.patches import patch_megatron

    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        patch_megatron()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        hf_config = read_config(args.hf_checkpoint)
        config = model_config(hf_config, args)
        prepare_config(config)
        (chunk,) = build_chunks(args, config, hf_config)
        return {
            "rank": rank,
            "layers": [layer.layer_number - 1 for layer in chunk.decoder.layers],
            "experts": config.num_moe_experts or 0,
            "tensors": tensors_of(chunk),
            "stored": stored_keys(chunk),
        }
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def tensors_of(chunk: Any) -> dict[str, list[int]]:
    import torch

    state = chunk.state_dict(keep_vars=True).items()
    return {
        name: list(value.shape)
        for name, value in state
        if isinstance(value, torch.Tensor) and not name.endswith("._extra_state")
    }


def stored_keys(chunk: Any) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from slime.backends.megatron_utils.checkpoint import _METADATA

    try:
        state = chunk.sharded_state_dict(metadata=dict(_METADATA))
    except Exception as error:  # names of the module still count
        return {"error": repr(error)}
    return {
        value.key: list(value.global_shape)
        for value in state.values()
        if isinstance(value, ShardedTensor)
    }


if __name__ == "__main__":
    main()
