"""Build the command line of an SGLang server for each node.

An engine of 32 GPUs on nodes of 8 is four processes with --tp-size 32 --nnodes 4 and --node-rank 0
to 3, which rendezvous at --dist-init-addr on the first node; only the first one serves HTTP.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from slime.config.arguments import Args
from slime.config.flags.engine_options import sglang_argv
from slime.config.flags.registry import all_flags
from slime.config.installed import SGLangInstall
from slime.utils.addresses import Ports

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Without a GPU only SGLang's torch-native code paths work.
_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # otherwise an idle scheduler busy-waits on a whole core
}


@dataclass(kw_only=True, frozen=True)
class Node:
    """One node's process of an engine."""

    host: str  # the address it listens on
    rank: int = 0
    count: int = 1


def cpu_env(num_ranks: int) -> dict[str, str]:
    """Return environment variables of a CPU server; SGLang binds ranks to cores: all share all."""
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * num_ranks)} if num_ranks > 1 else {}
    return {"SGLANG_USE_CPU_ENGINE": "1", **bound}


def nodes_of_engine(num_gpus: int, num_gpus_per_node: int) -> list[list[int]]:
    """Return an engine's GPU indices by node: 4 GPUs on nodes of 2 are [[0, 1], [2, 3]]."""
    size = min(num_gpus, num_gpus_per_node)
    return [list(range(start, start + size)) for start in range(0, num_gpus, size)]


def server_command(
    args: Args,
    *,
    index: int,
    node: Node,
    ports: Ports,
    meeting_host: str,
    install: SGLangInstall,
    on_gpu: bool,
    label: str | None = None,
    config_file: str | None = None,
) -> list[str]:
    """Return the command line of one node's server.

    `label` is the weight version that the server reports until its first update. On a command line
    every user of the machine can read it; in `config_file` only the owner can.
    """
    values = {
        **_defaults(args, index=index, on_gpu=on_gpu, label=label),
        **_given(args),
        **_own(args, node=node, ports=ports, meeting_host=meeting_host),
    }
    if args.offload_rollout and on_gpu:  # on a CPU there is no GPU memory to release
        values["enable_memory_saver"] = True
    argv = [install.python, "-m", "sglang.launch_server"]
    if config_file is not None:
        argv += ["--config", config_file]
    return argv + sglang_argv(values, install.version)


def _defaults(args: Args, *, index: int, on_gpu: bool, label: str | None) -> dict[str, object]:
    """Return defaults of slime that differ from SGLang's; the user's `--sglang-*` override them."""
    return {
        **({} if on_gpu else _ON_CPU),
        "dtype": _DTYPES[args.precision],
        "random_seed": args.rollout_seed + index,
        **({} if label is None else {"weight_version": label}),
    }


def _given(args: Args) -> dict[str, object]:
    return {
        name.removeprefix("sglang_"): value
        for name, value in args.to_dict(redact=False).items()
        if name in all_flags()
        and all_flags()[name].family == "sglang"
        and args.origin(name) != "default"
        and value is not None
    }


def _own(args: Args, *, node: Node, ports: Ports, meeting_host: str) -> dict[str, object]:
    values: dict[str, object] = {
        "model_path": args.hf_checkpoint,
        "host": node.host,
        "port": ports.server + node.rank,  # distinct if several "nodes" share a machine
        "tp_size": args.rollout_num_gpus_per_engine // (args.sglang_pp_size or 1),
    }
    if node.count > 1:
        values |= {
            "nnodes": node.count,
            "node_rank": node.rank,
            "dist_init_addr": f"{meeting_host}:{ports.rendezvous}",
        }
    return values
