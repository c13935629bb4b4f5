"""Run schedules: python -m tests.chaos.run --seeds 0-39 (make test-chaos SEEDS=0-39).

    for each seed      sample ──▶ start, inject, wait, look for leftovers ──┐
                                  ▲                                       │ status is not 0:
                                  └──── the same command again ◀──────────┘ at most _MORE_STARTS times
                       compare with the undisturbed run, which is made once per mode and version

A line per seed goes to results.jsonl at once. The exit status is 1 if any seed deviated: another result,
something left behind, an engine's loss that ended the run, or a command that never got through.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos import compare, inject, leftovers
from tests.chaos.modes import MODES, Folders, Mode, command
from tests.chaos.plan import Fault, Schedule, parse_seeds, sample_schedule
from tests.chaos.processes import MARKER, Processes
from tests.chaos.reading import Output
from tests.chaos.table import print_row

_MORE_STARTS = 4  # behind those that have a fault
_LIMIT_S = 240.0  # of one start
_LONGEST_WORK = 18  # of the 107 characters that a socket's path may have
_DISK = "512m"
_CLEAN = {"term": signal.SIGTERM, "hup": signal.SIGHUP}
_STEP = re.compile(r"--ckpt-step (\d+)")
_STARTED = re.compile(r"^start \d")
_TOLD = re.compile(
    r"^slime: |engine \d+ failed|saving, then stopping|warning: |could not save|is damaged"
)


@dataclass(kw_only=True)
class StartRecord:
    """One start: what was done to it, how it ended, and how long that took."""

    status: int
    seconds: float
    start_s: float  # until the first rollout
    faults: list[str] = field(
        default_factory=list
    )  # what was done; a fault that missed is not here
    told_s: float | None = (
        None  # from the first fault to the first line of slime's that tells of it
    )
    ended_s: float | None = None  # from the first fault to the end of the start
    lingered_s: float = 0.0
    left: str = ""
    traceback: bool = False
    trained: int = -1  # the last rollout in metrics.jsonl
    saved: int = -1  # that of the last checkpoint


@dataclass(kw_only=True)
class Result:
    seed: int
    mode: str
    schedule: str
    outcome: str = ""
    deviations: list[str] = field(default_factory=list)
    starts: list[StartRecord] = field(default_factory=list)
    seconds: float = 0.0
    load: float = 0.0
    commit: str = ""
    date: str = ""


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    inputs = make_inputs(options.work / "inputs")
    failed = 0
    for seed in parse_seeds(options.seeds):
        result = run_seed(
            sample_schedule(seed, options.mode), inputs, options.work, keep=options.keep
        )
        with (options.results or options.work / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print_row(asdict(result))
        failed += bool(result.deviations)
    print(f"{failed} seeds deviated" if failed else "every seed came through")
    return 1 if failed else 0


def run_seed(schedule: Schedule, inputs: Path, work: Path, *, keep: bool = False) -> Result:
    mode = MODES[schedule.mode]
    reference, loop_s = undisturbed(mode, inputs, work)
    result = Result(seed=schedule.seed, mode=mode.name, schedule=str(schedule), **_stamp())
    root = work / f"s{schedule.seed}"
    shutil.rmtree(root, ignore_errors=True)
    folders = Folders(root=root)
    folders.disk.mkdir(parents=True)
    begun = time.monotonic()
    if schedule.needs_disk:
        _mount(folders.disk)
    try:
        _all_starts(schedule, inputs, folders, loop_s, result)
        _judge(schedule, folders, reference, result)
    finally:
        if schedule.needs_disk:
            subprocess.run(["umount", "--lazy", folders.disk], check=True)
    result.seconds = round(time.monotonic() - begun, 1)
    if not keep and not result.deviations:
        shutil.rmtree(root)
    return result


def undisturbed(mode: Mode, inputs: Path, work: Path) -> tuple[Folders, float]:
    """The run without faults, and the seconds of its loop; made once for this state of the code."""
    root = work / f"{mode.name}-{_code_version()}"
    folders, seconds = Folders(root=root), root / "seconds"
    if not seconds.exists():
        shutil.rmtree(root, ignore_errors=True)
        folders.disk.mkdir(parents=True)
        record = one_start(mode, inputs, folders, loop_s=0.0, faults=(), extra=[], number=0)
        lines = compare.differences(mode, folders, folders) if record.status == 0 else []
        if record.status or lines:
            log = root / "start_0.log"
            raise SystemExit(
                f"the undisturbed run of {mode.name} is not good: {record} {lines} {log}"
            )
        seconds.write_text(str(record.seconds - record.start_s))
    return folders, float(seconds.read_text())


def one_start(
    mode: Mode,
    inputs: Path,
    folders: Folders,
    *,
    loop_s: float,
    faults: tuple[Fault, ...],
    extra: list[str],
    number: int,
) -> StartRecord:
    """Start the command, break it, and wait for its end."""
    marker = uuid.uuid4().hex
    shared_before = leftovers.shared_memory()
    folders.temporary.mkdir(exist_ok=True)
    began = time.monotonic()
    words = [*command(mode, inputs, folders), *extra]
    process = _start(words, mode.script, folders, marker, cache=inputs / "inductor")
    output = Output(process, folders.root / f"start_{number}.log")
    start = inject.Start(
        mode=mode,
        folders=folders,
        pid=process.pid,
        began=began,
        loop_s=loop_s,
        processes=Processes(marker),
        ended=lambda: process.poll() is not None,
    )
    try:
        done, ports, hit = _inject_all(faults, start)
        timed_out = _wait_for_end(process, start.processes)
    except BaseException:  # Ctrl-C, or a fault of the harness: the run does not outlive it
        leftovers.end_all(start.processes.alive())
        raise
    ended = time.monotonic()
    inject.release_disk(folders.disk)
    left = leftovers.find_leftovers(
        start.processes, folders, shared_before=shared_before, ports=ports
    )
    output.close()
    record = StartRecord(
        status=process.returncode,
        seconds=round(ended - began, 1),
        start_s=output.first(_STARTED, began) or 0.0,
        faults=done,
        told_s=output.first(_TOLD, hit) if hit else None,
        ended_s=round(ended - hit, 1) if hit else None,
        lingered_s=left.lingered_s,
        left="; ".join(
            filter(None, ["hung, ended by the harness" if timed_out else "", str(left)])
        ),
        traceback="Traceback (most recent call last)" in output.text,
        trained=inject.last_trained(folders),
        saved=compare.last_saved(folders),
    )
    _damage_afterwards(faults, start, done)
    return record


def make_inputs(folder: Path) -> Path:
    """Quickstart's model with random weights, and sums as prompts; made once."""
    if (folder / "held.jsonl").exists():
        return folder
    from slime.cli.quickstart_task import write_model
    from tests.chaos.hooks import EVAL_LABEL

    write_model(folder / "model", seed=1)
    sums = [f"Sort {a}{b}{a + b}" for a in range(1, 6) for b in range(1, 5)]
    _write(folder / "train.jsonl", [{"input": text, "label": ""} for text in sums])
    _write(folder / "held.jsonl", [{"input": text, "label": EVAL_LABEL} for text in sums[:8]])
    return folder


