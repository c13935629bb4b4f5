"""From a seed to a schedule: which run, what is broken in each of its starts, and when.

    sample_schedule(7)  ->  Schedule(seed=7, mode="colo", starts=[[Fault("kill", "engine_0", at=Moment(...))]])

A schedule depends on nothing but its seed. Faults of one start come at once, the second one up to
`_GAP_S` after the first; those of the next start come in the run that resumes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.chaos.modes import MODES, Mode

# Signals that a process gets; "stop" is followed by SIGCONT after `Fault.seconds`.
SIGNALS = ("kill", "stop", "term", "hup")
DISK = ("enospc_transient", "enospc_permanent")
# What is done to the newest checkpoint after the driver's process group was killed.
DAMAGE = (
    "truncate_data",
    "flip_data",
    "zero_data",
    "delete_data",
    "truncate_meta",
    "garble_meta",
    "delete_meta",
    "truncate_rollout",
    "garble_rollout",
    "delete_rollout",
    "garble_tracker",
    "delete_tracker",
)
PHASES = ("early", "start", "generate", "train", "save", "update", "eval", "export", "time")
_PHASE_WEIGHTS = (1, 2, 4, 4, 4, 4, 2, 1, 8)
_GAP_S = 0.3
ENGINE_TARGETS = ("engine", "engine_actor")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """`phase` of `rollout`, and `delay_s` more; "time": at `fraction` of the loop over all rollouts."""

    phase: str
    rollout: int
    delay_s: float
    fraction: float

    def __str__(self) -> str:
        if self.phase == "time":
            return f"time {self.fraction:.2f}"
        return (
            self.phase
            if self.phase in ("early", "start", "export")
            else f"{self.phase} {self.rollout}"
        )


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    target: str  # a process ("engine_0"), "driver_group", "disk" or "checkpoint"
    at: Moment
    gap_s: float = 0.0  # behind the fault before it
    seconds: float = 0.0  # how long a process is stopped, or a disk is full

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}"

    @property
    def loses_engine_only(self) -> bool:
        """Whether the run has to go on by itself."""
        return self.target.startswith(ENGINE_TARGETS)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    mode: str
    starts: tuple[tuple[Fault, ...], ...]

    def __str__(self) -> str:
        return ", ".join("+".join(map(str, faults)) + f" @{faults[0].at}" for faults in self.starts)

    @property
    def needs_disk(self) -> bool:
        """Whether a file system of its own has to be mounted for the run's files."""
        return any(fault.kind in DISK for faults in self.starts for fault in faults)


def sample_schedule(seed: int, mode: str | None = None) -> Schedule:
    """Return the schedule of a seed; `mode` replaces only the sampled mode."""
    dice = random.Random(f"slime chaos {seed}")
    sampled = dice.choice(list(MODES))
    chosen = MODES[mode or sampled]
    starts = [_faults(dice, chosen)]
    if dice.random() < 0.25:
        starts.append(_faults(dice, chosen))
    return Schedule(seed=seed, mode=chosen.name, starts=tuple(starts))


def parse_seeds(text: str) -> list[int]:
    """`"7 9 100-102"` is [7, 9, 100, 101, 102]; commas separate, too."""
    seeds: list[int] = []
    for word in text.replace(",", " ").split():
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"SEEDS: {word!r} is neither a number nor a range like 0-39")
        end = int(last) if dash else int(first)
        if end < int(first):
            raise ValueError(f"SEEDS: {word} ends before it begins")
        seeds += range(int(first), end + 1)
    if not seeds:
        raise ValueError("SEEDS is empty: give numbers and ranges, e.g. SEEDS='7 9 100-120'")
    return list(dict.fromkeys(seeds))


def _faults(dice: random.Random, mode: Mode) -> tuple[Fault, ...]:
    kind = dice.choices(("signal", "disk", "damage"), (8, 1, 2))[0]
    if kind == "disk":
        return (_full_disk(dice, mode),)
    if kind == "damage":
        return _damage(dice, mode)
    first = _signal(dice, mode, _moment(dice, mode))
    if dice.random() < 0.75:
        return (first,)
    second = _signal(dice, mode, first.at, gap_s=dice.choice((0.0, dice.uniform(0, _GAP_S))))
    return (first, second) if second.target != first.target else (first,)


def _signal(dice: random.Random, mode: Mode, at: Moment, gap_s: float = 0.0) -> Fault:
    kind = dice.choices((*SIGNALS, "term_group", "kill_group"), (8, 3, 3, 1, 1, 1))[0]
    if kind.endswith("_group"):
        return Fault(kind=kind.removesuffix("_group"), target="driver_group", at=at, gap_s=gap_s)
    if kind == "hup":  # which only terminals send, to a session's leader
        return Fault(kind=kind, target="driver", at=at, gap_s=gap_s)
    target = dice.choices(
        ("driver", "manager", "trainer", "engine", "engine_actor", "raylet", "gcs"),
        (3, 3, 4, 6, 3, 2, 0.5),
    )[0]
    if target == "trainer":
        ranks = [f"trainer_{rank}" for rank in range(mode.ranks)]
        target = dice.choice([*ranks, "critic_0"] if mode.critic else ranks)
    elif target in ENGINE_TARGETS:
        target = f"{target}_{dice.randrange(mode.engines)}"
    seconds = dice.uniform(2, 12) if kind == "stop" else 0.0
    return Fault(kind=kind, target=target, at=at, gap_s=gap_s, seconds=seconds)


def _full_disk(dice: random.Random, mode: Mode) -> Fault:
    kind = dice.choice(DISK)
    seconds = dice.uniform(0.5, 3) if kind == "enospc_transient" else 0.0
    return Fault(kind=kind, target="disk", at=_moment(dice, mode), seconds=seconds)


def _damage(dice: random.Random, mode: Mode) -> tuple[Fault, ...]:
    """Late enough that an older checkpoint is there."""
    at = Moment(
        phase=dice.choice(("generate", "train", "save")),
        rollout=dice.randrange(mode.saves_before(2) + 1, mode.num_rollout),
        delay_s=dice.uniform(0, 0.5),
        fraction=0.0,
    )
    kill = Fault(kind="kill", target="driver_group", at=at)
    return kill, Fault(kind=dice.choice(DAMAGE), target="checkpoint", at=at)


def _moment(dice: random.Random, mode: Mode) -> Moment:
    phase = dice.choices(PHASES, _PHASE_WEIGHTS)[0]
    rollout = dice.randrange(mode.num_rollout)
    if phase == "eval":
        rollout = dice.choice(mode.evaluated())
    delays = {"early": 0.3, "start": mode.start_s, "save": 0.1, "update": 0.2, "export": 0.1}
    delay = dice.uniform(0, delays.get(phase, 0.4))
    return Moment(phase=phase, rollout=rollout, delay_s=delay, fraction=dice.uniform(0.0, 0.95))
