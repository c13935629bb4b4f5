"""LoRA of rank 16 on one GPU: a training step, decoding, the update of an adapter, the largest model.

    python benchmarks/lora_gpu.py [--only train decode update largest] [--sglang-path SITE_PACKAGES]
    python benchmarks/lora_gpu.py --tiny          on a CPU, in a minute: the same code on a tiny shape

train-16k, train-65k    one sequence of so many tokens in Qwen3-4B's shape, layers recomputed. Tokens per second,
                        peak memory and the plan's, beside what prime-rl publishes for one H100. FLOPs are those of
                        LoRA, which computes no gradients of the base's weights; MFU is against a bf16 matmul's rate.
decode                  256 requests as in engine_gpu.py, with an adapter and without, in the same engine; with
                        --sglang-path also what SGLang loses with an adapter, started at the same time on a
                        checkpoint of 8 GB: it loads adapters of real checkpoints only
update                  4B's adapter from the trainer to an engine on the same GPU, with checksums
largest-14b, -32b       one card does all that GRPO needs: a training step of 8,192 tokens, an engine of the same
                        model beside the trainer, merged weights sent to it, responses; peaks and the plan's

Weights are random and made in place: but for SGLang nothing of a model but its config.json is written. Each part is a process of
its own with a limit; what it printed is shown, and one table of all parts comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("SLIME_ENGINE_TOKEN", "benchmark")

import engine_server  # noqa: E402
import engine_shapes  # noqa: E402
import plan_gpu  # noqa: E402
import torch  # noqa: E402
import train_gpu  # noqa: E402
import train_shapes  # noqa: E402
import weight_sync_gpu  # noqa: E402

RANK, GIB = 16, 2**30
LORA = {"lora_rank": RANK, "lora_alpha": 2.0 * RANK}
MERGED = {**LORA, "lora_merge_for_rollout": True, "offload_train": True}
STAYS = {"offload_train": False, "offload_rollout": False}  # the engine keeps the base
# The engine beside the trainer: what `serve` starts, all of it awake.
BESIDE = {
    **STAYS,
    "rollout_engine": "slime",
    "sglang_max_total_tokens": weight_sync_gpu.MAX_TOKENS,
    "sglang_max_running_requests": 16,
}
# tokens per second and GiB on one H100, rank 16, layers recomputed
PRIME_RL = {16384: (6230, 23.3), 65536: (4160, 42.0)}
DECODE_GOAL, UPDATE_GOAL_MS, SPEED_GOAL = 0.90, 5.0, 1.5
PARTS = (
    "train-16k",
    "train-65k",
    "decode",
    "update",
    "largest-14b",
    "largest-32b",
)
LIMITS_S = {"decode": 300, "largest-32b": 200}
LIMIT_S = 150  # of the others
CUDA = torch.cuda.is_available()


def main() -> int:
    options = parse()
    if options.worker:
        with tempfile.TemporaryDirectory(dir=train_gpu.fast_folder()) as folder:
            run_part(options.worker, options, Path(folder))
        return 0
    chosen = [p for p in PARTS if any(p.startswith(name) for name in options.only or PARTS)]
    rows: list[list[str]] = []
    for part in chosen:
        rows += in_child(part)
    print("\n" + "\n".join(table([["", "measured", "beside", "goal"], *rows])))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="parts, or beginnings of their names")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sglang-path", help="folder of packages that holds sglang")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_child(part: str) -> list[list[str]]:
    """Run one part, show what it printed, and return the rows of the table that it made."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", part]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(
            command,
            env=env,
            text=True,
            timeout=LIMITS_S.get(part, LIMIT_S),
            stdout=subprocess.PIPE,
            stderr=2,
        )
        said, failed = done.stdout, done.returncode != 0
    except subprocess.TimeoutExpired as error:
        said, failed = (error.stdout or b"").decode(errors="replace"), True
    lines = said.splitlines()
    print("\n".join(line for line in lines if not line.startswith("ROW ")))
    print(f"  ({part}: {time.perf_counter() - begin:.0f} s)", flush=True)
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
    return [*rows, [part, "failed", "-", "-"]] if failed else rows


def row(name: str, measured: str, beside: str = "-", goal: str = "-") -> None:
    print("ROW " + json.dumps([name, measured, beside, goal]), flush=True)


def table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)) for r in rows
    ]


def run_part(part: str, options: argparse.Namespace, folder: Path) -> None:
    kind, _, size = part.partition("-")
    if kind == "train":
        train({"16k": 16384, "65k": 65536}[size], options, folder)
    elif kind == "decode":
        decode(options, folder)
    elif kind == "update":
        update(options, folder)
    else:
        largest(size.upper(), options, folder)


# ---- a trainer with random weights


def step_options(tokens: int, sample_len: int) -> argparse.Namespace:
    return argparse.Namespace(
        micro_batches=1, tokens=tokens, sample_len=sample_len, steps=2, recompute=True
    )