# ---- parts


def _all_starts(
    schedule: Schedule, inputs: Path, folders: Folders, loop_s: float, result: Result
) -> None:
    mode, extra = MODES[schedule.mode], []
    for number in range(len(schedule.starts) + _MORE_STARTS):
        faults = schedule.starts[number] if number < len(schedule.starts) else ()
        record = one_start(
            mode, inputs, folders, loop_s=loop_s, faults=faults, extra=extra, number=number
        )
        result.starts.append(record)
        if record.status == 0 or nothing_to_resume(result.starts):
            return
        log = (folders.root / f"start_{number}.log").read_text()
        advised = _STEP.search(log) if record.status == 2 else None
        extra = ["--ckpt-step", advised[1]] if advised else []


def _judge(schedule: Schedule, folders: Folders, reference: Folders, result: Result) -> None:
    """Fill in what deviated, and the outcome in two words."""
    mode, starts, deviations = MODES[schedule.mode], result.starts, result.deviations
    result.load = round(os.getloadavg()[0], 1)
    for number, (record, faults) in enumerate(zip(starts, schedule.starts, strict=False)):
        only_engines = faults and all(fault.loses_engine_only for fault in faults)
        began = any((folders.run_dir / "logs").glob("engine_*.port"))
        if only_engines and record.faults and record.status and began:
            deviations.append(f"start {number}: an engine's loss ended the run")
        deviations += [f"start {number}: {line}" for line in unclean_stop(faults, record)]
    for number, record in enumerate(starts):
        if record.left:
            deviations.append(f"start {number} left {record.left}")
        if record.traceback:
            deviations.append(f"start {number} ended with a traceback")
    if nothing_to_resume(starts):
        result.outcome = "DEVIATED" if deviations else "refused, told"
        return
    if starts[-1].status:
        result.outcome = "never finished"
        deviations.append(f"status {[record.status for record in starts]}")
        return
    deviations += compare.differences(mode, folders, reference)
    if partial := leftovers.partial_files(folders):
        deviations.append(f"half-written files are left: {partial}")
    how = "bitwise" if mode.bitwise else "accounted"
    if not any(record.faults for record in starts):
        result.outcome = f"not hit, {how}"
    else:
        result.outcome = f"{'continued' if len(starts) == 1 else 'resumed'}, {how}"
    if deviations:
        result.outcome = "DEVIATED"


