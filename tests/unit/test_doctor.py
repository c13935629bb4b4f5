"""`slime doctor`: rows, advice and exit status."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli.doctor import command as doctor
from slime.cli.doctor.command import Check, can_run_quickstart, main, print_checks
from slime.rollout.sandbox import check_sandbox
from slime.utils.machine import Gpu, allows, package_version, requirement_of


def test_every_row_is_there_and_each_that_is_not_ok_says_what_to_do():
    checks = {check.name: check for check in doctor.examine()}
    assert list(checks) == [
        *("System", "Python", "torch", "GPUs", "Ray", "transformers", "Other packages"),
        *("SGLang", "Megatron-core", "TransformerEngine", "bubblewrap"),
        *("Ports", "Shared memory", "Disk", "Memory", "Cores"),
    ]
    assert all(check.advice for check in checks.values() if check.status != "ok")
    version = package_version("torch")
    assert version is not None and version in checks["torch"].found


def test_json_has_the_same_rows_and_the_result(capsys: pytest.CaptureFixture[str]):
    status = main(["--json"])
    reply = json.loads(capsys.readouterr().out)
    assert reply["quickstart"] is (status == 0)
    assert [row["name"] for row in reply["checks"]] == [c.name for c in doctor.examine()]


def test_only_a_needed_row_decides_the_result(capsys: pytest.CaptureFixture[str]):
    fine = Check(name="torch", status="warning", found="2.10")
    optional = Check(name="GPUs", status="missing", found="none", needed=False)
    needed = Check(name="Ray", status="missing", found="none", advice="pip install ray")
    assert can_run_quickstart([fine, optional])
    assert not can_run_quickstart([fine, optional, needed])
    print_checks([fine, optional, needed], color=False)
    out = capsys.readouterr().out
    assert "cannot run here yet; see: Ray" in out and "-> pip install ray" in out
    assert "\x1b" not in out


def test_a_gpu_without_a_cuda_build_of_torch_is_a_warning():
    gpu = Gpu(name="NVIDIA H200", memory_mib=143771, driver="580.1")
    without, with_gpu = doctor.check_torch([]), doctor.check_torch([gpu])
    cpu_build = "built for the CPU" in without.found
    assert with_gpu.status == ("warning" if cpu_build else without.status)
    assert doctor.check_gpus([gpu, gpu]).found == "2 x NVIDIA H200, 140 GiB, driver 580.1"


def test_a_taken_port_is_named():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 30000))
        except OSError:
            pass  # someone else has it, which is as good
        else:
            listener.listen()
        assert "30000" in doctor.check_ports().found.split("in use:")[1]


def test_old_python_and_absent_packages_name_the_way_out():
    assert doctor.check_python((3, 9)).status == "missing"
    absent = doctor.check_package("surely-not-installed", "X")
    assert absent.status == "missing" and "pip install 'surely-not-installed'" in absent.advice


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11.0", True),
        ("2.13.1+cu130", True),
        ("2.14.0", False),
        ("2.10.2", False),
        ("2.11", True),
    ],
)
def test_version_ranges(version: str, fits: bool):
    assert allows("torch<2.14,>=2.11", version) is fits


def test_requirements_come_from_the_package_itself():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for package in ("torch", "sglang", "megatron-core"):
        requirement = requirement_of(package)
        bounds = requirement.removeprefix(package).split(",")
        assert all(f"{bound}" in pyproject for bound in bounds) and requirement != package


def test_it_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys; from slime.cli.doctor.command import main; status = main([]); "
        "heavy = {'torch', 'ray', 'transformers', 'rich', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    before = _children_s()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert _children_s() - before < 5


def _children_s() -> float:
    """Processor time of the processes this one has waited for: a busy machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_missing_bubblewrap_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    check_sandbox.cache_clear()
    check = doctor.check_bubblewrap()
    assert check.status == "missing" and not check.needed
    assert "apt-get install bubblewrap" in check.advice


def install_te(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a TransformerEngine 2.20.2 on the path whose torch part is `body`."""
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = '2.20.2'\n")
    (package / "__init__.py").write_text(body)
    (package / "quantization.py").write_text(
        "def check_fp8_support():\n    return True, ''\n"
        "def check_fp8_block_scaling_support():\n    return False, 'needs CUDA 12.9'\n"
    )
    info = folder / "transformer_engine-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(doctor.__file__).parents[1]}")


def test_an_extension_made_for_another_torch_is_reported_in_one_line(tmp_path: Path, monkeypatch):
    install_te(tmp_path, monkeypatch, "raise ImportError('x.so: undefined symbol: _ZN3c10')\n")
    check = doctor.check_te()
    assert check.status == "warning" and "\n" not in check.found
    assert "2.20.2, cannot be imported: ImportError: x.so: undefined symbol" in check.found
    assert "slime's own layers" in check.advice


def test_a_crash_while_importing_is_survived(tmp_path: Path, monkeypatch):
    install_te(tmp_path, monkeypatch, "import os\nos._exit(7)\n")
    assert "the import ended with 7" in doctor.check_te().found


def test_fp8_support_of_the_gpu_is_reported(tmp_path: Path, monkeypatch):
    import torch

    install_te(tmp_path, monkeypatch, "")
    check = doctor.check_te()
    wanted = "FP8 supported; not in blocks: needs CUDA 12.9"
    if not torch.cuda.is_available():
        wanted = "no FP8: no GPU"
    assert check.status == "ok" and check.found == f"2.20.2, {wanted}"
