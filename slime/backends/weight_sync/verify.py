"""Whether engines hold exactly the weights that were sent."""

from __future__ import annotations

from slime.backends.sglang_utils.layout import ServedSums, is_exact
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


def check_served(
    engines: list[EngineClient], served: ServedSums, version: int, *, exact: bool = True
) -> None:
    """SGLang's own checksums: against what was sent where its layout is known, and among engines.

    What neither shows is left to the probe prompt. Quantised weights (`exact` is False) are summed by
    SGLang in a form of its own.
    """
    held = on_all(engines, EngineClient.served_checksums)
    if not held:
        return
    for engine, ranks in zip(engines, held, strict=True):
        if exact and len(ranks) == 1 and is_exact(engine.architectures()):
            problem = _served_difference(served.sums, ranks[0])
            if problem:
                raise WeightMismatchError(
                    f"weights {version} did not arrive intact. engine {engine.url}: {problem}"
                )
        if len(ranks) == len(held[0]) and ranks != held[0]:
            names = [
                name
                for mine, first in zip(ranks, held[0], strict=True)
                for name, value in mine.items()
                if first.get(name) != value
            ]
            raise WeightMismatchError(
                f"weights {version}: engines {engine.url} and {engines[0].url} hold different values "
                f"of {len(names)} parameters ({_some(names)})"
            )


def _served_difference(expected: dict[str, str], held: dict[str, str]) -> str:
    """A tied output layer is sent once and may be held once or twice."""
    wrong = [name for name in held if name in expected and held[name] != expected[name]]
    unsent = [name for name in held if name not in expected and not name.startswith("lm_head.")]
    groups = {"differ": wrong, "are in the engine but were not sent": unsent}
    return ", ".join(
        f"{len(names)} of {len(held)} parameters {what} ({_some(names)})"
        for what, names in groups.items()
        if names
    )


def difference(sent: dict[str, int], held: dict[str, int]) -> str:
    """What is wrong with `held`, in words; empty when nothing is."""
    groups = {
        "differ": [name for name, value in sent.items() if name in held and held[name] != value],
        "are missing in the engine": [name for name in sent if name not in held],
        "are in the engine but were not sent": [name for name in held if name not in sent],
    }
    return ", ".join(
        f"{len(names)} of {len(sent)} tensors {what} ({_some(names)})"
        for what, names in groups.items()
        if names
    )


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
