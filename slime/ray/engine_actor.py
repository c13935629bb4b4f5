"""One inference engine: a server process of its own, started, watched and ended by a Ray actor."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from slime.utils.arguments import Args
from slime.utils.device import device_id
from slime.utils.env import child_env
from slime.utils.errors import UserError
from slime.utils.flags.embedded import HONOURED
from slime.utils.types import EngineInfo

_START_TIMEOUT_S = 300
_STOP_TIMEOUT_S = 10
_LAST_LINES = 15
# The number of GPUs is slime's business: --sglang-tp-size is --rollout-num-gpus-per-engine.
_SERVER_OPTIONS = sorted(HONOURED - {"tp_size"})


class EngineActor:
    """Starts `slime.engine.server` on this actor's device and keeps hold of its process."""

    def __init__(self, args: Args, index: int, host: str):
        self.args, self.index, self.host = args, index, host
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> EngineInfo:
        logs = Path(self.args.run_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log_path = logs / f"engine_{self.index}.log"
        port_file = logs / f"engine_{self.index}.port"
        port_file.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                engine_command(self.args, host=self.host, port_file=port_file),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_env(),
                preexec_fn=_die_with_parent,
            )
        port = self._wait_for_port(port_file)
        return EngineInfo(url=f"http://{self.host}:{port}", device_ids=(device_id(),))

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def last_lines(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_for_port(self, port_file: Path) -> int:
        assert self.process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if port_file.exists():
                return json.loads(port_file.read_text())["port"]
            time.sleep(0.05)
        reason = "did not start in time" if self.alive() else f"ended with {self.process.poll()}"
        self.stop()
        raise UserError(
            f"engine {self.index} {reason}; {self.log_path} ends with\n{self.last_lines()}"
        )


def engine_command(args: Args, *, host: str, port_file: Path) -> list[str]:
    """The embedded engine's command line for this run."""
    command = [sys.executable, "-m", "slime.engine.server"]
    command += ["--model-path", args.hf_checkpoint, "--host", host, "--port", "0"]
    command += ["--port-file", str(port_file)]
    for option in _SERVER_OPTIONS:
        value = getattr(args, f"sglang_{option}")
        flag = "--" + option.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not None and value is not False:
            command += [flag, str(value)]
    if "--dtype" not in command:
        command += ["--dtype", {"fp32": "float32", "bf16": "bfloat16"}[args.precision]]
    if "--random-seed" not in command:
        command += ["--random-seed", str(args.rollout_seed)]
    return command


def _die_with_parent() -> None:
    """The engine must not outlive a killed run."""
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
