"""sglang-router in front of several engines: it chooses the engine of each request by cached prefix.

It receives only /generate; abort, pause and weight updates go directly to every engine. Its clients need the
run's key, which it also sends to the engines.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from slime.config.arguments import Args
from slime.config.engine_groups import EngineSpec, default_model
from slime.config.flags.registry import all_flags
from slime.config.flags.spec import option_of
from slime.config.installed import find_sglang, has_package
from slime.core.errors import UserError
from slime.core.types import EngineInfo
from slime.serving.servers import ServerProcess
from slime.utils.addresses import find_port, says_port_taken
from slime.utils.concurrency import wait_until
from slime.utils.engine_keys import remember_key
from slime.utils.sync_http import HttpError, delete_json, get_json, post_json

_START_TIMEOUT_S = 60.0
_WORKER_TIMEOUT_S = 120.0
_PORT_ATTEMPTS = 3
_POLL_S = 0.2
# The router takes its key only as an option, and all users can read command lines, so the option is added
# inside the process, from its environment.
_LAUNCH = (
    "import os, sys; from sglang_router.launch_router import main; "
    "sys.argv += ['--api-key', os.environ['SLIME_ENGINE_TOKEN']]; main()"
)


def router_argv(
    args: Args, *, python: str, host: str, port: int, metrics_port: int, split: bool = False
) -> list[str]:
    values = {
        "pd_disaggregation": split,
        "prometheus_host": host,
        "prometheus_port": metrics_port,
        "worker_startup_check_interval": 1,
        "log_level": "warn",  # it would write several lines per request
        **{
            name.removeprefix("router_"): value
            for name, value in args.to_dict(redact=False).items()
            if name in all_flags() and all_flags()[name].family == "router" and value is not None
        },
        "host": host,
        "port": port,
    }
    argv = [python, "-c", _LAUNCH]
    return argv + [part for name, value in values.items() for part in _option_argv(name, value)]


def _option_argv(name: str, value: object) -> list[str]:
    option = option_of(name)
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, list):
        return [option, *map(str, value)] if value else []
    return [option, json.dumps(value) if isinstance(value, dict) else str(value)]


class RouterClient:
    """Manages the workers of a running router at `url`."""

    def __init__(self, token: str, url: str = "", log: str = "") -> None:
        self.url, self._token, self._log = url, token, log
        self._added: set[str] = set()  # addresses of workers of this run

    def answers(self) -> bool:
        with suppress(HttpError):
            get_json(f"{self.url}/workers", timeout=5, retries=0)
            return True
        return False

    def set_workers(self, engines: list[EngineInfo]) -> None:
        """Route to exactly these engines of this run; return once the router has found them healthy.

        Workers that this run did not add stay.
        """
        known, wanted = self._workers(), {info.url: info for info in engines}
        for url in (self._added & known.keys()) - wanted.keys():
            delete_json(f"{self.url}/workers/{known[url]['id']}", timeout=_START_TIMEOUT_S)
        for url in wanted.keys() - known.keys():
            body = _worker(wanted[url], self._token)
            post_json(f"{self.url}/workers", body, timeout=_START_TIMEOUT_S)
        removed, self._added = self._added - wanted.keys(), set(wanted)
        ready = wait_until(
            lambda: self._routes_to(wanted.keys(), removed), _WORKER_TIMEOUT_S, every_s=_POLL_S
        )
        if not ready:
            raise UserError(
                f"sglang-router at {self.url} does not accept the engines {', '.join(wanted)}"
                + (f"; its log is {self._log}" if self._log else "")
            )

    def _routes_to(self, urls: Collection[str], removed: Collection[str]) -> bool:
        found = self._workers()
        gone = not any(url in found for url in removed)
        return gone and all(url in found and found[url]["is_healthy"] for url in urls)

    def _workers(self) -> dict[str, dict]:
        reply = get_json(f"{self.url}/workers", timeout=_START_TIMEOUT_S)
        return {worker["url"]: worker for worker in reply["workers"]}


class Router(RouterClient):
    """A router process of this run. `split`: pair prefill with decode engines; `port` 0: any free port."""

    def __init__(
        self,
        args: Args,
        *,
        python: str,
        host: str,
        token: str,
        name: str = "router",
        port: int = 0,
        split: bool = False,
    ):
        self.log_path = Path(args.run_dir) / "logs" / f"{name}.log"
        super().__init__(token, log=str(self.log_path))
        self.args, self._python, self._host = args, python, host
        self._port, self._split = port, split
        self._process: ServerProcess | None = None

    def start(self) -> None:
        for _ in range(_PORT_ATTEMPTS):
            port, metrics_port = self._port or find_port(self._host), find_port(self._host)
            argv = router_argv(
                self.args,
                python=self._python,
                host=self._host,
                port=port,
                metrics_port=metrics_port,
                split=self._split,
            )
            self._process = ServerProcess(argv, self.log_path, {"SLIME_ENGINE_TOKEN": self._token})
            self.url = f"http://{self._host}:{port}"
            remember_key([self.url], self._token)
            if self._wait_until_up():
                return
            lines = self._process.last_lines()
            self._process.stop()
            if not says_port_taken(lines):
                break
        raise UserError(f"sglang-router did not start; {self.log_path} ends with\n{lines}")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        return self._process is not None and self._process.status() is None

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(timeout_s=1.0)  # do not wait for its open requests

    def _wait_until_up(self) -> bool:
        """Return whether the router answers in time; False as soon as its process has ended."""
        known = wait_until(
            lambda: not self.alive() or self.answers(), _START_TIMEOUT_S, every_s=_POLL_S
        )
        return known and self.alive()


class ExternalRouter(RouterClient):
    """The router of --sglang-router-ip, run by the user; this run adds and removes its own engines."""

    def __init__(self, args: Args, *, token: str):
        super().__init__(token, external_router_url(args) or "")
        remember_key([self.url], token)

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until the router answers."""
        if not wait_until(self.answers, timeout_s, every_s=_POLL_S):
            raise UserError(
                f"--sglang-router-ip, --sglang-router-port: no sglang-router answers at {self.url}: start it, "
                "or remove both flags and slime starts its own; if it has an API key, set SLIME_ENGINE_TOKEN to it"
            )

    def alive(self) -> bool:
        return self.answers()

    def stop(self) -> None:
        """Remove the engines of this run from the router."""
        with suppress(HttpError, UserError):
            self.set_workers([])


