"""What a tensor update of the embedded engine looks like; SGLang's is in sglang_utils/payload.py."""

from __future__ import annotations

from typing import Any

from slime.weights.ipc import BufferHandle


def tensor_payload(
    handle: BufferHandle, metadata: list[dict[str, Any]], version: int
) -> dict[str, Any]:
    """Body of /update_weights_from_tensor. Every bucket carries the version: engines are paused, so
    no token can be stamped with it before the last bucket is in."""
    return {
        "load_format": "slime_shm",
        "handle": handle,
        "metadata": metadata,
        "weight_version": str(version),
        "flush_cache": False,
    }
