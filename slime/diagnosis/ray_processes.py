"""A Ray that this run started: its processes, monitored by pid and killed by session, and its folder.

    driver ──pipe──▶ keeper (a separate process, standard library only)
      one line per process that starts with Ray, each the leader of its own session
      end of file: the driver has stopped Ray, or has died. The keeper kills the remaining processes of
      those sessions and removes Ray's folder.

The raylet starts Ray's agents and workers, which stay in its session. Without the keeper some of them
would outlive a killed driver for a minute. The folder holds Ray's token, sockets and logs; other users cannot
enter it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.config.env import child_env, read_env

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 0.5  # for processes that exit on their own once the raylet is gone
_LIMIT_S = 20.0
_POLL_S = 0.02
_PREFIX = "slime-ray-"
# A socket's path may have 107 bytes. Below this folder Ray needs up to 68:
# /ray/session_2026-11-16_09-56-42_172399_4194304/sockets/plasma_store
_MAX_PARENT = 107 - 68
_YOUNG_S = 60.0  # the creator of a newer folder may not have locked it yet


@dataclass(frozen=True, kw_only=True)
class RayProcess:
    """A process and the leader of its session; `started` distinguishes it from a later process with the same pid."""

    name: str  # "gcs_server", "raylet"
    pid: int
    started: int  # clock ticks since boot

    def running(self) -> bool:
        stat = _read_stat(self.pid)
        return stat is not None and stat.state != "Z" and stat.started == self.started


def identify(name: str, pid: int) -> RayProcess:
    stat = _read_stat(pid)
    return RayProcess(name=name, pid=pid, started=stat.started if stat else 0)


def session_members(leaders: list[RayProcess]) -> list[int]:
    """Return the pids of this user's live processes in the sessions of these leaders."""
    sessions = {leader.pid for leader in leaders if not _is_reused(leader)}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _read_stat(int(entry.name))
            if stat and stat.session in sessions and stat.state != "Z" and stat.uid == os.getuid():
                found.append(int(entry.name))
    return found


def end_sessions(leaders: list[RayProcess], grace_s: float = _GRACE_S) -> None:
    """Return once these sessions have no process left; after `grace_s` kill them."""
    began = time.monotonic()
    while (members := session_members(leaders)) and time.monotonic() - began < _LIMIT_S:
        if time.monotonic() - began >= grace_s:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def start_companion(module: str, argument: str) -> subprocess.Popen[bytes]:
    """Start a companion process, which outlives this one and reads messages, or its end, from a pipe."""
    paths = [str(_ROOT), read_env().python_path]
    return subprocess.Popen(
        [sys.executable, "-S", "-m", module, argument],
        stdin=subprocess.PIPE,
        env=child_env(PYTHONPATH=os.pathsep.join(path for path in paths if path)),
        start_new_session=True,  # signals to the driver's process group must not reach it
    )


def ignore_signals() -> None:
    """Ignore signals, so that a companion process ends only when the driver does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class Keeper:
    """Kills Ray's processes and removes its folder after `close`, or when this process has died."""

    def __init__(self, folder: Path):
        self.processes: list[RayProcess] = []
        self._keeper = start_companion("slime.diagnosis.ray_processes", str(folder))

    def add(self, name: str, pid: int) -> None:
        process = identify(name, pid)
        self.processes.append(process)
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.write(json.dumps(asdict(process)).encode() + b"\n")
            self._keeper.stdin.flush()

    def close(self) -> None:
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait()


def main(folder: str) -> None:
    ignore_signals()
    leaders = [RayProcess(**json.loads(line)) for line in sys.stdin if line.endswith("\n")]
    end_sessions(leaders)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class _Stat:
    state: str
    session: int
    started: int
    uid: int


def _read_stat(pid: int) -> _Stat | None:
    """Read /proc/PID/stat; the name of the program in it may hold spaces and parentheses."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return _Stat(state=fields[0], session=int(fields[3]), started=int(fields[19]), uid=uid)


def _is_reused(leader: RayProcess) -> bool:
    """Return whether another process has the pid now: then the session is empty."""
    stat = _read_stat(leader.pid)
    return stat is not None and stat.started != leader.started


class PrivateFolder:
    """A folder that only this user can enter, with a fresh token in it; stale ones are removed."""

    def __init__(self) -> None:
        parent = _parent()
        remove_stale_folders(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        _lock(self._handle)
        self.token_path = self.path / "token"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(self.token_path, flags, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # regardless of the umask
            file.write(secrets.token_hex(32))

    @property
    def ray_path(self) -> Path:
        """Return Ray's own folder, which Ray makes accessible to everybody."""
        return self.path / "ray"

    def keep_logs(self) -> Path:
        """Move Ray's logs to a folder that is kept until the next start; return it."""
        kept = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}logs-", dir=self.path.parent))
        for logs in self.ray_path.glob("session_2*/logs"):
            shutil.move(logs, kept)
        return kept

    def close(self) -> None:
        os.close(self._handle)


def remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders whose runs were killed together with their keepers."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # already removed, or another user's
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(handle)
                young = time.time() - status.st_mtime < _YOUNG_S
                if status.st_uid == os.getuid() and not young and _lock(handle):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _parent() -> Path:
    """Return TMPDIR if a socket's path fits below it, else /tmp."""
    chosen = Path(tempfile.gettempdir())
    fits = len(os.fsencode(chosen)) + len(f"/{_PREFIX}12345678") <= _MAX_PARENT
    return chosen if fits else Path("/tmp")


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
