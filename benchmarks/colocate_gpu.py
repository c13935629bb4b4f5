"""Memory of a colocated run over many rollouts: does anything grow?

usage: python benchmarks/colocate_gpu.py [--rollouts 100] [--model DIR] [--max-response-len 64]
       python benchmarks/colocate_gpu.py --run-dir DIR COMMAND...   any run that leaves its folder there

Engine and trainer share one GPU and offload in turn. During the run, the GPU's used memory and the host
memory of each process are sampled ten and two times a second; a rollout's figure is the most that was
seen in it. The mean over rollouts 10..19 is compared with the mean over the last ten: what grows with
every rollout shows there, what is taken once does not. Without a GPU only the host's memory is watched.
The last lines are `RATIO colocate_<what>_growth <last / first>`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402

from benchmarks.arithmetic import make_rows  # noqa: E402
from benchmarks.slime_side import LENGTHS  # noqa: E402
from tests.tiny import make_tiny_checkpoint  # noqa: E402

SETTLED = 10  # rollouts until caches, graphs and pools have their size
Readings = list[tuple[float, dict[str, float]]]  # time, and bytes by what holds them


class Watch:
    """Reads a set of figures every `interval` seconds in a thread."""

    def __init__(self, read: Callable[[], dict[str, float]], interval: float) -> None:
        self.readings: Readings = []
        self._read, self._interval = read, interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._interval):
            self.readings.append((time.time(), self._read()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--model", type=Path, help="default: a random one of 0.2 million weights")
    parser.add_argument("--max-response-len", type=int, default=64)
    parser.add_argument("--run-dir", type=Path, help="where COMMAND leaves its metrics.jsonl")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if bool(options.command) != bool(options.run_dir):
        parser.error("--run-dir and a command belong together")
    if options.rollouts < 3 * SETTLED:
        parser.error(f"--rollouts must be at least {3 * SETTLED}")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{time.strftime('%Y-%m-%d')} torch {torch.__version__}, {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        readings = run_watched(options.command or train_command(options, work), work)
        ends = rollout_ends(options.run_dir or work / "run")
    report(peaks(readings, ends))


def train_command(options: argparse.Namespace, work: Path) -> list[str]:
    model = options.model or make_tiny_checkpoint(work / "model", weight_scale=1.0)
    (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(512)))
    words: list[object] = [sys.executable, ROOT / "train.py", "--train-backend", "fsdp"]
    words += ["--rollout-engine", "slime", "--colocate", "--actor-num-gpus-per-node", "1"]
    words += ["--run-dir", work / "run", "--hf-checkpoint", model]
    words += ["--prompt-data", work / "data.jsonl", "--input-key", "prompt", "--label-key", "label"]
    words += ["--custom-rm-path", "benchmarks.slime_side.reward", "--num-rollout", options.rollouts]
    words += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "8"]
    words += ["--rollout-max-response-len", options.max_response_len, "--lr", "1e-5"]
    words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
    return [str(word) for word in words]


def run_watched(command: list[str], work: Path) -> Readings:
    with (work / "log").open("w") as log:
        env = {**os.environ, LENGTHS: "mixed"}
        run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        card = Watch(card_memory, 0.1)
        with card, Watch(lambda: host_memory(run.pid), 0.5) as host:
            status = run.wait()
    if status:
        raise SystemExit(f"the run ended with {status}:\n{(work / 'log').read_text()[-3000:]}")
    return card.readings + host.readings


def card_memory() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"card": float(total - free)}


def host_memory(pid: int) -> dict[str, float]:
    """Return the memory that belongs to one process alone, of the run's own processes."""
    found: dict[str, float] = {}
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return found
    for process in processes:
        try:
            kind = kind_of(process.cmdline())
            if kind is not None:
                found[kind] = found.get(kind, 0.0) + process.memory_full_info().uss
        except psutil.Error:  # it ended meanwhile
            continue
    return found


def kind_of(words: list[str]) -> str | None:
    line = " ".join(words)
    if "slime.engine.server" in line:
        return "engine"
    if "train.py" in line:
        return "driver"
    if line.startswith("ray::"):
        return "rollout" if "Rollout" in line else "trainer" if "Host" in line else None
    return None


def rollout_ends(run_dir: Path) -> list[float]:
    ends: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        ends[row["rollout_id"]] = max(ends.get(row["rollout_id"], 0.0), row["time"])
    return [ends[rollout_id] for rollout_id in sorted(ends)]


def peaks(readings: Readings, ends: list[float]) -> dict[str, list[float]]:
    """Return by owner of the memory the maximum of each sampled rollout."""
    result: dict[str, list[float]] = {}
    for start, end in itertools.pairwise(ends):
        inside = [values for at, values in readings if start <= at < end]
        for kind in {kind for values in inside for kind in values}:
            most = max(values[kind] for values in inside if kind in values)
            result.setdefault(kind, []).append(most)
    return result


def report(memory: dict[str, list[float]]) -> None:
    ratios = {}
    for kind, values in sorted(memory.items()):
        if len(values) < 3 * SETTLED:
            print(f"{kind:<9} seen in only {len(values)} rollouts")
            continue
        first, last = values[SETTLED : 2 * SETTLED], values[-SETTLED:]
        before, after = statistics.mean(first), statistics.mean(last)
        apart = len(values) - 2 * SETTLED
        print(
            f"{kind:<9} rollouts {SETTLED}..{2 * SETTLED - 1}: {before / 2**20:9.1f} MiB   last "
            f"{SETTLED} of {len(values)}: {after / 2**20:9.1f} MiB   "
            f"{(after - before) / apart / 1024:+.1f} KiB a rollout"
        )
        ratios[kind] = after / before
    for kind, ratio in ratios.items():
        print(f"RATIO colocate_{kind}_growth {ratio:.3f}")


if __name__ == "__main__":
    main()
