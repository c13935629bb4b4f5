"""One inference engine, or one node of it: a Ray actor that starts, watches and stops a server process."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path

import ray

from slime.backends.sglang_utils.command import Node, cpu_env, server_command
from slime.config.arguments import Args
from slime.config.env import read_env
from slime.config.flags.engine_options import HONOURED
from slime.config.flags.spec import option_of
from slime.config.installed import find_sglang
from slime.core.errors import UserError
from slime.core.types import EngineInfo
from slime.serving.server_process import ServerProcess, StartError, wait_until_ready
from slime.utils.addresses import Ports, choose_interface, find_ports, own_host, says_port_taken
from slime.utils.device import device_id, device_type

_START_TIMEOUT_S = 3600  # as with SGLang: reading a large model from a slow disk
_SEARCHED_LINES = 300
# The number of GPUs is set by slime: --sglang-tp-size is --rollout-num-gpus-per-engine.
_SERVER_OPTIONS = sorted(HONOURED - {"tp_size", "random_seed"})


class PortTakenError(UserError):
    """Another process took a port between its choice and its use: retry with other ports."""


class EngineActor:
    """Owns one server process; called from several threads."""

    def __init__(self, args: Args, index: int, rank: int = 0, count: int = 1):
        self.args, self.index = args, index
        self.node = Node(host=own_host(), rank=rank, count=count)
        choose_interface()  # the server inherits it
        self.process: ServerProcess | None = None
        logs = Path(args.run_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._file = logs / (f"engine_{index}" if count == 1 else f"engine_{index}_node_{rank}")
        self.log_path = self._file.with_suffix(".log")
        self._config = self._file.with_suffix(".yaml")

    def where(self) -> tuple[str, list[str]]:
        """Return this node's address and the GPUs that Ray gave this actor, as in CUDA_VISIBLE_DEVICES."""
        return self.node.host, [str(number) for number in ray.get_gpu_ids()]

    def find_ports(self) -> Ports:
        return find_ports(self.node.host)

    def start(self) -> EngineInfo:
        """Start the embedded engine."""
        port_file = self._file.with_suffix(".port")
        port_file.unlink(missing_ok=True)
        command = engine_command(
            self.args, index=self.index, host=self.node.host, port_file=port_file
        )
        self.process = ServerProcess(command, self.log_path)
        port = self._wait_for_port(port_file)
        return EngineInfo(url=f"http://{self.node.host}:{port}", device_ids=(device_id(),))

    def start_sglang(
        self, ports: Ports, meeting_host: str, devices: list[str], gpus: list[str]
    ) -> EngineInfo | None:
        """Start SGLang on `gpus` of this node; the first node of an engine returns how to reach it.

        `devices` are the ids of all GPUs of the engine.
        """
        install = find_sglang()
        assert install is not None, "the arguments were checked for it"
        label = self.args.sglang_weight_version or f"start-{secrets.token_hex(8)}"
        config = self._write_config(label)
        command = server_command(
            self.args,
            index=self.index,
            node=self.node,
            ports=ports,
            meeting_host=meeting_host,
            install=install,
            on_gpu=device_type() == "cuda",
            config_file=config,
        )
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else cpu_env(len(devices))
        self.process = ServerProcess(command, self.log_path, env)
        url = f"http://{self.node.host}:{ports.server}"
        if self.node.rank == 0:
            self._wait(url, label)
            facts = {"port": ports.server, "pid": self.process.pid}
            self._file.with_suffix(".port").write_text(json.dumps(facts))
            return EngineInfo(url=url, device_ids=tuple(devices), kind="sglang")
        return None

    def remove_config(self) -> None:
        """Delete the file with the key, which every node's server has read once the engine answers."""
        self._config.unlink(missing_ok=True)

    def device_id(self) -> str:
        return device_id()

    def alive(self) -> bool:
        return self.process is not None and self.process.status() is None

    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def last_lines(self, count: int = 15) -> str:
        return self.process.last_lines(count) if self.process else ""

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
        self.remove_config()

    def _wait(self, url: str, label: str) -> None:
        assert self.process is not None
        try:
            wait_until_ready(
                url,
                label=label,
                log_path=self.log_path,
                ended=self.process.status,
                owns_port=self.process.listens_at,
                key=read_env().engine_token,
            )
        except StartError as error:
            self.stop()
            self._fail(str(error))

    def _wait_for_port(self, port_file: Path) -> int:
        assert self.process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.status() is not None:
                break
            if port_file.exists():
                return json.loads(port_file.read_text())["port"]
            time.sleep(0.05)
        status = self.process.status()
        self.stop()
        self._fail("did not start in time" if status is None else f"ended with {status}")
        raise AssertionError("unreachable")

    def _fail(self, reason: str) -> None:
        assert self.process is not None
        lines = self.process.last_lines()
        # SGLang logs the port error in the middle of many other lines.
        taken = says_port_taken(self.process.last_lines(_SEARCHED_LINES)) or says_port_taken(reason)
        kind = PortTakenError if taken else UserError
        raise kind(f"engine {self.index} {reason}; {self.log_path} ends with\n{lines}")

    def _write_config(self, label: str) -> str:
        """Write the run's key and the server's label to a file that only this user can read.

        Every user can read a command line, and whoever knows the label could take the server's port
        first and impersonate it.
        """
        self.remove_config()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(self._config, flags, 0o600), "w") as file:
            key = read_env().engine_token
            file.write(f"api-key: {key}\nadmin-api-key: {key}\n")
            file.write(f"weight-version: {json.dumps(label)}\n")
        return str(self._config)


def engine_command(args: Args, *, index: int, host: str, port_file: Path) -> list[str]:
    """Return the command line of one embedded engine of this run."""
    command = [sys.executable, "-m", "slime.engine.server"]
    command += ["--model-path", args.hf_checkpoint, "--host", host, "--port", "0"]
    command += ["--port-file", str(port_file)]
    for option in _SERVER_OPTIONS:
        value = getattr(args, f"sglang_{option}")
        flag = option_of(option)
        if value is True:
            command.append(flag)
        elif value is not None and value is not False:
            command += [flag, str(value)]
    if "--dtype" not in command:
        command += ["--dtype", {"fp32": "float32", "bf16": "bfloat16"}[args.precision]]
    # With one seed for all, two engines would give two samples of a group the same tokens.
    given = args.sglang_random_seed
    seed = (args.rollout_seed if given is None else given) + index
    return [*command, "--random-seed", str(seed)]
