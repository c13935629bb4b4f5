"""One inference engine: an actor per node that runs the server process, and the driver's handle on all of them.

The embedded engine's server binds port 0 and writes its port to a file. SGLang gets ports that the actor of
the engine's first node found free (`slime.utils.addresses`).
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import GetTimeoutError

from slime.backends.sglang_utils.command import Node, cpu_env, nodes_of_engine, server_command
from slime.config.arguments import Args
from slime.config.env import read_env
from slime.config.flags.engine_options import HONOURED
from slime.config.flags.spec import option_of
from slime.config.installed import find_sglang
from slime.core.errors import UserError
from slime.core.types import EngineInfo
from slime.ray.remote import ACTOR_DIED, Remote, engine_actor
from slime.ray.watch import Member
from slime.runlog.jsonl import replace_file
from slime.serving.servers import (
    START_TIMEOUT_S,
    ServerProcess,
    StartError,
    wait_for_port,
    wait_until_ready,
)
from slime.utils.addresses import Ports, choose_interface, find_ports, own_host, says_port_taken
from slime.utils.device import device_id, device_type
from slime.utils.untrusted_files import write_private

_SEARCHED_LINES = 300
_PORT_TRIES = 3
_NODE_POLL_S = 5.0
_LOG_TIMEOUT_S = 10.0
_PLACE_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_MISSED_PINGS = 4  # in a row, each with the timeout --rollout-health-check-timeout
_GONE = (*ACTOR_DIED, GetTimeoutError)
R = TypeVar("R")
# The number of GPUs is set by slime: --sglang-tp-size is --rollout-num-gpus-per-engine.
_SERVER_OPTIONS = sorted(HONOURED - {"tp_size", "random_seed"})


class PortTakenError(UserError):
    """Another process took a port between its choice and its use: retry with other ports."""


class EngineActor:
    """Starts, watches and stops the server process of one node; called from several threads."""

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
        for earlier in port_file.parent.glob(f"{port_file.name}*"):  # half-written ones too
            earlier.unlink()
        command = engine_command(
            self.args, index=self.index, host=self.node.host, port_file=port_file
        )
        self.process = ServerProcess(command, self.log_path)
        try:
            port = wait_for_port(self.process, port_file, START_TIMEOUT_S)
        except StartError as error:
            self._fail(error)
        return EngineInfo(url=f"http://{self.node.host}:{port}", device_ids=(device_id(),))

    def start_sglang(
        self, ports: Ports, rendezvous_host: str, devices: list[str], gpus: list[str]
    ) -> EngineInfo | None:
        """Start SGLang on `gpus` of this node; the first node of an engine returns its EngineInfo.

        `devices` are the ids of all GPUs of the engine.
        """
        install = find_sglang()
        assert install is not None, "parse_args checks for it"
        label = self.args.sglang_weight_version or f"start-{secrets.token_hex(8)}"
        config = self._write_config(label)
        command = server_command(
            self.args,
            index=self.index,
            node=self.node,
            ports=ports,
            rendezvous_host=rendezvous_host,
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
            replace_file(self._file.with_suffix(".port"), json.dumps(facts).encode())
            mode = self.args.sglang_disaggregation_mode
            role = mode if mode in ("prefill", "decode") else "regular"
            return EngineInfo(
                url=url,
                device_ids=tuple(devices),
                kind="sglang",
                role=role,
                bootstrap_port=ports.bootstrap if role == "prefill" else None,
            )
        return None

    def remove_config(self) -> None:
        """Delete the file with the key; all servers of the engine have read it once the engine answers."""
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
            self._fail(error)

    def _fail(self, reason: StartError) -> NoReturn:
        """Stop the server and raise why it did not start."""
        assert self.process is not None
        self.stop()
        lines = self.process.last_lines()
        # SGLang logs the port error in the middle of many other lines.
        logged = self.process.last_lines(_SEARCHED_LINES)
        kind = PortTakenError if says_port_taken(f"{logged}\n{reason}") else UserError
        raise kind(f"engine {self.index} {reason}; {self.log_path} ends with\n{lines}") from None

    def _write_config(self, label: str) -> str:
        """Write the run's key and the server's label to a file that only this user can read.

        Every user can read a command line, and whoever knows the label could take the server's port
        first and impersonate it.
        """
        self.remove_config()
        key = json.dumps(read_env().engine_token)  # unquoted, YAML reads 0123 as a number
        text = f"api-key: {key}\nadmin-api-key: {key}\nweight-version: {json.dumps(label)}\n"
        write_private(self._config, text.encode())
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
        elif isinstance(value, list):
            command += [flag, *map(str, value)]
        elif value is not None and value is not False:
            command += [flag, str(value)]
    if "--dtype" not in command:
        command += ["--dtype", {"fp32": "float32", "bf16": "bfloat16"}[args.precision]]
    # With one seed for all, two engines would sample the same tokens for two samples of a group.
    base = args.sglang_random_seed
    seed = (args.rollout_seed if base is None else base) + index
    return [*command, "--random-seed", str(seed)]


class EngineHandle:
    """The driver's handle on one engine: the actors of its nodes, started, called and stopped together.

    `options` are Ray's, one per GPU of the engine; the first GPU of each node runs its server.
    """

    def __init__(self, args: Args, index: int, options: list[dict[str, Any]]):
        self.args, self.index, self._options = args, index, options
        self._nodes = nodes_of_engine(len(options), args.num_gpus_per_node)
        self._actors: list[Remote[EngineActor]] = []
        self.create_actors()

    def create_actors(self) -> None:
        self._actors = [
            self._actor(self._options[gpus[0]], rank) for rank, gpus in enumerate(self._nodes)
        ]

    def start(self) -> EngineInfo:
        """Start the servers and return once the engine answers."""
        self._check_placed()
        if self.args.rollout_engine == "slime":
            return self._get(self._actors[0], lambda engine: engine.start())
        gpus, devices = self._gpus()
        for attempt in range(_PORT_TRIES):
            try:
                return self._start_sglang(gpus, devices)
            except PortTakenError:
                self._stop_servers()
                if attempt == _PORT_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def members(self) -> list[Member]:
        name = f"engine {self.index}"
        several = len(self._actors) > 1
        return [
            Member(label=f"{name} node {rank}" if several else name, remote=actor)
            for rank, actor in enumerate(self._actors)
        ]

    def _check_placed(self) -> None:
        """Raise UserError if an actor is not placed in time: after the loss of its node it never would be."""
        if any(actor.place(timeout=_PLACE_TIMEOUT_S) is None for actor in self._actors):
            raise UserError(
                f"no node had resources for engine {self.index} within {_PLACE_TIMEOUT_S:.0f} s: see "
                "`ray status`; reconnect a lost node with `ray start --address=...`"
            )

    def alive(self, timeout: float) -> bool:
        """Return whether the server processes of all nodes are alive."""
        try:
            return all(
                ray.get(
                    [a.call(lambda engine: engine.alive()) for a in self._actors], timeout=timeout
                )
            )
        except _GONE:
            return False

    def last_lines(self, count: int) -> str:
        """Return the last lines of the first node's log."""
        with suppress(*_GONE):
            return self._actors[0].get(
                lambda engine: engine.last_lines(count), timeout=_LOG_TIMEOUT_S
            )
        return ""

    def stop(self) -> Callable[[], None]:
        """Start stopping the servers, then the actors; call the returned function to wait for them."""
        # An actor that was never placed has no server and would not reply.
        placed = [actor for actor in self._actors if actor.place() is not None]
        stopping = [actor.call(lambda engine: engine.stop()) for actor in placed]

        def wait() -> None:
            for reference in stopping:
                with suppress(*_GONE):
                    ray.get(reference, timeout=_STOP_TIMEOUT_S)
            for actor in self._actors:
                actor.kill()
            self._actors = []

        return wait

    def _start_sglang(self, gpus: list[list[str]], devices: list[str]) -> EngineInfo:
        first = self._actors[0]
        ports = self._get(first, lambda engine: engine.find_ports())
        host, _ = self._get(first, lambda engine: engine.where())
        started = [
            actor.call(lambda engine, gpus=visible: engine.start_sglang(ports, host, devices, gpus))
            for actor, visible in zip(self._actors, gpus, strict=True)
        ]
        info = self._result(started[0], lambda: self._check_other_nodes(started))
        assert info is not None, "the first node serves the engine"
        for actor in self._actors:
            self._get(actor, lambda engine: engine.remove_config())
        return info

    def _get(self, actor: Remote[EngineActor], method: Callable[[EngineActor], R]) -> R:
        return self._result(actor.call(method))

    def _result(self, reference: ray.ObjectRef[R], check: Callable[[], None] = lambda: None) -> R:
        """Return the result of a call; call `check` while waiting.

        Raise UserError if an actor misses several pings in a row: its process is frozen or its node
        hangs, and the call would never return.
        """
        timeout, missed = self.args.rollout_health_check_timeout, 0
        while not ray.wait([reference], timeout=_NODE_POLL_S)[0]:
            check()
            pings = {actor.ping(): actor for actor in self._actors}
            overdue = ray.wait(list(pings), num_returns=len(pings), timeout=timeout)[1]
            missed = missed + 1 if overdue else 0
            if missed == _MISSED_PINGS:
                raise UserError(
                    f"engine {self.index} hangs: its actor ({pings[overdue[0]].place()}) has not answered "
                    f"for {missed * timeout:.0f} s while its server started. Is the process stopped, or "
                    "the machine out of memory?"
                )
        return ray.get(reference)

    def _check_other_nodes(self, started: list[ray.ObjectRef]) -> None:
        """Raise UserError for another node that exited: the first one would wait for it until its own timeout."""
        for rank, (actor, reference) in enumerate(zip(self._actors, started, strict=True)):
            if rank and ray.wait([reference], timeout=0)[0]:
                ray.get(reference)
                if not self._get(actor, lambda engine: engine.alive()):
                    lines = self._get(actor, lambda engine: engine.last_lines())
                    self._stop_servers()
                    raise UserError(f"node {rank} of engine {self.index} ended:\n{lines}")

    def _stop_servers(self) -> None:
        for stopping in [actor.call(lambda engine: engine.stop()) for actor in self._actors]:
            self._result(stopping)

    def _gpus(self) -> tuple[list[list[str]], list[str]]:
        """Return the visible GPUs of each node's server, and the ids of all devices of the engine."""
        first = {gpus[0]: actor for gpus, actor in zip(self._nodes, self._actors, strict=True)}
        extra = {
            number: self._actor(options, 0)
            for number, options in enumerate(self._options)
            if number not in first
        }
        actors = [{**first, **extra}[number] for number in range(len(self._options))]
        places = [self._get(actor, lambda engine: engine.where()) for actor in actors]
        devices = [self._get(actor, lambda engine: engine.device_id()) for actor in actors]
        for actor in extra.values():
            actor.kill()
        for gpus in self._nodes:
            hosts = {places[number][0] for number in gpus}
            if len(hosts) > 1:
                raise UserError(
                    f"engine {self.index} needs nodes of {len(gpus)} GPUs, but Ray placed these "
                    f"on {', '.join(sorted(hosts))}: set --num-gpus-per-node to what a node has"
                )
        return [[gpu for n in gpus for gpu in places[n][1]] for gpus in self._nodes], devices

    def _actor(self, options: dict[str, Any], rank: int) -> Remote[EngineActor]:
        options = {**options, "max_concurrency": 4}  # its log is read while the server starts
        return Remote(options, engine_actor, self.args, self.index, rank, len(self._nodes))
