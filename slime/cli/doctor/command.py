"""`slime doctor`: what this machine has, what is missing, and what to type to get it.

Needs only the standard library, so that it runs where the dependencies are missing.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import socket
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from slime.core.errors import UserError
from slime.utils import machine
from slime.utils.machine import allows, probe_te, requirement_of

GIB = 2**30
# Usual ports of Ray's head and dashboard, and of an engine started by hand.
_USUAL_PORTS = {6379: "Ray head", 8265: "Ray dashboard", 30000: "slime engine"}
_GPU_ONLY = ("sglang", "transformer-engine")
_MARKS = {"ok": ("ok", "32"), "warning": ("warning", "33"), "missing": ("missing", "31")}


@dataclass(kw_only=True, frozen=True)
class Check:
    """One row. The quickstart cannot run here if a needed row is missing."""

    name: str
    status: Literal["ok", "warning", "missing"]
    found: str
    advice: str = ""
    needed: bool = True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="slime doctor",
        allow_abbrev=False,
        description="What this machine has, what is missing, and how to get it. "
        "Exit status 0: the quickstart can run here.",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="check every node of a running Ray cluster instead; exit status 0: no problem found",
    )
    parser.add_argument(
        "--sglang",
        action="store_true",
        help="compare slime's tables with the options of the SGLang and the router installed here, "
        "or in the environment of SLIME_SGLANG_PYTHON; exit status 0: no difference",
    )
    parser.add_argument("--address", help="of the cluster; default: RAY_ADDRESS")
    parser.add_argument("--save", metavar="DIR", help="folder that all nodes must share")
    options = parser.parse_args(argv)
    if options.cluster:
        return _examine_cluster(options)
    if options.sglang:
        from slime.backends.sglang_utils.command import compare_options

        return compare_options()
    if options.address or options.save:
        parser.error("--address and --save belong to --cluster")
    checks = examine()
    ready = can_run_quickstart(checks)
    if options.json:
        rows = [asdict(check) for check in checks]
        print(json.dumps({"quickstart": ready, "checks": rows}, indent=2))
    else:
        print_checks(checks, color=sys.stdout.isatty())
    return 0 if ready else 1


def _examine_cluster(options: argparse.Namespace) -> int:
    from slime.cli.doctor.cluster import examine_cluster

    findings = examine_cluster(options.address, options.save)
    passed = all(finding.status == "ok" for finding in findings)
    if options.json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": passed, "checks": rows}, indent=2))
        return 0 if passed else 1
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.status:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            print(f"{'':7}  {'':<{width}}  -> {finding.advice}")
    if options.save is None:
        print(
            f"{'':7}  {'folder':<{width}}  not checked: name the folder of --save with --save DIR"
        )
    return 0 if passed else 1


def examine(folder: str | Path = ".") -> list[Check]:
    """Run all checks of this machine; `folder` is where runs would be written."""
    gpus = machine.gpus()
    return [
        check_system(),
        check_python(),
        check_torch(gpus),
        check_gpus(gpus),
        check_package("ray", "Ray"),
        check_package("transformers", "transformers"),
        check_other_packages(),
        check_extra("sglang", "SGLang", "the embedded engine serves instead"),
        check_extra("megatron-core", "Megatron-core", "--train-backend fsdp trains without it"),
        check_te(),
        check_bubblewrap(),
        check_ports(),
        check_shared_memory(),
        check_disk(Path(folder)),
        check_memory(),
        check_cores(),
    ]


def can_run_quickstart(checks: list[Check]) -> bool:
    return not any(check.needed and check.status == "missing" for check in checks)


def print_checks(checks: list[Check], *, color: bool) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        word, code = _MARKS[check.status]
        if check.status == "missing" and not check.needed:
            code = "2"
        mark = f"\033[{code}m{word:<7}\033[0m" if color else f"{word:<7}"
        print(f"{mark}  {check.name:<{width}}  {check.found}")
        if check.advice:
            print(f"{'':7}  {'':<{width}}  -> {check.advice}")
    if can_run_quickstart(checks):
        print("\nThe quickstart can run here: make quickstart")
    else:
        missing = [c.name for c in checks if c.needed and c.status == "missing"]
        print(f"\nThe quickstart cannot run here yet; see: {', '.join(missing)}")


def check_system() -> Check:
    name = platform.system()
    if name == "Linux":
        return Check(name="System", status="ok", found=f"Linux {platform.machine()}")
    return Check(
        name="System",
        status="missing",
        found=name,
        advice="slime supports Linux; on Windows use WSL2, on macOS a Linux virtual machine",
    )


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    if version >= (3, 10):
        return Check(name="Python", status="ok", found=found)
    return Check(
        name="Python", status="missing", found=found, advice="install Python 3.10 or newer"
    )


def check_torch(gpus: list[machine.Gpu]) -> Check:
    check = check_package("torch", "torch")
    if check.status == "missing":
        return check
    cuda = machine.torch_cuda_version()
    found = f"{check.found}, {f'built for CUDA {cuda}' if cuda else 'built for the CPU'}"
    if check.status == "ok" and gpus and not cuda:
        advice = (
            f"{_pip()} install --force-reinstall torch (PyPI's build is for CUDA), to use the GPUs"
        )
        return Check(name="torch", status="warning", found=found, advice=advice)
    return Check(name="torch", status=check.status, found=found, advice=check.advice)


def check_gpus(gpus: list[machine.Gpu]) -> Check:
    if not gpus:
        return Check(
            name="GPUs",
            status="missing",
            found="no NVIDIA GPU (optional); everything runs on the CPU",
            advice="nothing to install here; models beyond a toy need a machine with GPUs",
            needed=False,
        )
    first = gpus[0]
    found = f"{len(gpus)} x {first.name}, {first.memory_mib / 1024:.0f} GiB, driver {first.driver}"
    return Check(name="GPUs", status="ok", found=found, needed=False)


def check_package(package: str, name: str) -> Check:
    """Check a required package against the version range in slime's metadata."""
    wanted = requirement_of(package)
    version = machine.package_version(package)
    if version is None:
        advice = f"{_pip()} install '{wanted}'"
        return Check(name=name, status="missing", found="not installed", advice=advice)
    if not allows(wanted, version):
        advice = f"slime is tested with {wanted}: {_pip()} install '{wanted}'"
        return Check(name=name, status="warning", found=version, advice=advice)
    return Check(name=name, status="ok", found=version)


