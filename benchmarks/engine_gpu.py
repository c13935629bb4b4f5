"""Embedded engine (and SGLang, vLLM where they are given) on one GPU: output tokens per second.

    python benchmarks/engine_gpu.py [--shape 0.6b] [--rounds 3] [--prefix]
        [--sglang-path SITE_PACKAGES] [--vllm-path SITE_PACKAGES[:SITE_PACKAGES]]

Ours and SGLang are asked over HTTP; SGLang runs with fa3, its default on Hopper. vLLM runs in its own process
without a server (its LLM class) and with prefix caching off: prompts are unrelated.

256 requests at once, prompts and outputs uniform in 100..1024, ignore_eos, temperature 0.6, seeded, with
log-probs; random weights of a Qwen3 shape in bf16. "first token" is a pass of the same prompts with one
new token each: median and last over the 256. "limit" is what the GPU could do if every step read the
KV cache and the weights once at 4.3 TB/s and prompts ran at 790 TFLOP/s.
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

import aiohttp
import orjson

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from slime.utils.sync_http import HttpError, post_json  # noqa: E402

TOKEN = "benchmark"
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
NUM_REQUESTS = 256
MEMORY_RATE, MATMUL_RATE = 4.3e12, 790e12
COMMON = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
SHAPES = {
    "0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
Row = dict[str, object]  # prompt_ids, max_new_tokens, and lora_path where an adapter is asked for


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes after one warm-up")
    parser.add_argument("--prefix", action="store_true", help="also 32 prompts x 8 samples")
    parser.add_argument("--sglang-path", help="folder of packages that holds sglang")
    parser.add_argument("--sglang-attention", default="fa3")
    parser.add_argument("--vllm-path", help="folders of packages that hold vllm and what it needs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--start-limit", type=float, default=400.0, help="seconds an engine has")
    args = parser.parse_args()
    if args.worker:
        return vllm_worker(args.worker, args.rounds)
    config = {**COMMON, **SHAPES[args.shape]}
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(config))
        run(args, config, checkpoint)


def run(args: argparse.Namespace, config: dict, checkpoint: Path) -> None:
    import torch
    import transformers

    print(
        f"{time.strftime('%Y-%m-%d')} {torch.cuda.get_device_name()} python {platform.python_version()} "
        f"torch {torch.__version__} transformers {transformers.__version__}"
    )
    rows = make_load()
    tokens = sum(int(str(row["max_new_tokens"])) for row in rows)
    limit = tokens / limit_seconds(config, rows)
    print(
        f"shape {args.shape}, {config['num_hidden_layers']} layers; {NUM_REQUESTS} requests, "
        f"{sum(len(r['prompt_ids']) for r in rows)} prompt and {tokens} output tokens; "  # type: ignore[arg-type]
        f"limit {limit:.0f} tok/s",
        flush=True,
    )
    commands = {"engine": engine_command(checkpoint)}
    if args.sglang_path:
        commands["sglang"] = sglang_command(checkpoint, args.sglang_attention)
    rates: dict[str, float] = {}
    for name, command in commands.items():
        extra = args.sglang_path if name == "sglang" else None
        with Server(name, command, checkpoint.parent, extra, args.start_limit) as server:
            rates[name] = measure(server, rows, tokens, limit, args.rounds)
            if args.prefix:
                measure_prefix(server)
    if args.vllm_path:
        rates["vllm"] = measure_vllm(args, checkpoint, limit)
    for peer in rates.keys() - {"engine"}:
        print(f"RATIO engine_gpu_vs_{peer} {rates['engine'] / rates[peer]:.2f}")


def measure_vllm(args: argparse.Namespace, checkpoint: Path, limit: float) -> float:
    command = [sys.executable, __file__, "--worker", str(checkpoint), "--rounds", str(args.rounds)]
    path = f"{args.vllm_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"vLLM failed:\n{done.stdout[-6000:]}")
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"vllm"')]
    rates = [row["rate"] for row in said if "rate" in row]
    print("\n".join(f"  vllm: {rate:.0f} tok/s" for rate in rates))
    rate = statistics.median(rates)
    print(f"vllm {said[0]['vllm']}: median {rate:.0f} tok/s, {rate / limit:.0%} of the limit")
    return rate


def vllm_worker(checkpoint: str, rounds: int) -> None:
    """Print the rate of every pass after a warm-up; runs where vLLM can be imported."""
    import vllm  # type: ignore[import-not-found]

    engine = vllm.LLM(
        model=checkpoint,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_seqs=NUM_REQUESTS,
    )
    rows = make_load()
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
    print(json.dumps({"vllm": vllm.__version__}), flush=True)
    for number in range(rounds + 1):
        start = time.perf_counter()
        replies = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        outputs = [reply.outputs[0] for reply in replies]
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        tokens = sum(len(output.token_ids) for output in outputs)
        assert tokens == sum(int(str(row["max_new_tokens"])) for row in rows)
        if number:
            print(json.dumps({"vllm": vllm.__version__, "rate": tokens / seconds}), flush=True)


def measure(server: Server, rows: list[Row], tokens: int, limit: float, rounds: int) -> float:
    start = time.perf_counter()
    server.generate(rows)
    print(f"  {server.name}: warm-up {time.perf_counter() - start:.2f} s", flush=True)
    rates: list[float] = []
    for _ in range(rounds):
        server.forget()
        start = time.perf_counter()
        server.generate(rows)
        seconds = time.perf_counter() - start
        rates.append(tokens / seconds)
        print(f"  {server.name}: {tokens / seconds:.0f} tok/s  {seconds:.2f} s", flush=True)
    server.forget()
    firsts = sorted(server.generate([{**row, "max_new_tokens": 1} for row in rows]))
    rate = statistics.median(rates)
    print(
        f"{server.name}: median {rate:.0f} tok/s, {rate / limit:.0%} of the limit; "
        f"first token median {statistics.median(firsts):.3f} s, last {firsts[-1]:.3f} s",
        flush=True,
    )
    return rate


def measure_prefix(server: Server) -> None:
    """A cold run of 32 prompts x 8 samples against computing each prompt once, then all samples."""
    rng = random.Random(1)
    groups = [[rng.randrange(150000) for _ in range(1000)] for _ in range(32)]
    once: list[Row] = [{"prompt_ids": prompt, "max_new_tokens": 1} for prompt in groups]
    samples: list[Row] = [
        {"prompt_ids": prompt, "max_new_tokens": 128} for prompt in groups for _ in range(8)
    ]
    cold, parts = [], []
    for _ in range(3):
        server.forget()
        cold.append(timed(server, samples))
        server.forget()
        parts.append(timed(server, once) + timed(server, samples))
    found, expected = statistics.median(cold), statistics.median(parts)
    print(
        f"{server.name}: 32 prompts x 8 samples {found:.2f} s; each prompt once, then all samples "
        f"{expected:.2f} s; ratio {found / expected:.2f}",
        flush=True,
    )


def timed(server: Server, rows: list[Row]) -> float:
    start = time.perf_counter()
    server.generate(rows)
    return time.perf_counter() - start


def engine_command(checkpoint: Path) -> list[str]:
    command = [sys.executable, "-m", "slime.engine.server", "--model-path", str(checkpoint)]
    return [*command, "--load-format", "dummy", "--skip-tokenizer-init", "--log-level", "info"]


def sglang_command(checkpoint: Path, attention: str) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", attention]
    return [*command, "--max-running-requests", "256", "--cuda-graph-max-bs", "256"]


class Server:
    """An engine in its own process, reached over HTTP by all requests at once."""

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        extra_path: str | None,
        start_limit: float,
    ) -> None:
        self.name, self._start_limit = name, start_limit
        port = 32000 + os.getpid() % 1000
        self._url = f"http://127.0.0.1:{port}"
        path = ([extra_path] if extra_path else [str(REPO)]) + [os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "SLIME_ENGINE_TOKEN": TOKEN, "PYTHONPATH": ":".join(path)}
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(port)], env=env, stdout=log, stderr=log
            )

    def __enter__(self) -> Server:
        start = time.perf_counter()
        while not self._answers():
            if self._process.poll() is not None or self._is_late(start):
                self._process.kill()
                raise SystemExit(f"{self.name} did not start:\n{self._log.read_text()[-6000:]}")
            time.sleep(0.5)
        print(f"  {self.name}: started in {time.perf_counter() - start:.0f} s", flush=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if error[0] is not None:
            print(self._log.read_text()[-6000:], flush=True)

    def forget(self) -> None:
        """Later passes must not find the prompts of earlier ones in the prefix cache."""
        post_json(f"{self._url}/flush_cache", {}, token=TOKEN)

    def generate(self, rows: list[Row]) -> list[float]:
        """Seconds until each reply."""
        return asyncio.run(self._generate(rows))

    def _is_late(self, start: float) -> bool:
        return time.perf_counter() - start > self._start_limit

    def _answers(self) -> bool:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
        try:
            post_json(f"{self._url}/generate", body, token=TOKEN, timeout=60)
        except (HttpError, OSError):
            return False
        return True

    async def _generate(self, rows: list[Row]) -> list[float]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await asyncio.gather(*(self._request(session, row) for row in rows))

    async def _request(self, session: aiohttp.ClientSession, row: Row) -> float:
        params = {"max_new_tokens": row["max_new_tokens"], "temperature": 0.6, "ignore_eos": True}
        body = {"input_ids": row["prompt_ids"], "sampling_params": params, "return_logprob": True}
        if "lora_path" in row:
            body["lora_path"] = row["lora_path"]
        start = time.perf_counter()
        async with session.post(
            f"{self._url}/generate", data=orjson.dumps(body), headers=JSON
        ) as response:
            reply = orjson.loads(await response.read())
        if "meta_info" not in reply:
            raise SystemExit(f"{self.name} answered {str(reply)[:500]}")
        found = len(reply["meta_info"]["output_token_logprobs"])
        if found != row["max_new_tokens"]:
            raise SystemExit(f"{found} tokens came back, {row['max_new_tokens']} were asked for")
        return time.perf_counter() - start


def make_load() -> list[Row]:
    rng = random.Random(0)
    return [
        {
            "prompt_ids": [rng.randrange(150000) for _ in range(rng.randint(100, 1024))],
            "max_new_tokens": rng.randint(100, 1024),
        }
        for _ in range(NUM_REQUESTS)
    ]


def limit_seconds(config: dict, rows: list[Row]) -> float:
    """Every step reads the cache of its requests and the weights it needs once; prompts at full rate."""
    layers, dim = config["num_hidden_layers"], config["head_dim"]
    kv_bytes = layers * config["num_key_value_heads"] * dim * 2 * 2
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = hidden * dim * (heads + 2 * config["num_key_value_heads"]) + heads * dim * hidden
    expert = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("num_experts", 1)
    active = layers * (attention + expert * config.get("num_experts_per_tok", 1))
    weight_bytes = 2 * (layers * (attention + expert * experts) + config["vocab_size"] * hidden)
    pairs = [(len(r["prompt_ids"]), int(str(r["max_new_tokens"]))) for r in rows]  # type: ignore[arg-type]
    seconds = sum(prompt for prompt, _ in pairs) * 2 * active / MATMUL_RATE
    for step in range(max(output for _, output in pairs)):
        cached = sum(prompt + step for prompt, output in pairs if output > step)
        seconds += (cached * kv_bytes + weight_bytes) / MEMORY_RATE
    return seconds


if __name__ == "__main__":
    main()
