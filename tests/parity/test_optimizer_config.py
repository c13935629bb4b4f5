"""What Megatron's optimizer is told on a GPU, looked at without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.megatron import DIST_OPT
from tests.parity.test_checkpoint import args_for
from tests.parity.tiny_families import make_family
from tests.rank_pool import run_megatron_ranks

OFFLOAD = {**DIST_OPT, "optimizer_cpu_offload": True}


def config_on_a_gpu(rank: int, folder: str, flags: dict[str, Any]) -> tuple[bool, float]:
    from slime.backends.megatron_utils import optimizer

    with mock.patch.object(optimizer, "device_type", lambda: "cuda"):
        config = optimizer.optimizer_config(args_for(Path(folder), flags))
    return config.optimizer_cpu_offload, config.optimizer_offload_fraction


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (False, 0.0)),
        (OFFLOAD, (True, 1.0)),  # Megatron's class would offload nothing
        ({**OFFLOAD, "optimizer_offload_fraction": 0.25}, (True, 0.25)),
    ],
)
def test_offloading_takes_all_unless_told_otherwise(tmp_path, flags, expected):
    make_family(tmp_path, "qwen3")
    assert run_megatron_ranks(config_on_a_gpu, 1, str(tmp_path), flags) == [expected]