def external_router_url(args: Args) -> str | None:
    """Return the address of --sglang-router-ip and --sglang-router-port."""
    ip = args.sglang_router_ip
    return f"http://{ip}:{args.sglang_router_port}" if ip else None


def make_router(
    args: Args, engines: list[EngineSpec], host: str, token: str
) -> Router | ExternalRouter | None:
    """Return the router of one model's engines; None if the pool distributes requests itself.

    It does so for a single engine, and if sglang-router is not installed.
    """
    if external_router_url(args) is not None:
        return ExternalRouter(args, token=token)
    split = any(spec.worker_type != "regular" for spec in engines)
    if args.rollout_engine != "sglang" or len(engines) < 2:
        return None
    install = find_sglang()
    if install is not None and has_package(install.python, "sglang_router"):
        model = engines[0].model
        default = model == default_model(args).name
        return Router(
            args,
            python=install.python,
            host=host,
            token=token,
            name="router" if default else f"router_{model}",
            port=(default and args.sglang_router_port) or 0,
            split=split,
        )
    if split:
        raise UserError("prefill and decode engines need a router: pip install sglang-router")
    for name, value in args.to_dict(redact=False).items():
        if name not in all_flags() or value is None:
            continue
        if all_flags()[name].family == "router" or name == "sglang_router_port":
            raise UserError(
                f"{all_flags()[name].option} needs the package sglang-router: install it, or remove the "
                "flag"
            )
    return None


def _worker(engine: EngineInfo, token: str) -> dict[str, object]:
    body: dict[str, object] = {"url": engine.url, "api_key": token}
    if engine.role != "regular":
        body["worker_type"] = engine.role
    if engine.bootstrap_port is not None:
        body["bootstrap_port"] = engine.bootstrap_port
    return body
