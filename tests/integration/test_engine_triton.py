"""The tests of the Triton kernels in Triton's interpreter, which needs its environment at import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.env import child_env

REPO = Path(__file__).resolve().parents[2]
KERNELS = [
    "tests/gpu/test_engine_kernels.py",
    "tests/gpu/test_engine_experts.py",
    "tests/gpu/test_engine_lora_kernels.py",
    "tests/gpu/test_engine_delta_kernels.py",
    "tests/gpu/test_delta_rule_kernels.py",
    "tests/gpu/test_checksum_kernel.py",
    "tests/gpu/test_engine_vision_cuda.py",
]


@pytest.mark.timeout(1500)  # 270 s on quiet cores
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", *KERNELS]
    env = child_env(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    result = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "passed" in result.stdout
