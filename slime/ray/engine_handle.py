"""The driver's handle on one engine: the actors of its nodes, started, called and stopped together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from slime.backends.sglang_utils.command import nodes_of_engine
from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.core.types import EngineInfo
from slime.ray.actors import engine_actor
from slime.ray.engine_actor import EngineActor, PortTakenError
from slime.ray.remote import Remote
from slime.ray.watch import Member

_PORT_TRIES = 3
_NODE_POLL_S = 5.0
_ASK_TIMEOUT_S = 10.0
_PLACE_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_GONE = (RayActorError, GetTimeoutError)


class EngineHandle:
    """`options` are Ray's, one per GPU of the engine; the first GPU of each node runs its server."""

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
            return self._actors[0].get(lambda engine: engine.start())
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
        """Raise UserError if an actor is not placed in time: one whose node is gone would be waited for forever."""
        if any(actor.place(timeout=_PLACE_TIMEOUT_S) is None for actor in self._actors):
            raise UserError(
                f"no node had room for engine {self.index} within {_PLACE_TIMEOUT_S:.0f} s: see "
                "`ray status`; a node that was lost comes back with `ray start --address=...`"
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
                lambda engine: engine.last_lines(count), timeout=_ASK_TIMEOUT_S
            )
        return ""

    def stop(self) -> Callable[[], None]:
        """Stop the servers, then the actors; call the returned function to wait for it."""
        # An actor that was never placed has no server and would not answer.
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
        ports = self._actors[0].get(lambda engine: engine.find_ports())
        host, _ = self._actors[0].get(lambda engine: engine.where())
        started = [
            actor.call(lambda engine, gpus=visible: engine.start_sglang(ports, host, devices, gpus))
            for actor, visible in zip(self._actors, gpus, strict=True)
        ]
        while not ray.wait(started[:1], timeout=_NODE_POLL_S)[0]:
            self._check_other_nodes(started)
        info = ray.get(started[0])
        assert info is not None, "the first node serves the engine"
        ray.get([actor.call(lambda engine: engine.remove_config()) for actor in self._actors])
        return info

    def _check_other_nodes(self, started: list[ray.ObjectRef]) -> None:
        """Raise UserError for another node that exited: the first one would wait for it until its own timeout."""
        for rank, (actor, reference) in enumerate(zip(self._actors, started, strict=True)):
            if rank and ray.wait([reference], timeout=0)[0]:
                ray.get(reference)
                if not actor.get(lambda engine: engine.alive()):
                    lines = actor.get(lambda engine: engine.last_lines())
                    self._stop_servers()
                    raise UserError(f"node {rank} of engine {self.index} ended:\n{lines}")

    def _stop_servers(self) -> None:
        ray.get([actor.call(lambda engine: engine.stop()) for actor in self._actors])

    def _gpus(self) -> tuple[list[list[str]], list[str]]:
        """Return by node the GPUs its server may see, and the ids of all devices of the engine."""
        first = {gpus[0]: actor for gpus, actor in zip(self._nodes, self._actors, strict=True)}
        extra = {
            number: self._actor(options, 0)
            for number, options in enumerate(self._options)
            if number not in first
        }
        everyone = {**first, **extra}
        places = [everyone[n].get(lambda engine: engine.where()) for n in range(len(self._options))]
        devices = [
            everyone[n].get(lambda engine: engine.device_id()) for n in range(len(self._options))
        ]
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
        options = {**options, "max_concurrency": 4}  # its log is read while it starts
        return Remote(options, engine_actor, self.args, self.index, rank, len(self._nodes))
