"""Whether engines hold exactly the weights that were sent."""

from __future__ import annotations

from slime.core.errors import WeightMismatchError
from slime.weights.checksum import RunningChecksums
from slime.weights.engine_client import EngineClient, Held
from slime.weights.transport import Bucket, WeightSyncError

_NAMED = 3


class SentWeights:
    """The names that were sent and, if wanted, checksums of the tensors.

    Engines are proven to hold the bits of these tensors: the trainer's own, or where they had to be
    cast, what the cast has written. So everything from there on is proven, the cast itself is not.
    """

    def __init__(self, *, with_sums: bool) -> None:
        self._names: set[str] = set()
        self._sums = RunningChecksums() if with_sums else None

    def __len__(self) -> int:
        return len(self._names)

    def add(self, bucket: Bucket) -> None:
        names = {name for name, _ in bucket.tensors}
        if len(names) < len(bucket.tensors) or names & self._names:
            raise WeightSyncError(f"bucket {bucket.index} holds a name that was sent before")
        self._names |= names
        if self._sums is not None:
            self._sums.add(bucket.tensors)

    def checksums(self) -> dict[str, int]:
        """Of everything sent, read back from the device only now."""
        return {} if self._sums is None else self._sums.read()


def check_versions(engines: list[EngineClient], held: list[Held], version: int) -> None:
    wrong = [
        f"{engine.url} reports {found.version!r}"
        for engine, found in zip(engines, held, strict=True)
        if found.version != str(version)
    ]
    if wrong:
        raise WeightMismatchError(f"weights {version} were sent, but {'; '.join(wrong)}")


def check_checksums(
    engines: list[EngineClient], held: list[Held], sent: dict[str, int], version: int
) -> None:
    """Every tensor of an embedded engine must have been sent and every sent one be there, bit by bit.

    Both sides name what a checkpoint holds: parameters and persistent buffers, tied weights once.
    """
    problems = [
        f"engine {engine.url}: {problem}"
        for engine, found in zip(engines, held, strict=True)
        if engine.info.kind == "slime" and (problem := difference(sent, found.sums))
    ]
    if problems:
        raise WeightMismatchError(f"weights {version} did not arrive intact. {'; '.join(problems)}")


def difference(sent: dict[str, int], held: dict[str, int]) -> str:
    """What is wrong with `held`, in words; empty when nothing is."""
    if sent == held:
        return ""
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
