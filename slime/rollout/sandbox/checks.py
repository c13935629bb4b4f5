"""Whether this system can hold a sandbox, and what to type if it cannot."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime.core.errors import UserError
from slime.rollout.sandbox.bubblewrap import find_bwrap
from slime.rollout.sandbox.limits import Limits
from slime.rollout.sandbox.process import start

_PROBE = "import threading as t\nt.Thread(target=lambda: print('ok')).start()"
_PROBE_S = 60.0
_DOCKER = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)
_SETTINGS = {  # a kernel setting that forbids user namespaces, and the value that allows them
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user/max_user_namespaces": ("0", "65536"),
}


@functools.cache
def check_sandbox() -> None:
    """Run a small program in a sandbox; raise UserError, with what to type, if that fails."""
    with ThreadPoolExecutor(1) as pool:  # the caller's thread may have an event loop already
        output, errors = pool.submit(asyncio.run, _probe()).result()
    if output != "ok\n":
        lines = errors.strip().splitlines()
        reason = lines[-1] if lines else "no output"
        raise UserError(
            f"programs of the model cannot be sandboxed on this system ({reason}): "
            f"{_advice(errors)}, or accept the risk with --allow-unsandboxed-code, which leaves "
            "limits of time and memory only"
        )


async def _probe() -> tuple[str, str]:
    process = await start([sys.executable, "-I", "-c", _PROBE], limits=Limits())
    try:
        streams = asyncio.gather(process.stdout.read(), process.stderr.read())
        output, errors = await asyncio.wait_for(streams, _PROBE_S)
    except asyncio.TimeoutError:
        return "", f"no answer within {_PROBE_S:.0f} s"
    finally:
        await process.close()
    return output.decode(errors="replace"), errors.decode(errors="replace")


def _advice(errors: str) -> str:
    """Return what to type, from what bubblewrap and the supervisor wrote."""
    if "nknown option" in errors:
        return "install bubblewrap 0.8 or newer"
    if "/usr/bin/prlimit" in errors:
        return "apt-get install util-linux"
    if "start new thread" in errors:
        return "use Linux 5.14 or newer, which counts processes per user namespace"
    if "Permission denied" in errors and os.geteuid() == 0:  # programs run as nobody
        return f"type chmod -R go+rX {find_bwrap()} {sys.base_prefix} {sys.prefix}"
    for name, (forbidding, allowing) in _SETTINGS.items():
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == forbidding:
            return f"type sysctl -w {name.replace('/', '.')}={allowing}"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return f"start the container with {_DOCKER}"
    if "Permission denied" in errors and os.geteuid() == 0:
        return (
            f"make the interpreter readable by all: chmod -R go+rX {sys.base_prefix} {sys.prefix}"
        )
    return "allow user namespaces (sysctl user.max_user_namespaces)"
