"""What a sandboxed program sees: the bubblewrap program of this system, and its arguments.

The root is an empty, read-only tmpfs with /usr, the libraries, the prefixes of the running interpreter,
an own /proc, five devices, and one tmpfs of limited size for the working folder and /tmp.
"""

from __future__ import annotations

import functools
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.core.errors import UserError

if TYPE_CHECKING:
    from slime.rollout.sandbox.process import Limits

WORK = "/tmp/work"  # path inside the sandbox; also $HOME
_NOBODY = "65534"
_STAGE = "/sys"  # where the supervisor binds paths for bubblewrap if it was started by root
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # into /usr on most systems
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = ("ld.so.cache", "alternatives", "localtime")
_SYSTEM_FOLDERS = {"bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "include"}
_CERTIFICATES = ("/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted")


def find_bwrap() -> str:
    """Return the path of bubblewrap, or raise a UserError that says how to get it."""
    path = shutil.which("bwrap")
    if path is None:
        raise UserError(
            "programs of the model run in bubblewrap, which is not installed: "
            "apt-get install bubblewrap (or dnf install bubblewrap)"
        )
    return path


def bubblewrap_version() -> str:
    """Return the version, or an empty string where bubblewrap is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        return ""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else "unknown"


def bwrap_arguments(
    argv: Iterable[str],
    *,
    limits: Limits,
    read_only: Iterable[str] = (),
    files: Mapping[str, int] | None = None,
    network: bool = False,
) -> list[str]:
    """Return the command line of bubblewrap, without the descriptors that the supervisor adds.

    read_only: paths that are visible at the same place. files: contents to copy, a path inside and a
    descriptor each.
    """
    layout = _Layout()
    layout.mount("/tmp", "--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp")
    layout.add("--perms", "0777", "--dir", WORK, "--perms", "1777", "--dir", "/tmp/.shm")
    _add_system(layout, _CERTIFICATES if network else ())
    paths = shown_paths(read_only)
    for number, path in enumerate(paths):
        layout.bind(path, f"{_STAGE}/{number}" if os.geteuid() == 0 else path)
    for path in _private_folders(paths):
        layout.hide(path)
    for inside, descriptor in (files or {}).items():
        layout.parents(inside)
        layout.add("--perms", "0444", "--file", str(descriptor), inside)
    layout.remount_read_only()
    layout.add("--chdir", WORK)
    inner = ["/usr/bin/prlimit", f"--nproc={limits.processes}:{limits.processes}", "--"]
    return ["bwrap", *_namespaces(), *layout.arguments, "--", *inner, *argv]


def shown_paths(read_only: Iterable[str]) -> list[str]:
    """Return the paths beyond the system's own that a sandbox shows."""
    return sorted({*interpreter_paths(), *map(os.path.abspath, read_only)}, key=len)


def _namespaces() -> list[str]:
    return [
        "--unshare-user", "--disable-userns", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL",
        "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1",
    ]  # fmt: skip


def _add_system(layout: _Layout, etc: Iterable[str]) -> None:
    layout.bind("/usr")
    layout.hide("/usr/src")  # the usual place of an application in an image
    for name in _LINKED:
        path = f"/{name}"
        if os.path.islink(path):
            layout.add("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            layout.bind(path)
    for path in (*(f"/etc/{name}" for name in _ETC), *etc):
        layout.bind(path)
    layout.mount("/proc", "--proc", "/proc", "--remount-ro", "/proc")
    layout.parents("/dev/null")
    for name in _DEVICES:
        layout.add("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    layout.add("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp/.shm", "/dev/shm")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        layout.add("--symlink", f"/proc/self/fd/{number}", f"/dev/{name}")


@functools.cache
def interpreter_paths() -> tuple[str, ...]:
    """Return the folders that the running interpreter needs to start and to import packages."""
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    packages = [p for p in sys.path if p in site.getsitepackages() or p.endswith("-packages")]
    found = {os.path.abspath(p) for p in (*folders, *packages)}
    found |= {os.path.realpath(p) for p in found}
    found |= {str(link) for link in _links(Path(sys.executable)) if not _covered(link, found)}
    for path in found:
        if path in ("/", os.path.expanduser("~"), "/home", "/root", "/tmp", "/dev/shm"):
            raise UserError(
                f"{path} is the prefix of the Python interpreter, and programs of the model must "
                "not see that folder: run slime from a virtual environment (python -m venv)"
            )
    return tuple(sorted(path for path in found if os.path.exists(path)))


def _links(path: Path) -> list[Path]:
    """Return every path that a chain of symbolic links passes through."""
    chain = [path]
    while path.is_symlink() and len(chain) < 40:
        path = Path(os.path.normpath(path.parent / path.readlink()))
        chain.append(path)
    return chain


def _covered(path: Path, folders: Iterable[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _private_folders(shown: list[str]) -> list[str]:
    """Return the home and working directories that a mounted folder contains; they must be hidden."""
    private = {os.path.realpath(os.path.expanduser("~")), os.path.realpath(os.getcwd())}
    return [
        path
        for path in sorted(private)
        if _covered(Path(path), ["/usr", *shown])
        and not _SYSTEM_FOLDERS.intersection(Path(path).parts)
        and not any(_covered(Path(folder), [path]) for folder in ("/usr", *shown))
    ]


class _Layout:
    """Collects mounts, and makes the folders above them readable by everybody inside."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self._mounted: list[str] = []
        self._hidden: list[str] = []
        self._made: set[str] = set()

    def add(self, *arguments: str) -> None:
        self.arguments += arguments

    def mount(self, path: str, *arguments: str) -> None:
        self.parents(path)
        self.add(*arguments)
        self._made.add(path)

    def bind(self, path: str, source: str | None = None) -> None:
        if os.path.exists(path) and not self._visible(Path(path)):
            self.mount(path, "--ro-bind", source or path, path)
            self._mounted.append(path)

    def hide(self, path: str) -> None:
        """Cover a folder of the host by an empty one; what is bound later may lie in it."""
        if os.path.isdir(path):
            self.add("--perms", "0755", "--size", "4096", "--tmpfs", path)
            self._hidden.append(path)
            self._made.add(path)

    def parents(self, path: str) -> None:
        for folder in reversed(Path(path).parents[:-1]):
            if str(folder) not in self._made and not self._visible(folder):
                self.add("--dir", str(folder))
                self._made.add(str(folder))

    def remount_read_only(self) -> None:
        for path in (*self._hidden, "/"):
            self.add("--remount-ro", path)

    def _visible(self, path: Path) -> bool:
        return _covered(path, self._mounted) and not _covered(path, self._hidden)
