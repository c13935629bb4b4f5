"""What the rollout loop costs per sample, and what asynchronous loops gain over the synchronous one.

    python benchmarks/rollout_loop.py overhead     10,000 samples, 1,024 in flight, over HTTP
    python benchmarks/rollout_loop.py loops        long-tailed answers, the three loops with their timelines

overhead: a stand-in engine in another process answers after 1 s; measured is the processor time of this
process per sample, beside the bare HTTP client doing the same requests in the same run. The last line is
`RATIO rollout_loop_budget X`, the budget of 1 ms over what was measured.

loops: a scripted engine with a fixed number of slots, whose answers take log-normal times; training is a
pause. The same prompts through train.py's order of calls, train_async.py's, and the rollout function that
never stops. `engine` and `trainer` show when each was busy. The last line is `RATIO fully_async_speedup X`.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.rollout.context import WeightClock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

BUDGET_MS = 1.0
COLUMNS = 72  # of a timeline
BARS = " ▁▂▃▄▅▆▇█"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["overhead", "loops"])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=1024)
    parser.add_argument("--response-len", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--train-s", type=float, default=0.5)
    options = parser.parse_args()
    print(f"python {platform.python_version()}, {platform.machine()}, {vars(options)}")
    overhead(options) if options.what == "overhead" else loops(options)


# ---- overhead


def overhead(options: argparse.Namespace) -> None:
    import rollout_overhead

    options.group_size, options.prompt_len = 8, 256
    with rollout_overhead.engine_process(options.response_len) as url:
        pairs = [(_bare(url, options), _loop(url, options)) for _ in range(options.runs)]
    bare, ours = ([pair[i] / options.samples * 1000 for pair in pairs] for i in (0, 1))
    for name, each in (("bare HTTP client", bare), ("rollout loop", ours)):
        runs = ", ".join(f"{value:.3f}" for value in each)
        print(f"{name:17} {statistics.median(each):.3f} ms per sample (runs: {runs})")
    print(
        f"of which ours, above the bare client: {statistics.median(ours) - statistics.median(bare):.3f} ms"
    )
    print(f"RATIO rollout_loop_budget {BUDGET_MS / statistics.median(ours):.2f}")


def _loop(url: str, options: argparse.Namespace) -> float:
    """Return the CPU seconds of one rollout of all samples."""
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.context import RolloutContext
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.rollout.engine_pool import EnginePool
    from slime.rollout.sglang_rollout import generate_rollout
    from tests.prompts import rollout_args

    context = RolloutContext(pool=EnginePool([url], concurrency=options.in_flight))
    prompts = options.samples // options.group_size
    rows = [{"input": "x" * options.prompt_len, "label": "1"} for _ in range(prompts)]
    with tempfile.TemporaryDirectory() as folder:
        args = rollout_args(
            Path(folder), rows, rm_type="dapo", reward_key="score", rollout_batch_size=prompts,
            n_samples_per_prompt=options.group_size, rollout_max_response_len=options.response_len,
        )  # fmt: skip
        source = RolloutDataSourceWithBuffer(args)
        start = time.process_time()
        with context.active():
            output = generate_rollout(args, 0, source)
        seconds = time.process_time() - start
    assert isinstance(output, RolloutFnTrainOutput)
    assert sum(map(len, output.samples)) == prompts * options.group_size
    return seconds


def _bare(url: str, options: argparse.Namespace) -> float:
    """Send the same requests, as many at a time; parse the replies and drop them."""
    from slime.utils.http import post_once, run

    payload = {
        "input_ids": [5] * options.prompt_len,
        "sampling_params": {"max_new_tokens": options.response_len},
        "return_logprob": True,
    }

    async def post_all() -> None:
        slots = asyncio.Semaphore(options.in_flight)

        async def one() -> None:
            async with slots:
                await post_once(f"{url}/generate", payload)

        await asyncio.gather(*(one() for _ in range(options.samples)))

    start = time.process_time()
    run(post_all())
    return time.process_time() - start


# ---- loops


@dataclass
class Clockwork:
    """The scripted engine: `slots` answers at a time, each of log-normal length; keeps who was busy when."""

    slots: int = 32
    version: int = 1
    spans: list[tuple[float, float]] = field(default_factory=list)
    trained: list[tuple[float, float]] = field(default_factory=list)
    clock: WeightClock | None = None

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)
        self._dice = random.Random(0)

    async def generate(
        self, payload: dict[str, Any], session_id: str | None = None
    ) -> dict[str, Any]:
        async with self._free:
            start = time.monotonic()
            await asyncio.sleep(min(self._dice.lognormvariate(-2.6, 1.0), 2.0))
            self.spans.append((start, time.monotonic()))
        span = {"version": str(self.version), "start": 0, "end": 2}
        meta = {
            "finish_reason": {"type": "stop", "matched": 257},
            "weight_versions": [span],
            "output_token_logprobs": [[-0.1, 50, None], [-0.1, 257, None]],
        }
        return {"text": "x", "output_ids": [50, 257], "meta_info": meta}

    async def abort_all(self) -> None:
        """Do nothing: the engine finishes every response."""

    def train(self, seconds: float, rollout_id: int) -> None:
        start = time.monotonic()
        time.sleep(seconds)
        self.trained.append((start, time.monotonic()))
        self.version += 1
        if self.clock is not None:
            self.clock.set(self.version, rollout_id + 1)


def loops(options: argparse.Namespace) -> None:
    seconds = {}
    for name in ("synchronous", "train_async", "fully_async"):
        with tempfile.TemporaryDirectory() as folder:
            engine, seconds[name], stale = _run_loop(name, Path(folder), options)
        _show(name, engine, seconds[name], stale)
    print(f"RATIO train_async_speedup {seconds['synchronous'] / seconds['train_async']:.2f}")
    print(f"RATIO fully_async_speedup {seconds['synchronous'] / seconds['fully_async']:.2f}")


def _run_loop(
    name: str, folder: Path, options: argparse.Namespace
) -> tuple[Clockwork, float, float]:
    from slime.rollout import fully_async_rollout, sglang_rollout
    from slime.rollout.context import RolloutContext, WeightClock
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from tests.prompts import rollout_args, sums

    fully = name == "fully_async"
    args = rollout_args(
        folder, sums(512), rollout_batch_size=16, n_samples_per_prompt=4, num_rollout=options.rollouts,
        rm_type="random", over_sampling_batch_size=16, max_weight_staleness=2 if fully else None,
    )  # fmt: skip
    engine, source = Clockwork(clock=WeightClock(version=1)), RolloutDataSourceWithBuffer(args)
    context = RolloutContext(pool=engine, clock=engine.clock)  # type: ignore[arg-type]
    module = fully_async_rollout if fully else sglang_rollout
    start = time.monotonic()
    order = _overlapped if name == "train_async" else _one_after_the_other

    def generate(rollout_id: int) -> Any:
        with context.active():
            return module.generate_rollout(args, rollout_id, source)

    stale = order(generate, engine, options)
    return engine, time.monotonic() - start, stale


def _one_after_the_other(generate: Any, engine: Clockwork, options: argparse.Namespace) -> float:
    """Run train.py's loop; a fully asynchronous rollout function keeps generating during training."""
    stale = []
    for rollout_id in range(options.rollouts):
        stale.append(generate(rollout_id).metrics.get("rollout/staleness_mean", 0.0))
        engine.train(options.train_s, rollout_id)
    return statistics.mean(stale)


