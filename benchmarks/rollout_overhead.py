"""What the rollout loop itself costs per sample, beside the engines.

A stand-in engine in another process answers every request after the same fixed time. Measured is the
processor time of this process per sample, which other work on the machine does not change: choosing
an engine, HTTP, parsing, assembling samples, rewards, accounting. A rollout of 1,024 samples, all in
flight together, is compared with the bare HTTP client sending the same requests in the same run.

    python benchmarks/rollout_overhead.py [--samples 1024] [--response-len 256] [--runs 5]

The last line is `RATIO rollout_overhead_budget X`: the budget of 1 ms per sample over what was
measured (above 1 is within it).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LATENCY_S = 1.0
BUDGET_MS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Path(options.serve), options.response_len)
        return
    print(f"python {platform.python_version()}, {platform.machine()}, {json.dumps(vars(options))}")
    with engine_process(options.response_len) as url:
        measure_rollout(url, options)
        pairs = [
            (measure_bare(url, options), measure_rollout(url, options)) for _ in range(options.runs)
        ]
    bare, ours = ([pair[i] for pair in pairs] for i in (0, 1))
    for name, seconds in (("bare HTTP client", bare), ("rollout loop", ours)):
        each = [s / options.samples * 1000 for s in seconds]
        print(f"{name:17} {statistics.median(each):.3f} ms per sample (runs: {rounded(each)})")
    overhead = statistics.median(ours) / options.samples * 1000
    above = (statistics.median(ours) - statistics.median(bare)) / options.samples * 1000
    print(f"of which ours, above the bare client: {above:.3f} ms per sample")
    print(f"RATIO rollout_overhead_budget {BUDGET_MS / overhead:.2f}")


def measure_rollout(url: str, options: argparse.Namespace) -> float:
    """Return the CPU seconds of one rollout whose samples are all in flight together."""
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.context import RolloutContext
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.rollout.engine_pool import EnginePool
    from slime.rollout.sglang_rollout import generate_rollout
    from tests.prompts import rollout_args

    context = RolloutContext(pool=EnginePool([url], concurrency=options.samples))
    with tempfile.TemporaryDirectory() as folder:
        num_prompts = options.samples // options.group_size
        rows = [{"input": "x" * options.prompt_len, "label": "1"} for _ in range(num_prompts)]
        args = rollout_args(
            Path(folder),
            rows,
            rm_type="dapo",
            reward_key="score",
            rollout_batch_size=num_prompts,
            n_samples_per_prompt=options.group_size,
            rollout_max_response_len=options.response_len,
        )
        source = RolloutDataSourceWithBuffer(args)
        start = time.process_time()
        with context.active():
            output = generate_rollout(args, 0, source)
        seconds = time.process_time() - start
    assert isinstance(output, RolloutFnTrainOutput)
    assert sum(len(group) for group in output.samples) == options.samples
    return seconds


def measure_bare(url: str, options: argparse.Namespace) -> float:
    """Send the same requests by the HTTP client alone; parse the replies and drop them."""
    from slime.utils.http import post_once, run

    payload = {
        "input_ids": [5] * options.prompt_len,
        "sampling_params": {"max_new_tokens": options.response_len},
        "return_logprob": True,
    }

    async def post_all() -> None:
        calls = [post_once(f"{url}/generate", payload) for _ in range(options.samples)]
        await asyncio.gather(*calls)

    start = time.process_time()
    run(post_all())
    return time.process_time() - start


@contextlib.contextmanager
def engine_process(response_len: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, __file__, "--serve", str(port_file)]
        process = subprocess.Popen([*command, "--response-len", str(response_len)])
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise RuntimeError("the stand-in engine did not start")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text()}"
        finally:
            process.kill()
            process.wait()


def serve(port_file: Path, response_len: int) -> None:
    """Answer every request with the same bytes, `LATENCY_S` after it arrived."""
    from aiohttp import web

    tokens = list(range(1, response_len + 1))
    body = json.dumps(
        {
            "text": "Answer: 1",
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": tokens[-1]},
                "weight_version": "1",
                "weight_versions": [{"version": "1", "start": 0, "end": len(tokens)}],
                "output_token_logprobs": [[-0.123456789, token, None] for token in tokens],
            },
        }
    ).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(LATENCY_S)
        return web.Response(body=body, content_type="application/json")

    async def start() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        port_file.with_suffix(".new").write_text(str(runner.addresses[0][1]))
        port_file.with_suffix(".new").rename(port_file)
        await asyncio.Event().wait()

    asyncio.run(start())


def rounded(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
