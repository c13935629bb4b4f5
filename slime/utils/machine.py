"""Facts about this machine and what is installed on it, read without importing anything heavy."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from slime.config.env import child_env

PACKAGES = (
    "slime",
    "torch",
    "transformers",
    "ray",
    "numpy",
    "safetensors",
    "sglang",
    "megatron-core",
    "transformer-engine",
    "triton",
)

_IDLE_MIB = 1024
_TE_TIMEOUT_S = 120
_TE_ANSWER = "TE "
_TE_CODE = f"""
import json
import transformer_engine.pytorch as te
import torch, transformer_engine
from transformer_engine.pytorch import quantization as q
found = {{"version": transformer_engine.__version__, "fp8": "no GPU", "blocks": "no GPU"}}
if torch.cuda.is_available():
    found["fp8"], found["blocks"] = q.check_fp8_support()[1], q.check_fp8_block_scaling_support()[1]
print("{_TE_ANSWER}" + json.dumps(found))
"""


@dataclass(kw_only=True, frozen=True)
class Gpu:
    name: str
    memory_mib: int
    driver: str


def memory_file(name: str) -> int:
    """Return a descriptor of an anonymous file in memory. Python of conda has no os.memfd_create."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    descriptor, path = tempfile.mkstemp(prefix=name, dir="/dev/shm")
    os.unlink(path)
    return descriptor


def process_memory() -> dict[str, int]:
    """Return resident bytes, and the peak that torch reserved on the GPU if this process uses one."""
    import psutil  # the sandbox imports this module where it may be missing

    memory = {"rss": psutil.Process().memory_info().rss}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        memory["gpu_peak"] = torch.cuda.max_memory_reserved()
    return memory


def package_version(name: str) -> str | None:
    """Return the installed version by the package's metadata; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirement_of(package: str) -> str:
    """Return e.g. `torch<2.14,>=2.11`, extras included; the bare name if slime has no requirement."""
    return _requirements().get(package, package)


def allows(requirement: str, version: str) -> bool:
    """Return whether a version satisfies a requirement; build suffixes such as +cu130 are ignored."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:  # `slime doctor` also runs where nothing is installed
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


@cache
def _requirements() -> dict[str, str]:
    """Return slime's requirements by package, extras included, without markers."""
    try:
        from packaging.requirements import Requirement

        listed = [Requirement(line) for line in metadata.requires("slime") or []]
    except ModuleNotFoundError:  # packaging, or slime's metadata in a checkout not installed
        return {}
    found = {}
    for requirement in listed:
        requirement.marker = None
        found[requirement.name.lower()] = str(requirement)
    return found


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi reports, which unlike torch creates no CUDA context."""
    rows = [line.split(", ") for line in _nvidia_smi("name,memory.total,driver_version")]
    return [
        Gpu(name=row[0], memory_mib=int(row[1]), driver=row[2]) for row in rows if len(row) == 3
    ]


def compute_capability() -> tuple[int, int] | None:
    """Return the lowest of this machine's GPUs, such as (9, 0) for Hopper; None if it is unknown."""
    found = [re.fullmatch(r"(\d+)\.(\d+)", line) for line in _nvidia_smi("compute_cap")]
    return min(((int(each[1]), int(each[2])) for each in found if each), default=None)


def busy_gpus() -> int:
    """Return the number of GPUs with more memory in use than the driver needs."""
    return sum(int(n) > _IDLE_MIB for n in _nvidia_smi("memory.used") if n.isdigit())


def _nvidia_smi(fields: str) -> list[str]:
    """Return nvidia-smi's line for each GPU; no lines if it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return (_output(command) or "").splitlines()


def torch_cuda_version() -> str | None:
    """Return the CUDA version torch was built for, None for a CPU build, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).parent / "version.py"
    found = re.search(r"^cuda.*=\s*'([\d.]+)'", version_file.read_text(), re.MULTILINE)
    return found[1] if found else None


def available_memory() -> int:
    """Return the bytes this process may still allocate: the system's, or the container's if less."""
    amounts = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        amounts += [int(found[1]) * 1024] if found else []
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        stat = Path("/sys/fs/cgroup/memory.stat").read_text()
        cache = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)  # is reclaimed when needed
        free = int(limit.read_text()) - int(used.read_text())
        amounts.append(free + (int(cache[1]) if cache else 0))
    return min(amounts) if amounts else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def git_commit(folder: Path) -> str | None:
    """Return the commit of the checkout that holds `folder`, with "+changes" if files differ from it."""
    git = ["git", "-C", str(folder)]
    commit = _output([*git, "rev-parse", "HEAD"])
    if commit is None:
        return None
    return f"{commit}+changes" if _output([*git, "status", "--porcelain", "-uno"]) else commit


def describe_machine() -> dict[str, object]:
    """Return what environment.json records about the machine of a run."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := package_version(name))},
        "gpus": [asdict(gpu) for gpu in gpus()],
        "git_commit": git_commit(Path(__file__).parent),
    }


def _output(command: list[str]) -> str | None:
    """Return what a command prints; None if it is missing, fails or takes more than 10 s."""
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return reply.stdout.strip() if reply.returncode == 0 else None


@dataclass(frozen=True, kw_only=True)
class TeProbe:
    """Reasons why features cannot be used; empty if they can."""

    error: str = ""  # why it cannot be imported
    fp8: str = ""  # why this GPU has no FP8 (recipes delayed and tensorwise)
    blocks: str = ""  # why it has no FP8 in blocks of 128


def probe_te() -> TeProbe:
    """Import TransformerEngine and report what this GPU supports.

    Its compiled extension must match torch and needs GPU libraries. It is imported in a subprocess,
    because the import may crash.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TE_CODE],
            capture_output=True,
            text=True,
            timeout=_TE_TIMEOUT_S,
            env=child_env(),
        )
    except subprocess.TimeoutExpired:
        return TeProbe(error=f"importing it did not finish within {_TE_TIMEOUT_S} s")
    for line in done.stdout.splitlines():
        if line.startswith(_TE_ANSWER):
            found = json.loads(line.removeprefix(_TE_ANSWER))
            return TeProbe(fp8=found["fp8"], blocks=found["blocks"])
    return TeProbe(error=_last_line(done.stderr) or f"the import ended with {done.returncode}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
