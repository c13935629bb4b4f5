"""Embedded engine against `model.generate` of Hugging Face on CPU: useful output tokens per second.

    python benchmarks/engine_cpu.py [--rounds 3] [--wait-quiet] [--deterministic]

Tiny Qwen3 (hidden 256, 4 layers, fp32), 128 requests at once. "fixed": prompts of 8 tokens, 64 new ones.
"mixed": prompts of 8..64, outputs of 16..256. The engine is reached over HTTP by one client that sends
all requests concurrently and asks for log-probs; Hugging Face runs the 128 rows as one padded batch in
its own process and computes none. Both sides get the same threads and the same malloc settings, and take
turns, so that drift of the machine hits both. The last lines are `RATIO engine_cpu_<load> <median ratio>`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from slime.utils.sync_http import post_json  # noqa: E402
from tests.tiny import make_tiny_checkpoint  # noqa: E402

NUM_REQUESTS = 128
TOKEN = "benchmark"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
# glibc otherwise maps and unmaps Hugging Face's growing KV cache at every token.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
Row = dict[str, Any]  # prompt_ids, max_new_tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed passes of each side, after one warm-up"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--loads", nargs="+", default=["fixed", "mixed"], choices=["fixed", "mixed"]
    )
    parser.add_argument(
        "--wait-quiet", action="store_true", help="wait until other processes leave the cores alone"
    )
    parser.add_argument("--deterministic", action="store_true", help="engine in deterministic mode")
    parser.add_argument("--engine-only", action="store_true", help="no Hugging Face, no ratio")
    parser.add_argument("--hf-worker", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hf_worker:
        serve_hugging_face(args.hf_worker, args.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "checkpoint")
        run(args, checkpoint, Path(folder))


def run(args: argparse.Namespace, checkpoint: Path, folder: Path) -> None:
    import torch
    import transformers

    print(
        f"{time.strftime('%Y-%m-%d')} python {platform.python_version()} torch {torch.__version__} transformers {transformers.__version__}"
    )
    print(
        f"{cpu_name()}, {args.threads} threads; tiny Qwen3 hidden 256, 4 layers, fp32; {NUM_REQUESTS} requests"
    )
    env = {
        **os.environ,
        **MALLOC,
        "OMP_NUM_THREADS": str(args.threads),
        "SLIME_ENGINE_TOKEN": TOKEN,
    }
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}
    sides: list[EngineSide | HuggingFaceSide] = [
        EngineSide(checkpoint, folder, env, args.deterministic)
    ]
    if not args.engine_only:
        sides.append(HuggingFaceSide(checkpoint, env, args.threads))
    try:
        ratios = {load: measure(load, sides, args) for load in args.loads}
    finally:
        for side in sides:
            side.close()
    if not args.engine_only:
        for load, ratio in ratios.items():
            print(f"RATIO engine_cpu_{load} {ratio:.2f}")


def measure(load: str, sides: list, args: argparse.Namespace) -> float:
    """Return the median ratio engine : Hugging Face over rounds in which they take turns."""
    rows = make_load(load)
    tokens = sum(int(str(row["max_new_tokens"])) for row in rows)
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.generate([{**row, "max_new_tokens": 4} for row in rows])
    for _ in range(args.rounds):
        for side in sides:
            side.forget()
            if args.wait_quiet:
                wait_quiet()
            busy = cpu_seconds()
            start = time.perf_counter()
            side.generate(rows)
            seconds = time.perf_counter() - start
            share = (cpu_seconds() - busy) / (seconds * (os.cpu_count() or 1))
            rates[side.name].append(tokens / seconds)
            print(
                f"  {load:<6}{side.name:<14}{tokens / seconds:8.0f} tok/s  {seconds:6.2f} s  cores busy {share:.0%}",
                flush=True,
            )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"{load}: {tokens} output tokens; median tok/s "
        + ", ".join(f"{n} {v:.0f}" for n, v in medians.items())
    )
    if args.engine_only:
        return 0.0
    engine, peer = (rates[side.name] for side in sides)
    return statistics.median(a / b for a, b in zip(engine, peer, strict=True))


class EngineSide:
    """The server in its own process; requests over HTTP, all at once."""

    name = "engine"

    def __init__(
        self, checkpoint: Path, folder: Path, env: dict[str, str], deterministic: bool
    ) -> None:
        port_file = folder / "port.json"
        command = [
            sys.executable,
            "-m",
            "slime.engine.server",
            "--model-path",
            str(checkpoint),
        ]
        command += ["--port", "0", "--port-file", str(port_file), "--log-level", "warning"]
        command += ["--enable-deterministic-inference"] if deterministic else []
        self._process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        while not port_file.exists():
            if self._process.poll() is not None:
                raise SystemExit("the engine did not start")
            time.sleep(0.1)
        self._url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"

    def forget(self) -> None:
        """Empty the prefix cache, so that later passes do not find the prompts of earlier ones."""
        post_json(f"{self._url}/flush_cache", {}, token=TOKEN)

    def generate(self, rows: list[Row]) -> None:
        asyncio.run(self._generate(rows))

    async def _generate(self, rows: list[Row]) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(self._request(session, row) for row in rows))

    async def _request(self, session: aiohttp.ClientSession, row: Row) -> None:
        params = {"max_new_tokens": row["max_new_tokens"], "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": row["prompt_ids"], "sampling_params": params, "return_logprob": True}
        async with session.post(
            f"{self._url}/generate", data=orjson.dumps(body), headers=HEADERS
        ) as response:
            reply = orjson.loads(await response.read())
        assert len(reply["output_ids"]) == row["max_new_tokens"]
        assert len(reply["meta_info"]["output_token_logprobs"]) == row["max_new_tokens"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class HuggingFaceSide:
    """`model.generate` in its own process; one padded batch, told what to do line by line."""

    name = "hugging face"

    def __init__(self, checkpoint: Path, env: dict[str, str], threads: int) -> None:
        command = [
            sys.executable,
            __file__,
            "--hf-worker",
            str(checkpoint),
            "--threads",
            str(threads),
        ]
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def forget(self) -> None:
        """Do nothing: it remembers nothing between calls."""

    def generate(self, rows: list[Row]) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(rows) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "done":
            raise SystemExit("the Hugging Face side failed")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve_hugging_face(checkpoint: str, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # never stop at the end-of-text token
    pad = model.config.pad_token_id
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad)
    for line in sys.stdin:
        with torch.no_grad():
            generate_padded(model, json.loads(line), config)
        print("done", flush=True)


def generate_padded(model, rows: list[Row], config) -> None:
    """Generate all rows until the longest is done; each ends at its own length, as a user would have it."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class WantedLength(StoppingCriteria):
        def __init__(self, width: int, wanted: list[int]) -> None:
            self.ends = width + torch.tensor(wanted)

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= self.ends

    prompts = [row["prompt_ids"] for row in rows]
    wanted = [row["max_new_tokens"] for row in rows]
    width = max(len(p) for p in prompts)
    pad = config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config.max_new_tokens = max(wanted)
    criteria = StoppingCriteriaList([WantedLength(width, wanted)])
    out = model.generate(
        input_ids=ids, attention_mask=mask, generation_config=config, stopping_criteria=criteria
    )
    assert out.shape[1] - width == max(wanted)


def make_checkpoint(path: Path) -> Path:
    return make_tiny_checkpoint(
        path,
        weight_scale=1.0,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
    )


def make_load(name: str) -> list[Row]:
    rng = random.Random(0)
    lens = [(8, 64)] * NUM_REQUESTS
    if name == "mixed":
        lens = [(rng.randint(8, 64), rng.randint(16, 256)) for _ in range(NUM_REQUESTS)]
    return [
        {"prompt_ids": [rng.randrange(256) for _ in range(p)], "max_new_tokens": n} for p, n in lens
    ]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def cpu_seconds() -> float:
    """Return the busy seconds of all cores."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def wait_quiet(window: float = 1.0, limit: float = 600.0, share: float = 0.03) -> None:
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        before = cpu_seconds()
        time.sleep(window)
        if (cpu_seconds() - before) / (window * (os.cpu_count() or 1)) < share:
            return


if __name__ == "__main__":
    main()