def nothing_to_resume(starts: list[StartRecord]) -> bool:
    """The only checkpoint was damaged, and the next start was refused because of it."""
    damaged = any(
        inject.ONLY_CHECKPOINT in words for record in starts[:-1] for words in record.faults
    )
    return damaged and starts[-1].status == 2


def unclean_stop(faults: tuple[Fault, ...], record: StartRecord) -> list[str]:
    """A signal to the driver, once the loop runs, saves what was trained on and says so by its status."""
    asked = all(f.kind in _CLEAN and f.target in ("driver", "driver_group") for f in faults)
    if not asked or not record.faults or not record.start_s or record.status == 0:
        return []
    wrong = []
    if record.status not in [128 + _CLEAN[fault.kind] for fault in faults]:
        wrong.append(f"a clean stop ended with status {record.status}")
    if record.saved != record.trained:
        wrong.append(f"trained up to rollout {record.trained}, but saved {record.saved}")
    return wrong


def _start(
    words: list[str], script: str, folders: Folders, marker: str, *, cache: Path
) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(compare.runs.ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folders.temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        MARKER: marker,
    }
    return subprocess.Popen(
        [sys.executable, str(compare.runs.ROOT / script), *words],
        cwd=compare.runs.ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _inject_all(
    faults: tuple[Fault, ...], start: inject.Start
) -> tuple[list[str], set[int], float | None]:
    """What was done, the ports the run listened on by then, and when the first fault came."""
    if not faults or not inject.wait_for(faults[0].at, start):
        return [], set(), None
    ports = leftovers.listen_ports(start.processes) if faults[0].at.phase == "time" else set()
    done, hit = [], None
    for fault in faults:
        if fault.target == "checkpoint":
            continue
        now = time.monotonic()
        if words := inject.inject(fault, start):
            done.append(words)
            hit = hit or now
    return done, ports, hit


def _damage_afterwards(faults: tuple[Fault, ...], start: inject.Start, done: list[str]) -> None:
    """A checkpoint is damaged when nobody writes there any more."""
    for fault in faults:
        if fault.target == "checkpoint" and done and (words := inject.inject(fault, start)):
            done.append(words)


def _wait_for_end(process: subprocess.Popen[str], processes: Processes) -> bool:
    """Whether it had to be ended here."""
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None:
        processes.look()
        if time.monotonic() > deadline:
            leftovers.end_all(processes.alive())
            process.wait()
            return True
        time.sleep(0.2)
    return False


def _mount(disk: Path) -> None:
    """A file system of its own that can be filled; needs root."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700", "chaos", str(disk)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"a disk to fill cannot be mounted (needs root): {done.stderr.strip()}")


def _code_version() -> str:
    """Of everything that decides what a run computes."""
    root, digest = compare.runs.ROOT, hashlib.sha256()
    files = [
        *(root / "slime").rglob("*.py"),
        *root.glob("train*.py"),
        *(root / "tests/chaos").glob("*.py"),
    ]
    for file in sorted(files):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:6]


def _stamp() -> dict[str, str]:
    ask = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, cwd=compare.runs.ROOT, capture_output=True, text=True)
    return {"commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d")}


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.chaos.run", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", required=True, help='e.g. "0-39" or "7 9 100-120"')
    parser.add_argument("--mode", choices=list(MODES), help="this mode instead of the sampled one")
    parser.add_argument("--work", type=Path, default=Path("/tmp/slime-chaos"))
    parser.add_argument("--results", type=Path, help="default: results.jsonl in --work")
    parser.add_argument("--keep", action="store_true", help="keep the folders of good seeds, too")
    options = parser.parse_args(argv)
    if len(str(options.work)) > _LONGEST_WORK:
        parser.error(f"--work: at most {_LONGEST_WORK} characters, Ray's sockets lie below it")
    return options


if __name__ == "__main__":
    sys.exit(main())