def check_other_packages() -> Check:
    names = ("numpy", "safetensors", "aiohttp", "orjson", "pyyaml", "rich", "jinja2", "psutil")
    absent = [requirement_of(n) for n in names if machine.package_version(n) is None]
    if absent:
        command = " ".join(f"'{requirement}'" for requirement in absent)
        found = f"{len(absent)} not installed"
        advice = f"{_pip()} install {command}"
        return Check(name="Other packages", status="missing", found=found, advice=advice)
    return Check(name="Other packages", status="ok", found=", ".join(names))


def check_extra(package: str, name: str, without: str, command: str = "") -> Check:
    """Check an optional package."""
    wanted = requirement_of(package)
    command = command or f"{_pip()} install '{wanted}'"
    version = machine.package_version(package)
    if version is None:
        found = f"not installed (optional); {without}"
        advice = f"{command}   (made for NVIDIA GPUs)" if package in _GPU_ONLY else command
        return Check(name=name, status="missing", found=found, advice=advice, needed=False)
    if not allows(wanted, version):
        advice = f"slime is tested with {wanted}: {command}"
        return Check(name=name, status="warning", found=version, advice=advice, needed=False)
    return Check(name=name, status="ok", found=version, needed=False)


def check_te() -> Check:
    """Check that TransformerEngine's extension loads with this torch, and which FP8 the GPU supports."""
    command = f"{_pip()} install --no-build-isolation 'transformer_engine[pytorch]'"
    check = check_extra(
        "transformer-engine", "TransformerEngine", "Megatron uses slime's own layers", command
    )
    if check.status == "missing":
        return check
    probe = probe_te()
    if probe.error:
        return replace(
            check,
            status="warning",
            found=f"{check.found}, cannot be imported: {probe.error}",
            advice=f"build its extension for this torch: {command} --force-reinstall --no-deps "
            "--no-binary transformer-engine-torch; until then Megatron uses slime's own layers",
        )
    if probe.fp8:
        return replace(check, found=f"{check.found}, no FP8: {probe.fp8}")
    blocks = f"; not in blocks: {probe.blocks}" if probe.blocks else ", in blocks too"
    return replace(check, found=f"{check.found}, FP8 supported{blocks}")


