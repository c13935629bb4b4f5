"""Embedded engine (and SGLang, vLLM where they are given) on one GPU: output tokens per second.

    python benchmarks/engine_gpu.py [--shape 0.6b] [--load mixed|long|images] [--rounds 3] [--prefix] [--together]
        [--sglang-path SITE_PACKAGES] [--vllm-path SITE_PACKAGES[:SITE_PACKAGES]]
    python benchmarks/engine_gpu.py --tiny [--shape tiny-vl --load images]      on a CPU, few short requests

slime's engine and SGLang are called over HTTP; SGLang runs with fa3, its default on Hopper. vLLM runs in its own process
without a server (its LLM class) and with prefix caching off: prompts are unrelated.

mixed   256 requests at once, prompts and outputs uniform in 100..1024
long    39 requests with prompts of 7168 tokens and 1024 new ones; "decode" is the rate without the time that
        the pass with one new token each takes, and what the ratio compares
images  32 prompts of an image of 448 x 448 pixels (196 tokens) and 64 tokens of text, 8 samples of 128 tokens
        each; the limit leaves the vision tower out

All with ignore_eos, temperature 0.6, seeded, log-probs; random weights in bf16. "first token" is a pass of the same
prompts with one new token each: median and last. "limit" is what the GPU could do if every step read the KV cache
and the weights once at 4.3 TB/s and prompts ran at 790 TFLOP/s; the states of gated delta nets are read and written.

With --warm only peers start, with a small KV cache, and answer four requests: what they compile at their first
start and use is then in their caches (SGLang's first pass took 107 s without). Give the sizes of layers that
will be measured, few of them (--layers 4), and start several shapes at the same time.

With --together ours and SGLang start at the same time, with KV caches of the size that the load needs, and
are measured one after the other once both answer; vLLM imports meanwhile. An engine that fails is left out.
Two shapes that fit on the GPU beside each other save another start: begin both with --meet FOLDER 2.
Models with gated delta nets run without a prefix cache in both: SGLang is faster so, and prompts are unrelated.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

from engine_server import EngineFailed, Server, engine_command, sglang_command  # noqa: E402
from engine_shapes import (  # noqa: E402
    NUM_REQUESTS,
    SHAPES,
    Row,
    count_tokens,
    limit_seconds,
    make_load,
    make_rows,
    write_checkpoint,
)


def main() -> None:
    args = parse()
    if args.worker:
        return vllm_worker(args)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        config = write_checkpoint(checkpoint, args.shape, args.layers)
        run(args, config, checkpoint)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--load", choices=["mixed", "long", "images"], default="mixed")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes after one warm-up")
    parser.add_argument("--prefix", action="store_true", help="also 32 prompts x 8 samples")
    parser.add_argument("--together", action="store_true", help="engines start at the same time")
    parser.add_argument(
        "--meet",
        nargs=2,
        metavar=("FOLDER", "N"),
        help="N runs start together, and measure in turn",
    )
    parser.add_argument("--tiny", action="store_true", help="a few short requests, for a CPU")
    parser.add_argument("--warm", action="store_true", help="only make peers compile their kernels")
    parser.add_argument("--sglang-path", help="folder of packages that holds sglang")
    parser.add_argument("--sglang-attention", default="fa3")
    parser.add_argument("--vllm-path", help="folders of packages that hold vllm and what it needs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start-limit", type=float, default=400.0, help="seconds an engine has")
    return parser.parse_args()


def run(args: argparse.Namespace, config: dict, checkpoint: Path) -> None:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{time.strftime('%Y-%m-%d')} {device} python {platform.python_version()} "
        f"torch {torch.__version__} transformers {transformers.__version__}"
    )
    rows = make_rows(args.load, args.tiny or args.warm, checkpoint)
    prompts, tokens = count_tokens(rows)
    limit = tokens / limit_seconds(config, rows)
    print(
        f"shape {args.shape}, {config['num_hidden_layers']} layers; {len(rows)} requests, "
        f"{prompts} prompt and {tokens} output tokens; limit {limit:.0f} tok/s",
        flush=True,
    )
    rates: dict[str, float] = {}
    with contextlib.ExitStack() as ends:
        worker = start_vllm(args, checkpoint) if args.vllm_path else None
        if worker is not None:
            ends.callback(worker.kill)
        measure_servers(args, config, checkpoint, rows, limit, rates)
        if worker is not None:
            rates |= finish_vllm(worker, checkpoint, limit)
    for peer in sorted(rates.keys() - {"engine"}):
        if "engine" in rates:
            name = args.shape if args.load == "mixed" else f"{args.shape}_{args.load}"
            print(f"RATIO engine_gpu_{name}_vs_{peer} {rates['engine'] / rates[peer]:.2f}")


def measure_servers(
    args: argparse.Namespace,
    config: dict,
    checkpoint: Path,
    rows: list[Row],
    limit: float,
    rates: dict[str, float],
) -> None:
    """Add the rate of each engine that works."""
    commands = make_commands(args, config, checkpoint, rows)

    def start(name: str) -> Server:
        extra = args.sglang_path if name == "sglang" else None
        return Server(name, commands[name], checkpoint.parent, extra, args.start_limit)

    started = {name: start(name) for name in commands} if args.together else {}
    for server in started.values():  # measured only when all have started, or failed to
        with contextlib.suppress(EngineFailed):
            server.wait()
    with take_turn(args):
        for name in commands:
            try:
                with started.get(name) or start(name) as server:
                    if args.warm:
                        print(f"  {name}: first pass {server.timed(rows):.1f} s", flush=True)
                        continue
                    total, decode = measure(server, rows, limit, args, checkpoint)
                    rates[name] = decode if args.load == "long" else total
                    if args.prefix:
                        measure_prefix(server)
            except EngineFailed as error:
                print(f"FAILED {error}", flush=True)


@contextlib.contextmanager
def take_turn(args: argparse.Namespace) -> Iterator[None]:
    """Measure when the engines of all --meet processes have started, and no other one measures."""
    if not args.meet:
        yield
        return
    folder, count = Path(args.meet[0]), int(args.meet[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.ready").touch()
    end = time.monotonic() + args.start_limit
    while len(list(folder.glob("*.ready"))) < count and time.monotonic() < end:
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_commands(
    args: argparse.Namespace, config: dict, checkpoint: Path, rows: list[Row]
) -> dict[str, list[str]]:
    import torch

    more: list[str] = []
    if "linear_num_value_heads" in config:
        more += ["--disable-radix-cache"]
    if not torch.cuda.is_available():
        more += ["--dtype", "float32", "--max-total-tokens", "8192"]
    elif args.warm:
        more += ["--max-total-tokens", "32768"]
    elif args.together:
        more += ["--max-total-tokens", str(64 * (sum(count_tokens(rows)) // 55))]  # 1.16 of it
    count = len(rows)
    commands: dict[str, list[str]] = {}
    if not args.warm:
        ours = [*engine_command(checkpoint), "--max-running-requests", str(count)]
        commands["engine"] = [*ours, *more]
    if args.sglang_path:
        commands["sglang"] = [*sglang_command(checkpoint, args.sglang_attention, count), *more]
    return commands


def measure(
    server: Server, rows: list[Row], limit: float, args: argparse.Namespace, checkpoint: Path
) -> tuple[float, float]:
    """Return output tokens per second, over all and without the time that first tokens take."""
    tokens = count_tokens(rows)[1]
    warm = server.timed([shortened(row) for row in rows])
    print(f"  {server.name}: warm-up {warm:.2f} s", flush=True)
    rates: list[float] = []
    for number in range(args.rounds):
        others = make_rows(args.load, args.tiny, checkpoint, 1 + number)
        server.forget()
        seconds = server.timed(others)
        rates.append(tokens / seconds)
        print(f"  {server.name}: {tokens / seconds:.0f} tok/s  {seconds:.2f} s", flush=True)
    others = make_rows(args.load, args.tiny, checkpoint, 1 + args.rounds)
    server.forget()
    firsts = sorted(server.generate([{**row, "max_new_tokens": 1} for row in others]))
    rate = statistics.median(rates)
    decode = (tokens - len(rows)) / max(tokens / rate - firsts[-1], 1e-9)
    print(
        f"{server.name}: median {rate:.0f} tok/s, {rate / limit:.0%} of the limit; decode {decode:.0f} "
        f"tok/s; first token median {statistics.median(firsts):.3f} s, last {firsts[-1]:.3f} s",
        flush=True,
    )
    return rate, decode


def shortened(row: Row) -> Row:
    """Return a request that compiles and tunes what the whole one needs."""
    short = {**row, "max_new_tokens": min(row["max_new_tokens"], 64)}
    return short if "image_data" in row else {**short, "prompt_ids": row["prompt_ids"][:2048]}


def measure_prefix(server: Server) -> None:
    """Compare a cold run of 32 prompts x 8 samples with computing each prompt once, then all samples."""
    rng = random.Random(1)
    groups = [[rng.randrange(150000) for _ in range(1000)] for _ in range(32)]
    once: list[Row] = [{"prompt_ids": prompt, "max_new_tokens": 1} for prompt in groups]
    samples: list[Row] = [
        {"prompt_ids": prompt, "max_new_tokens": 128} for prompt in groups for _ in range(8)
    ]
    cold, parts = [], []
    for _ in range(3):
        server.forget()
        cold.append(server.timed(samples))
        server.forget()
        parts.append(server.timed(once) + server.timed(samples))
    found, expected = statistics.median(cold), statistics.median(parts)
    print(
        f"{server.name}: 32 prompts x 8 samples {found:.2f} s; each prompt once, then all samples "
        f"{expected:.2f} s; ratio {found / expected:.2f}",
        flush=True,
    )


def start_vllm(args: argparse.Namespace, checkpoint: Path) -> subprocess.Popen[str]:
    """Start the process that measures vLLM, which imports it and then waits for its turn."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(checkpoint)]
    path = f"{args.vllm_path}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish_vllm(worker: subprocess.Popen[str], checkpoint: Path, limit: float) -> dict[str, float]:
    go_file(checkpoint).touch()
    output = worker.communicate()[0]
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"vllm"')]
    rates = [row["rate"] for row in said if "rate" in row]
    if worker.returncode == 0 and not rates:
        print("  vllm: started", flush=True)
        return {}
    if not rates:
        print(f"FAILED vllm:\n{output[-6000:]}", flush=True)
        return {}
    print("\n".join(f"  vllm: {rate:.0f} tok/s" for rate in rates))
    rate = statistics.median(rates)
    print(f"vllm {said[0]['vllm']}: median {rate:.0f} tok/s, {rate / limit:.0%} of the limit")
    return {"vllm": rate}


def go_file(checkpoint: Path) -> Path:
    return checkpoint.parent / "vllm.go"


def vllm_worker(args: argparse.Namespace) -> None:
    """Print the rate of every pass after a warm-up; runs where vLLM can be imported."""
    import vllm  # type: ignore[import-not-found]

    while not go_file(args.worker).exists():  # others are measured, or hold the memory
        time.sleep(0.2)
    engine = vllm.LLM(
        model=str(args.worker),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_seqs=NUM_REQUESTS,
        gpu_memory_utilization=0.3 if args.warm else 0.9,
    )
    rows = make_load(args.tiny or args.warm)
    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
    params = [
        vllm.SamplingParams(
            temperature=0.6,
            ignore_eos=True,
            max_tokens=row["max_new_tokens"],
            logprobs=0,
            detokenize=False,
        )
        for row in rows
    ]
    for number in range(args.rounds + 1):
        start = time.perf_counter()
        replies = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        outputs = [reply.outputs[0] for reply in replies]
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        tokens = sum(len(output.token_ids) for output in outputs)
        assert tokens == count_tokens(rows)[1]
        if number:
            print(json.dumps({"vllm": vllm.__version__, "rate": tokens / seconds}), flush=True)


if __name__ == "__main__":
    main()
