"""Build the command line of an SGLang server for each node, and check slime's tables of its options.

An engine of 32 GPUs on nodes of 8 is four processes with --tp-size 32 --nnodes 4 and --node-rank 0
to 3, which rendezvous at --dist-init-addr on the first node; only the first one serves HTTP.
`slime doctor --sglang` compares slime's tables with the parsers of the installed SGLang and router.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from slime.config.arguments import Args
from slime.config.flags.engine_options import known_version, sglang_argv
from slime.config.flags.registry import all_flags, read_table
from slime.config.installed import SGLangInstall, find_sglang
from slime.config.lora import served_modules
from slime.config.peft_files import decoder_shapes
from slime.core.errors import UserError
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
# SGLang's defaults resize images with torchvision, which rounds differently from Pillow, and look the
# tower's position embeddings up at other coordinates than Hugging Face's model.
_WITH_IMAGES = {
    "disable_fast_image_processor": True,
    "enable_precise_embedding_interpolation": True,
}


@dataclass(kw_only=True, frozen=True)
class Node:
    """One node's process of an engine."""

    host: str  # the address it listens on
    rank: int = 0
    count: int = 1


def cpu_env(num_ranks: int) -> dict[str, str]:
    """Return environment variables of a CPU server; let all ranks share all cores."""
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
    rendezvous_host: str,
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
        **_user_options(args),
        **_required_options(args, node=node, ports=ports, rendezvous_host=rendezvous_host),
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
        **(_WITH_IMAGES if args.multimodal_keys else {}),
        "dtype": _DTYPES[args.precision],
        "random_seed": args.rollout_seed + index,
        **({} if label is None else {"weight_version": label}),
        **(_lora(args, on_gpu=on_gpu) if args.sglang_enable_lora and args.lora_rank else {}),
    }


def _lora(args: Args, *, on_gpu: bool) -> dict[str, object]:
    """Return the options of adapter slots; a matrix without a slot must not be skipped."""
    return {
        "lora_target_modules": served_modules(args, decoder_shapes(args.hf_checkpoint)),
        "lora_strict_loading": True,
        **({} if on_gpu else {"lora_backend": "torch_native"}),
    }


def _user_options(args: Args) -> dict[str, object]:
    return {
        name.removeprefix("sglang_"): value
        for name, value in args.to_dict(redact=False).items()
        if name in all_flags()
        and all_flags()[name].family == "sglang"
        and args.origin(name) != "default"
        and value is not None
    }


def _required_options(
    args: Args, *, node: Node, ports: Ports, rendezvous_host: str
) -> dict[str, object]:
    values: dict[str, object] = {
        "model_path": args.hf_checkpoint,
        "host": node.host,
        "port": ports.server + node.rank,  # distinct if several "nodes" share a machine
        "tp_size": args.rollout_num_gpus_per_engine // (args.sglang_pp_size or 1),
    }
    if args.sglang_disaggregation_mode == "prefill":
        values["disaggregation_bootstrap_port"] = ports.bootstrap
    if node.count > 1:
        values |= {
            "nnodes": node.count,
            "node_rank": node.rank,
            "dist_init_addr": f"{rendezvous_host}:{ports.rendezvous}",
        }
    return values


_TIMEOUT_S = 300
_PRINT_OPTIONS = """
import argparse, json, sys
parser = argparse.ArgumentParser()
if sys.argv[1] == "sglang":
    from sglang.srt.server_args import ServerArgs
    ServerArgs.add_cli_args(parser)
else:
    from sglang_router.router_args import RouterArgs
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
if len(sys.argv) > 2:
    parser.parse_args(json.loads(sys.argv[2]))
print("ANSWER" + json.dumps([option for a in parser._actions for option in a.option_strings]))
"""


def installed_options(
    install: SGLangInstall, package: str, argv: list[str] | None = None
) -> set[str]:
    """Return the options of "sglang" or "sglang_router"; its parser must accept `argv`."""
    given = [] if argv is None else [json.dumps(argv)]
    command = [install.python, "-c", _PRINT_OPTIONS, package, *given]
    asked = f"could not read the options of {package} with {install.python}"
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{asked}: no answer within {_TIMEOUT_S} s: run it again") from None
    if reply.returncode != 0:
        last = (reply.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{asked}: it ended with status {reply.returncode}: {last}")
    answer = next(line for line in reply.stdout.splitlines() if line.startswith("ANSWER"))
    return set(json.loads(answer.removeprefix("ANSWER")))


def differences(install: SGLangInstall) -> list[str]:
    """Return one line per option that is missing from slime's tables or from the packages."""
    found = []
    for table, package in (("sglang", "sglang"), ("router", "sglang_router")):
        here = installed_options(install, package) - {"-h", "--help", "--config"}
        known = _known(table, install.version)
        found += [
            f"{package} has {option}, which slime does not know" for option in sorted(here - known)
        ]
        found += [f"{package} has no {option} any more" for option in sorted(known - here)]
    return [line for line in found if "--no-" not in line]  # skip the negated form of a flag


def _known(table: str, version: str) -> set[str]:
    rows = read_table(table)["flags"]  # pyright: ignore[reportArgumentType]
    if table == "sglang":
        rows = [row for row in rows if known_version(version) in row["versions"]]
    return {option.replace(f"--{table}-", "--", 1) for row in rows for option in row["options"]}


def compare_options() -> int:
    """Print the differences; return the exit status."""
    install = find_sglang()
    if install is None:
        print("sglang is not installed", file=sys.stderr)
        return 1
    lines = differences(install)
    print("\n".join(lines) or f"slime knows every option of SGLang {install.version}")
    return 1 if lines else 0