def check_bubblewrap() -> Check:
    """Check the sandbox for programs that a model wrote, by running one."""
    from slime.rollout.sandbox import bubblewrap_version, check_sandbox

    try:
        check_sandbox()
    except UserError as error:
        version = bubblewrap_version()
        found = f"{version}, but no sandbox" if version else "not installed"
        return Check(
            name="bubblewrap",
            status="missing",
            found=f"{found} (optional); needed by --rm-type code and tools that run programs",
            advice=str(error),
            needed=False,
        )
    return Check(name="bubblewrap", status="ok", found=bubblewrap_version(), needed=False)


def check_ports() -> Check:
    """Check that this user can listen on loopback; slime picks free ports itself."""
    if not _can_listen(0):
        advice = "allow this user to listen on 127.0.0.1"
        return Check(
            name="Ports", status="missing", found="cannot listen on 127.0.0.1", advice=advice
        )
    taken = [f"{port} ({use})" for port, use in _USUAL_PORTS.items() if not _can_listen(port)]
    if not taken:
        return Check(name="Ports", status="ok", found=f"free: {', '.join(map(str, _USUAL_PORTS))}")
    return Check(
        name="Ports",
        status="ok",
        found=f"in use: {', '.join(taken)}; slime picks others",
        advice="to join a Ray cluster that is running, set RAY_ADDRESS"
        if "Ray" in taken[0]
        else "",
    )


def check_shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        advice = "mount -t tmpfs -o size=8G tmpfs /dev/shm"
        return Check(name="Shared memory", status="missing", found="no /dev/shm", advice=advice)
    usage = shutil.disk_usage(path)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in /dev/shm"
    advice = "mount -o remount,size=8G /dev/shm; in Docker: --shm-size=8g"
    return _by_amount(
        "Shared memory", usage.free / GIB, enough=2, least=0.25, found=found, advice=advice
    )


def check_disk(folder: Path) -> Check:
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.0f} GiB free in {folder.resolve()}"
    advice = "free some space, or name another place with --run-dir and --save"
    return _by_amount("Disk", usage.free / GIB, enough=10, least=1, found=found, advice=advice)


def check_memory() -> Check:
    available = machine.available_memory() / GIB
    found = f"{available:.1f} GiB available"
    advice = "stop other programs, or use a machine with more memory"
    return _by_amount("Memory", available, enough=6, least=2, found=found, advice=advice)


def check_cores() -> Check:
    cores = machine.usable_cores()
    advice = "with two or more, trainer and engine do not wait for each other"
    return _by_amount("Cores", cores, enough=2, least=1, found=str(cores), advice=advice)


def _by_amount(
    name: str, amount: float, *, enough: float, least: float, found: str, advice: str
) -> Check:
    if amount >= enough:
        return Check(name=name, status="ok", found=found)
    return Check(
        name=name, status="warning" if amount >= least else "missing", found=found, advice=advice
    )


def _pip() -> str:
    """Return the pip command of this Python, as typed in this folder."""
    python, here = Path(sys.executable), Path.cwd()
    return f"{python.relative_to(here) if python.is_relative_to(here) else python} -m pip"


def _can_listen(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
