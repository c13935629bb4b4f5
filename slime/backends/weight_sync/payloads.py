"""What a tensor update looks like for each kind of engine; the other updates are the same for all."""

from __future__ import annotations

from typing import Any

from slime.utils.ipc import BufferHandle


def tensor_payload(
    kind: str, handle: BufferHandle, metadata: list[dict[str, Any]], version: int
) -> dict[str, Any]:
    """Body of /update_weights_from_tensor. Every bucket carries the version: engines are paused, so
    no token can be stamped with it before the last bucket is in."""
    if kind != "slime":
        raise ValueError(
            f"engines of kind {kind!r} take no tensor update here; "
            "use --update-weight-transport distributed or disk"
        )
    return {
        "load_format": "slime_shm",
        "handle": handle,
        "metadata": metadata,
        "weight_version": str(version),
        "flush_cache": False,
    }