def _overlapped(generate: Any, engine: Clockwork, options: argparse.Namespace) -> float:
    """Run train_async.py's loop: the next rollout is generated during training and ends before the update."""
    stale = []
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(generate, 0)
        for rollout_id in range(options.rollouts):
            stale.append(begun.result().metrics.get("rollout/staleness_mean", 0.0))
            if rollout_id + 1 < options.rollouts:
                begun = pool.submit(generate, rollout_id + 1)
            trainer = threading.Thread(target=time.sleep, args=(options.train_s,))
            started = time.monotonic()
            trainer.start()
            trainer.join()
            engine.trained.append((started, time.monotonic()))
            begun.result()  # settle: no update in the middle of a rollout
            engine.train(0.0, rollout_id)
            engine.trained.pop()
    return statistics.mean(stale)


def _show(name: str, engine: Clockwork, seconds: float, stale: float) -> None:
    first = min(start for start, _ in engine.spans)
    last = max(end for _, end in engine.trained)
    busy = sum(min(end, last) - start for start, end in engine.spans if start < last)
    share = busy / ((last - first) * engine.slots)
    trained = sum(end - start for start, end in engine.trained) / (last - first)
    print(f"\n{name}: {seconds:.2f} s, {len(engine.trained)} rollouts, mean staleness {stale:.2f}")
    print(
        f"  engine  {_bar(engine.spans, first, last, engine.slots)} {share:.0%} of its slots busy"
    )
    print(f"  trainer {_bar(engine.trained, first, last, 1)} {trained:.0%} busy")


def _bar(spans: list[tuple[float, float]], first: float, last: float, capacity: int) -> str:
    width = (last - first) / COLUMNS
    cells = []
    for column in range(COLUMNS):
        low, high = first + column * width, first + (column + 1) * width
        used = sum(max(0.0, min(end, high) - max(start, low)) for start, end in spans)
        cells.append(BARS[round(min(used / (width * capacity), 1.0) * (len(BARS) - 1))])
    return "".join(cells)


if __name__ == "__main__":
    main()
