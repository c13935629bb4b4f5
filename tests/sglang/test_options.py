"""Slime's tables and command lines against the parsers of the packages that are installed."""

from __future__ import annotations

import subprocess

import pytest
import torch

from slime.backends.sglang_utils.command import differences, installed_options
from slime.config.installed import find_sglang
from slime.core.errors import UserError
from slime.serving.router import router_argv
from slime.weights.sglang_checksums import gpu_hash
from tests.args import make_args
from tests.unit.test_sglang_command import SEED, command


def words(found: dict[str, list[str]]) -> list[str]:
    return [word for option, values in found.items() for word in (option, *values)]


def test_the_tables_are_those_of_the_installed_version():
    install = find_sglang()
    assert install is not None
    assert differences(install) == []


@pytest.mark.parametrize("on_gpu", [True, False])
def test_sglang_parses_what_slime_writes(on_gpu):
    install = find_sglang()
    assert install is not None
    argv = words(command(make_args(**SEED), install.version, rank=3, on_gpu=on_gpu))
    installed_options(install, "sglang", argv)
    with pytest.raises(UserError, match="no-such-option"):
        installed_options(install, "sglang", [*argv, "--no-such-option"])


def test_the_router_parses_what_slime_writes():
    install = find_sglang()
    assert install is not None
    args = make_args(
        rollout_engine="sglang", router_policy="manual", router_disable_retries=True
    )  # fmt: skip
    argv = router_argv(args, python="python", host="127.0.0.1", port=1, metrics_port=2)
    assert argv[:2] == ["python", "-c"]  # which adds the key: it stands on no command line
    installed_options(install, "sglang_router", argv[3:])


_HASHES = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
torch.Tensor.is_cuda = property(lambda tensor: True)  # the interpreter needs no GPU
from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash
for tensor in torch.load(sys.argv[1]):
    print("HASH", gpu_tensor_hash(tensor))
"""


def test_checksums_of_a_gpu_are_those_of_sglangs_kernel(tmp_path):
    install = find_sglang()
    assert install is not None
    torch.manual_seed(0)
    shapes = [((3, 5), torch.bfloat16), ((8192,), torch.float32), ((301, 57), torch.bfloat16)]
    tensors = [torch.randn(shape).to(dtype) for shape, dtype in shapes]
    torch.save(tensors, tmp_path / "tensors")
    command = [install.python, "-c", _HASHES, str(tmp_path / "tensors")]
    printed = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True
    ).stdout
    found = [int(line.split()[1]) for line in printed.splitlines() if line.startswith("HASH")]
    assert found == [gpu_hash(tensor) for tensor in tensors]
