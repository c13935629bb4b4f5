"""The task both sides of vs_trl_cpu.py train on. Pure Python: TRL's side runs without slime."""

import random

WINDOW = 16
SHORTEST, LONGEST = 16, 256


def score(completion: str, label: str) -> float:
    """Return half a point for digits in the first 16 characters, half for digits of the label in place."""
    digits = sum(c in "0123456789" for c in completion[:WINDOW]) / WINDOW
    right = sum(a == b for a, b in zip(completion, label, strict=False)) / len(label)
    return 0.5 * digits + 0.5 * right


def response_length(lengths: str, index: int) -> int:
    """Return the length of the run's sample number `index`: "64" for all of them, "16-256", or "mixed", the same."""
    low, high = _bounds(lengths)
    return low if low == high else random.Random(index).randint(low, high)


def longest_response(lengths: str) -> int:
    return _bounds(lengths)[1]


def _bounds(lengths: str) -> tuple[int, int]:
    if lengths == "mixed":
        return SHORTEST, LONGEST
    low, _, high = lengths.partition("-")
    return int(low), int(high or low)


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    pairs = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]
