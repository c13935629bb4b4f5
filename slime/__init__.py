"""slime: reinforcement learning of language models, one loop from a laptop to a cluster.

`slime.train`, `slime.prepare`, `slime.load_run` and `slime.Run` are the Python API; they are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.api import Batch, Run, load_run, prepare, train

__version__ = "0.2.0"
__all__ = ["Batch", "Run", "load_run", "prepare", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'slime' has no attribute {name!r}")
    from slime import api

    return getattr(api, name)
