"""The built package, installed without the checkout: its files, `slime train` with a hook, the quickstart.

The environment holds slime's wheel and sees the packages of this one, whose editable install of slime
is not on its path. Nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime import __version__
from tests.e2e import runs

HOOK = """
def length(args, sample):
    return float(len(sample.response))
"""
_NOT_PACKED = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")


@dataclass(kw_only=True, frozen=True)
class Installed:
    wheel: Path
    environment: Path
    folder: Path  # holds my_rewards.py and nothing of the checkout

    def slime(self, *words: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        variables = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
        return subprocess.run(
            [self.environment / "bin" / "slime", *map(str, words)],
            cwd=self.folder,
            env={**variables, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy, so that no build folder appears in the checkout."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(runs.ROOT / "slime", source / "slime", ignore=_NOT_PACKED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(runs.ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", folder, source])
    (wheel,) = folder.glob("slime-*.whl")
    environment = folder / "environment"
    call([sys.executable, "-m", "venv", "--without-pip", environment])
    python = environment / "bin" / "python"
    call([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel])
    # A line of a .pth file adds a folder, without the .pth files in it: the editable install is one.
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = folder / "work"
    work.mkdir()
    (work / "my_rewards.py").write_text(HOOK)
    return Installed(wheel=wheel, environment=environment, folder=work)


def call(command: list[object]) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_every_file_of_the_package(installed, source):
    files = {str(path.relative_to(source)) for path in (source / "slime").rglob("*.*")}
    packed = {
        name for name in zipfile.ZipFile(installed.wheel).namelist() if "dist-info" not in name
    }
    assert packed == {name for name in files if "__pycache__" not in name}
    assert any(name.endswith("cpu.c") for name in packed)


def test_an_sdist_is_built(source, tmp_path):
    program = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [f"slime-{__version__}.tar.gz"]


def test_the_commands_start_without_the_checkout(installed):
    assert installed.slime("--version").stdout == f"slime {__version__}\n"
    program = "import slime; print(slime.__file__)"
    python = installed.environment / "bin" / "python"
    done = subprocess.run(
        [python, "-I", "-c", program], cwd=installed.folder, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(installed.environment)
    for command in ("train", "engine", "watch", "plan", "quickstart"):
        done = installed.slime(command, "--help")
        assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_a_dry_run_finds_a_hook_of_the_current_folder(installed, tiny_model, tiny_data, tmp_path):
    for name, status in (("length", 0), ("missing", 2)):
        words = runs.command(
            tiny_model,
            tiny_data,
            tmp_path / "run",
            custom_rm_path=f"my_rewards.{name}",
            dry_run=True,
        )
        done = installed.slime("train", *words)
        assert done.returncode == status, done.stdout + done.stderr
    assert "my_rewards has no 'missing'" in done.stderr


def test_the_quickstart_runs(installed):
    done = installed.slime("quickstart", "--smoke", "--run-dir", "quick")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = installed.folder / "quick"
    assert {r["rollout_id"] for r in runs.metrics(folder / "grpo", "train")} == {0, 1}
    assert (folder / "grpo" / "report.html").stat().st_size > 0
    assert (folder / "grpo" / "hf" / "config.json").exists()
