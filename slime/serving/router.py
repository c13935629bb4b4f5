"""sglang-router in front of several engines: it chooses the engine of each request by cached prefix.

It gets only /generate; abort, pause and weight updates go to every engine directly. Its clients need the
run's key, which it sends to the engines too.
"""

from __future__ import annotations

import json
import subprocess
import time
from functools import cache
from pathlib import Path

from slime.config.arguments import Args
from slime.config.flags.registry import all_flags
from slime.config.flags.spec import option_of
from slime.config.installed import find_sglang
from slime.core.errors import UserError
from slime.serving.server_process import ServerProcess
from slime.utils.addresses import find_port, says_port_taken
from slime.utils.concurrency import wait_until
from slime.utils.engine_keys import remember_key
from slime.utils.sync_http import HttpError, delete_json, get_json, post_json

_START_TIMEOUT_S = 60.0
_WORKER_TIMEOUT_S = 120.0
_PORT_TRIES = 3
_POLL_S = 0.2
# The router takes its key only as an option, and every user can read a command line: the option is added
# inside the process, from its environment.
_LAUNCH = (
    "import os, sys; from sglang_router.launch_router import main; "
    "sys.argv += ['--api-key', os.environ['SLIME_ENGINE_TOKEN']]; main()"
)


@cache
def router_python(python: str) -> str | None:
    """Return the interpreter if it has sglang-router."""
    ask = "import importlib.util as u; raise SystemExit(u.find_spec('sglang_router') is None)"
    return python if subprocess.run([python, "-c", ask]).returncode == 0 else None


def router_argv(args: Args, *, python: str, host: str, port: int, metrics_port: int) -> list[str]:
    values = {
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
    return argv + [part for name, value in values.items() for part in _spell(name, value)]


def _spell(name: str, value: object) -> list[str]:
    option = option_of(name)
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, list):
        return [option, *map(str, value)] if value else []
    return [option, json.dumps(value) if isinstance(value, dict) else str(value)]


class Router:
    def __init__(self, args: Args, *, python: str, host: str, token: str):
        self.args, self._python, self._host, self._token = args, python, host, token
        self._process: ServerProcess | None = None
        self.log_path = Path(args.run_dir) / "logs" / "router.log"
        self.url = ""

    def start(self) -> None:
        for _ in range(_PORT_TRIES):
            port, metrics_port = find_port(self._host), find_port(self._host)
            argv = router_argv(
                self.args,
                python=self._python,
                host=self._host,
                port=port,
                metrics_port=metrics_port,
            )
            self._process = ServerProcess(argv, self.log_path, {"SLIME_ENGINE_TOKEN": self._token})
            self.url = f"http://{self._host}:{port}"
            remember_key([self.url], self._token)
            if self._comes_up():
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

    def set_workers(self, urls: list[str]) -> None:
        """Route to exactly these from now on; return once the router has found them healthy."""
        known = self._workers()
        for url in known.keys() - set(urls):
            delete_json(f"{self.url}/workers/{known[url]['id']}", timeout=_START_TIMEOUT_S)
        for url in set(urls) - known.keys():
            body = {"url": url, "api_key": self._token}
            post_json(f"{self.url}/workers", body, timeout=_START_TIMEOUT_S)
        if not wait_until(lambda: self._routes_to(urls), _WORKER_TIMEOUT_S, every_s=_POLL_S):
            raise UserError(
                f"sglang-router does not accept the engines {', '.join(urls)}; its log is "
                f"{self.log_path}"
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(
                timeout_s=1.0
            )  # it would wait for requests that are not needed any more

    def _routes_to(self, urls: list[str]) -> bool:
        found = self._workers()
        return found.keys() == set(urls) and all(worker["is_healthy"] for worker in found.values())

    def _workers(self) -> dict[str, dict]:
        reply = get_json(f"{self.url}/workers", timeout=_START_TIMEOUT_S)
        return {worker["url"]: worker for worker in reply["workers"]}

    def _comes_up(self) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self.alive():
            try:
                get_json(f"{self.url}/workers", timeout=5, retries=0)
                return True
            except HttpError:
                time.sleep(_POLL_S)
        return False


def make_router(args: Args, num_engines: int, host: str, token: str) -> Router | None:
    """Return a router for several SGLang engines if sglang-router is installed; else the pool spreads requests."""
    if args.rollout_engine != "sglang" or num_engines < 2:
        return None
    install = find_sglang()
    python = router_python(install.python) if install else None
    if python is not None:
        return Router(args, python=python, host=host, token=token)
    for name in args.to_dict(redact=False):
        if name in all_flags() and all_flags()[name].family == "router":
            raise UserError(
                f"{all_flags()[name].option} needs the package sglang-router: install it, or remove the "
                "flag"
            )
    return None