def plan_of(args: Any) -> Any:
    from slime.cli.plan.plan import Machine, make_plan

    size = torch.cuda.get_device_properties(0).total_memory if CUDA else 140 * GIB
    return make_plan(args, Machine(gpu_bytes=size, source="this GPU"))


def lora_flops(result: dict[str, float], model: str) -> float:
    """Return FLOPs without the gradients of frozen matrices, one third of what their matmuls cost."""
    from slime.runlog.perf_metrics import ModelShape, forward_flops

    shape = ModelShape.from_hf_config(json.loads((Path(model) / "config.json").read_text()))
    return result["flops"] - result["tokens"] * forward_flops(shape, [1])


# ---- the parts


def train(tokens: int, options: argparse.Namespace, folder: Path) -> None:
    shape = "tiny" if options.tiny else "4B"
    wanted = tokens
    tokens = tokens // 64 if options.tiny else tokens
    model, step = str(train_shapes.write_config(folder, shape)), step_options(tokens, tokens)
    args = train_gpu.make_arguments(step, "fsdp", model, **MERGED)
    rate = train_gpu.matmul_rate()
    actor = train_gpu.start(args, "fsdp")
    found = train_gpu.measure_steps(step, actor, train_gpu.make_batch(args, step), model)
    speed = found["tokens"] / found["seconds"]
    mfu = lora_flops(found, model) / found["seconds"] / rate
    planned = train_gpu.training_bytes(plan_of(args)) / GIB
    peer, peer_memory = PRIME_RL[wanted]
    name = f"train_{shape}_{wanted // 1024}k"
    row(
        f"{name}_tokens_per_s",
        f"{speed:.0f} tok/s ({found['seconds']:.3f} s), MFU {mfu:.3f}",
        f"prime-rl {peer}: {speed / peer:.2f}x",
        f">= {SPEED_GOAL}x",
    )
    peak = found["peak"] / GIB
    beside = f"plan {planned:.1f}, prime-rl {peer_memory}"
    row(f"{name}_peak", f"{peak:.1f} GiB", beside, f"<= {peer_memory}")


