"""Whether engines hold exactly the weights that were sent."""

from __future__ import annotations

from slime.backends.weight_sync.engine_client import EngineClient, on_all
from slime.utils.errors import WeightMismatchError

_NAMED = 3


def check_versions(engines: list[EngineClient], version: int) -> None:
    found = on_all(engines, EngineClient.weight_version)
    wrong = [
        f"{engine.url} reports {value!r}"
        for engine, value in zip(engines, found, strict=True)
        if value != str(version)
    ]
    if wrong:
        raise WeightMismatchError(f"weights {version} were sent, but {'; '.join(wrong)}")


def check_checksums(engines: list[EngineClient], sent: dict[str, int], version: int) -> None:
    """Every tensor of the engine must have been sent and every sent one be there, bit by bit.

    Both sides name what a checkpoint holds: parameters and persistent buffers, tied weights once.
    """
    held = on_all(engines, EngineClient.checksums)
    problems = [
        f"engine {engine.url}: {problem}"
        for engine, sums in zip(engines, held, strict=True)
        if (problem := difference(sent, sums))
    ]
    if problems:
        raise WeightMismatchError(f"weights {version} did not arrive intact. {'; '.join(problems)}")


def difference(sent: dict[str, int], held: dict[str, int]) -> str:
    """What is wrong with `held`, in words; empty when nothing is."""
    groups = {
        "differ": [name for name, value in sent.items() if name in held and held[name] != value],
        "are missing in the engine": [name for name in sent if name not in held],
        "are in the engine but were not sent": [name for name in held if name not in sent],
    }
    return ", ".join(
        f"{len(names)} of {len(sent)} tensors {what} ({some(names)})"
        for what, names in groups.items()
        if names
    )


def some(names: list[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
