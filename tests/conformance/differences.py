"""Where the two engines differ on purpose; every test that skips one of them names an entry here."""

from __future__ import annotations

import pytest

from tests.conformance.conftest import Subject

# what -> (the engine that does not do it, why)
DIFFERENCES: dict[str, tuple[str, str]] = {
    "token_ids_logprob": (
        "slime",
        "log-probs of chosen tokens serve to check SGLang's weights by a probe; the embedded engine's "
        "are checked bit by bit",
    ),
}


def skip_where_different(subject: Subject, what: str) -> None:
    kind, why = DIFFERENCES[what]
    if subject.kind == kind:
        pytest.skip(f"{kind} has no {what}: {why}")
