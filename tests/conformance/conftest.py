"""One server of each kind for the whole session.

The embedded engine always; real SGLang where SLIME_SGLANG_PYTHON names an interpreter that has it, as
`make test-sglang` does. Control routes take a token in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.core.types import EngineInfo
from tests.conftest import SGLANG_LABEL
from tests.engines import LONG_CONTEXT, ROOM, EngineServer, engine_server
from tests.sglang_server import HERE
from tests.tiny import make_tiny_checkpoint

KINDS = ["slime", "sglang"] if HERE else ["slime"]
LABEL = SGLANG_LABEL


@dataclass(kw_only=True, frozen=True)
class Subject:
    """The server under test and the checkpoint it was started with."""

    kind: str
    server: EngineServer
    checkpoint: Path
    context: int  # positions of its model

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(url=self.server.url, kind=self.kind)


@pytest.fixture(scope="session")
def checkpoint(sglang_checkpoint: Path) -> Path:
    return sglang_checkpoint


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("second") / "m", seed=1)


@pytest.fixture(scope="session", params=KINDS)
def subject(request, checkpoint: Path, tmp_path_factory):
    if request.param == "sglang":
        server = request.getfixturevalue("real_sglang")
        yield Subject(kind="sglang", server=server, checkpoint=checkpoint, context=512)
    else:
        # So long that a request is still under way however late the next call comes.
        folder = tmp_path_factory.mktemp("long") / "m"
        longer = make_tiny_checkpoint(folder, max_position_embeddings=LONG_CONTEXT)
        with engine_server(longer, "--weight-version", LABEL, *ROOM) as server:
            yield Subject(kind="slime", server=server, checkpoint=longer, context=LONG_CONTEXT)