def decode(options: argparse.Namespace, folder: Path) -> None:
    """Measure the base and an adapter in turns in one engine."""
    model = folder / "model"
    config = engine_shapes.write_checkpoint(model, "tiny" if options.tiny else "4b")
    adapter = write_adapter(folder / "adapter", config)
    load = small_load() if options.tiny else engine_shapes.make_load()
    serving = ["--lora-paths", f"a={adapter}", "--max-lora-rank", str(RANK)]
    if options.tiny:
        serving += ["--max-total-tokens", "20000", "--dtype", "float32"]
    else:  # two engines on one GPU
        serving += ["--max-total-tokens", str(64 * (sum(engine_shapes.count_tokens(load)) // 55))]
    commands = {"engine": [*engine_server.engine_command(model), "--max-loras-per-batch", "1"]}
    if options.sglang_path:  # which counts the base as an adapter
        begin, size = time.perf_counter(), engine_shapes.write_weights(model)
        print(
            f"  {size / 1e9:.1f} GB of weights in {time.perf_counter() - begin:.1f} s", flush=True
        )
        attention = "fa3" if CUDA else "torch_native"
        command = engine_server.sglang_command(model, attention, load_format="auto")
        command += [] if CUDA else ["--lora-backend", "torch_native"]
        commands["sglang"] = [*command, "--enable-lora", "--max-loras-per-batch", "2"]
    started = [
        engine_server.Server(
            name,
            [*command, *serving],
            folder,
            options.sglang_path if name == "sglang" else None,
            LIMITS_S["decode"] - 150,
        )
        for name, command in commands.items()
    ]
    for server in started:
        with contextlib.suppress(engine_server.EngineFailed):
            server.wait()
    for server in started:
        try:
            with server:
                rates = turns(server, load, 1 if options.tiny else min(options.rounds, 2))
        except engine_server.EngineFailed as error:
            print(f"FAILED {error}", flush=True)
            continue
        row(
            f"decode_{server.name}",
            f"{rates['a'] / rates[None]:.3f} of the base ({rates['a']:.0f} of {rates[None]:.0f} tok/s)",
            "-",
            f">= {DECODE_GOAL}" if server.name == "engine" else "-",
        )


def turns(
    server: engine_server.Server, load: list[engine_shapes.Row], rounds: int
) -> dict[str | None, float]:
    tokens = sum(int(str(one["max_new_tokens"])) for one in load)
    rates: dict[str | None, list[float]] = {None: [], "a": []}
    for number in range(rounds + 1):
        for name, found in rates.items():
            rows = [one if name is None else {**one, "lora_path": name} for one in load]
            server.forget()
            if not number:  # warm-up
                server.timed([{**one, "max_new_tokens": 64} for one in rows])
                continue
            found.append(tokens / server.timed(rows))
            print(f"  {server.name} {name or 'base'}: {found[-1]:.0f} tok/s", flush=True)
    return {name: statistics.median(found) for name, found in rates.items()}


def small_load() -> list[engine_shapes.Row]:
    return [{"prompt_ids": list(range(1, 9 + i)), "max_new_tokens": 16} for i in range(16)]


def write_adapter(folder: Path, config: dict[str, Any]) -> Path:
    """Write a PEFT folder with random matrices for every linear module of a dense Qwen3."""
    from slime.config.lora import LORA_A, LORA_B, LoraConfig
    from slime.weights.peft_folder import write_peft_folder

    hidden, dim, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    sizes = {
        **{"self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv)},
        **{"self_attn.v_proj": (hidden, kv), "self_attn.o_proj": (q, hidden)},
        **{"mlp.gate_proj": (hidden, ffn), "mlp.up_proj": (hidden, ffn)},
        "mlp.down_proj": (ffn, hidden),
    }
    named = []
    for layer in range(config["num_hidden_layers"]):
        for module, (width, out) in sizes.items():
            name = f"model.layers.{layer}.{module}"
            named.append((name + LORA_A, 0.01 * torch.randn(RANK, width)))
            named.append((name + LORA_B, 0.01 * torch.randn(out, RANK)))
    write_peft_folder(str(folder), LoraConfig(rank=RANK, alpha=2.0 * RANK), "base", named)
    return folder


def update(options: argparse.Namespace, folder: Path) -> None:
    """Measure updates of an adapter; on a CPU of as many tensors as 4B's has, but small ones."""
    shape = "tiny-deep" if options.tiny else "4B"
    model, step = str(train_shapes.write_config(folder, shape)), step_options(2048, 1024)
    args = train_gpu.make_arguments(step, "fsdp", model, **LORA, **STAYS, bf16=CUDA)
    actor = train_gpu.start(args, "fsdp")
    serving = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras-per-batch", "2"]
    with serve(model, *serving) as engine:
        versions = range(1, 2 + 20)
        reports = [actor.update_weights([engine], version) for version in versions][1:]
    seconds = [report.seconds for report in reports]
    planned = plan_of(args).adapter
    print("  all: " + " ".join(f"{1000 * one:.1f}" for one in seconds) + " ms")
    row(
        f"update_{shape}",
        f"{1000 * statistics.median(seconds):.1f} ms, {reports[0].nbytes / 1e6:.1f} MB",
        f"plan {1000 * (planned.seconds or 0):.1f} ms, {planned.sent_bytes / 1e6:.1f} MB",
        f"<= {UPDATE_GOAL_MS} ms",
    )


def serve(model: str, *words: str) -> Any:
    """Start the embedded engine with random weights and a small KV cache on the trainer's GPU."""
    return weight_sync_gpu.serve(Path(model), "--load-format", "dummy", *words)


def largest(shape: str, options: argparse.Namespace, folder: Path) -> None:
    shape = "tiny" if options.tiny else shape
    model, step = str(train_shapes.write_config(folder, shape)), step_options(8192, 2048)
    if options.tiny:
        step = step_options(256, 64)
    args = train_gpu.make_arguments(step, "fsdp", model, **MERGED, bf16=CUDA)
    plan = plan_of(args)
    phases = ", ".join(f"{phase.name} {phase.total / GIB:.1f}" for phase in plan.phases)
    print(f"{shape}: {plan.verdict} on {plan.capacity / GIB:.1f} GiB: {phases}", flush=True)
    actor = train_gpu.start(args, "fsdp")
    found = train_gpu.measure_steps(step, actor, train_gpu.make_batch(args, step), model)
    planned = train_gpu.training_bytes(plan) / GIB
    speed = found["tokens"] / found["seconds"]
    row(
        f"largest_{shape}_training",
        f"{found['peak'] / GIB:.1f} GiB, {speed:.0f} tok/s",
        f"plan {planned:.1f} GiB, {plan.verdict}",
    )
    if CUDA:
        torch.cuda.empty_cache()
    running = str(BESIDE["sglang_max_running_requests"])
    with serve(model, "--max-running-requests", running) as engine:
        report = actor.update_weights([engine], 1)
        generate(engine.url)
        used = plan_gpu.used_memory() / GIB if CUDA else 0.0
    plan = plan_of(args.replace(**BESIDE))
    beside = next(phase for phase in plan.phases if phase.name == "weight_update")
    row(
        f"largest_{shape}_beside_an_engine",
        f"{used:.1f} GiB, update {report.seconds:.2f} s ({report.nbytes / 1e9:.1f} GB)",
        f"plan {beside.total / GIB:.1f} GiB",
    )


def generate(url: str) -> None:
    from slime.utils.sync_http import post_json

    params = {"max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": [list(range(1, 40))] * 8, "sampling_params": params}
    replies = post_json(f"{url}/generate", body, token=os.environ["SLIME_ENGINE_TOKEN"])
    assert all(reply["meta_info"]["completion_tokens"] == 16 for reply in replies)


if __name__ == "__main__":
    sys.exit(main())
