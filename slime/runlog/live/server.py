"""The web server of `slime watch`: the page's files and the JSON it draws from.

Every route is below /KEY/; any other path answers 404. The server listens on loopback, refuses other names
in Host and other sites in Origin, and writes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from slime.runlog.live.run_view import RunView, as_text, is_run
from slime.runlog.live.sample_detail import sample_detail
from slime.runlog.live.sample_query import QueryError, groups_page, prompts_page, samples_page
from slime.utils.http_guard import GuardedServer, Handler, HttpLimits, Refused, check_browser

_PAGE = Path(__file__).parent / "page"
_CHARTS = Path(__file__).parents[1] / "report" / "templates"
_FILES = {
    "": (_PAGE / "watch.html", "text/html"),
    "watch.css": (_PAGE / "watch.css", "text/css"),
    "uPlot.js": (_CHARTS / "uPlot.iife.min.js", "text/javascript"),
    "uPlot.css": (_CHARTS / "uPlot.min.css", "text/css"),
} | {path.name: (path, "text/javascript") for path in sorted(_PAGE.glob("*.js"))}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_LIMITS = HttpLimits(max_connections=64, max_body=1024, max_bodies=65536)
_FRESH_S = 0.5  # maximum age of cached metrics and events
_RESCAN_S = 5.0
_MAX_RUNS = 200
_logger = logging.getLogger("slime.http_server")  # one traceback of a kind per 10 s
Query = Mapping[str, str]


class Runs:
    """The runs of the given folders: each is a run, or has runs up to two levels below."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._views: dict[Path, RunView] = {}
        self._scanned = self._updated = -_RESCAN_S

    def views(self) -> list[RunView]:
        now = time.monotonic()
        if now - self._scanned > _RESCAN_S:
            self._scan()
            self._scanned = now
        if now - self._updated > _FRESH_S:
            for view in self._views.values():
                with suppress(QueryError), _readable():
                    view.update()
            self._updated = now
        return list(self._views.values())

    def view(self, query: Query) -> RunView:
        views = {view.name: view for view in self.views()}
        if query.get("run") not in views:
            raise QueryError("there is no such run")
        return views[query["run"]]

    def _scan(self) -> None:
        for folder in self._folders:
            for run_dir in [folder] if is_run(folder) else _runs_below(folder):
                if run_dir not in self._views and len(self._views) < _MAX_RUNS:
                    inside = run_dir != folder
                    name = as_text(run_dir.relative_to(folder) if inside else run_dir.name)
                    taken = {view.name for view in self._views.values()}
                    name = as_text(run_dir) if name in taken else name
                    self._views[run_dir] = RunView(run_dir, name)


def _runs_below(folder: Path) -> list[Path]:
    found = [p.parent for pattern in ("*", "*/*") for p in folder.glob(f"{pattern}/metrics.jsonl")]
    return sorted({p for p in found if not p.name.startswith("attempt_")})


def has_runs(folder: Path) -> bool:
    return is_run(folder) or bool(_runs_below(folder))


@contextmanager
def _readable() -> Iterator[None]:
    """Convert any error of reading a run's files, which may be hostile, into a QueryError."""
    try:
        yield
    except QueryError:
        raise
    except Exception as error:
        _logger.exception("the files of a run cannot be read")
        raise QueryError(f"its files cannot be read: {type(error).__name__}") from None


# ---- answers


def list_runs(runs: Runs, query: Query) -> Any:
    found = []
    for view in runs.views():
        with suppress(QueryError), _readable():
            found.append(view.brief())
    return found


def overview(runs: Runs, query: Query) -> Any:
    return runs.view(query).overview()


def series(runs: Runs, query: Query) -> Any:
    """Return the drawn points of several metrics: `names` separated by commas."""
    view = runs.view(query)
    window = _window(query)
    by_time = query.get("x") == "time"
    wanted = query.get("names", "").split(",")[:100]
    return {name: view.metrics.drawn(name, by_time=by_time, window=window) for name in wanted}


def timeline(runs: Runs, query: Query) -> Any:
    """Return the lanes of all processes in a window of Unix time; by default of the last twelve steps."""
    view = runs.view(query)
    view.timeline.update()
    ends = view.timeline.ends
    if ends is None:
        return {"lanes": {}, "ends": None, "events": [], "engines": {}, "memory": {}}
    step = view.metrics.last("perf/step_time") or 10.0
    start, end = _window(query) or (max(ends[0], ends[1] - 12 * step), ends[1])
    events = [e for e in view.events.records if start <= e["time"] <= end]
    return {
        "ends": ends,
        "window": [start, end],
        "lanes": view.timeline.between(start, end),
        "events": events[:500],
        "engines": {url: _recent(held, start, end) for url, held in view.events.engines.items()},
        "memory": {name: _memory(rows) for name, rows in view.timeline.memory.items()},
    }


def _recent(held: list[tuple[float, int]], start: float, end: float) -> list[tuple[float, int]]:
    """Return the versions an engine held in the window, including the one at its start."""
    before = [entry for entry in held if entry[0] < start][-1:]
    return before + [entry for entry in held if start <= entry[0] <= end][:2000]


def _memory(rows: list[tuple[float, dict[str, int]]]) -> dict[str, list[Any]]:
    stride = max(1, len(rows) // 300)
    kept = rows[::stride]
    names = sorted({name for _, memory in kept for name in memory})
    columns = {name: [memory.get(name) for _, memory in kept] for name in names}
    return {"time": [when for when, _ in kept], **columns}


def samples(runs: Runs, query: Query) -> Any:
    return samples_page(_with_samples(runs, query).samples, query)


def groups(runs: Runs, query: Query) -> Any:
    return groups_page(_with_samples(runs, query).samples, query)


def prompts(runs: Runs, query: Query) -> Any:
    return prompts_page(_with_samples(runs, query).samples, query)


def sample(runs: Runs, query: Query) -> Any:
    view = _with_samples(runs, query)
    try:
        place = int(query["rollout_id"]), int(query["index"])
    except (KeyError, ValueError):
        raise QueryError("give rollout_id and index of a sample") from None
    found = sample_detail(view, query.get("dataset", "train"), *place)
    if found is None:
        raise QueryError("there is no such sample; the run may have resumed before it")
    return found


def _with_samples(runs: Runs, query: Query) -> RunView:
    view = runs.view(query)
    view.samples.update()
    return view


def configs(runs: Runs, query: Query) -> Any:
    """Return the configuration of several runs: `names` as a JSON list."""
    views = {view.name: view for view in runs.views()}
    try:
        wanted = orjson.loads(query.get("names", "[]"))
    except orjson.JSONDecodeError:
        raise QueryError("names is a JSON list") from None
    return {
        name: views[name].config() for name in wanted if isinstance(name, str) and name in views
    }


Answer = Callable[[Runs, Query], Any]
ANSWERS: dict[str, Answer] = {
    "runs": list_runs,
    "overview": overview,
    "series": series,
    "timeline": timeline,
    "samples": samples,
    "groups": groups,
    "prompts": prompts,
    "sample": sample,
    "configs": configs,
}


def _window(query: Query) -> tuple[float, float] | None:
    try:
        return (float(query["from"]), float(query["to"])) if query.get("from") else None
    except (KeyError, ValueError):
        raise QueryError("from and to are numbers") from None


# ---- HTTP


class WatchServer:
    def __init__(self, folders: list[Path], key: str) -> None:
        self._runs, self._key = Runs(folders), key.encode()
        # One thread: stores are not shared, and a long read does not stop the event loop.
        self._worker = ThreadPoolExecutor(1)
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/{key}/api/{name}", self._answer)
        app.router.add_get("/{key}/{file:[A-Za-z.]*}", self._file)
        self._server = GuardedServer(app, _LIMITS, cancel_with_client=False)

    async def start(self, listener: socket.socket) -> None:
        await self._server.start(listener)

    async def close(self) -> None:
        await self._server.close()
        self._worker.shutdown(wait=False)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_browser(request, "127.0.0.1", own_pages=True)
            given = request.path.split("/")[1].encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._key):
                raise Refused(404, "open the address that slime watch printed, with its key")
            response = await handler(request)
        except Refused as error:
            response = web.Response(status=error.status, text=f"{error}\n")
        except web.HTTPException as error:  # no route
            response = web.Response(status=error.status, text=f"{error.reason}\n")
        response.headers.update(_HEADERS)
        return response

    async def _file(self, request: web.Request) -> web.Response:
        found = _FILES.get(request.match_info["file"])
        if found is None:
            raise Refused(404, "there is no such file")
        return web.Response(body=found[0].read_bytes(), content_type=found[1], charset="utf-8")

    async def _answer(self, request: web.Request) -> web.Response:
        answer = ANSWERS.get(request.match_info["name"])
        if answer is None:
            raise Refused(404, "there is no such answer")
        query = dict(request.query)
        loop = asyncio.get_running_loop()
        try:
            body = await loop.run_in_executor(self._worker, encoded, answer, self._runs, query)
        except QueryError as error:
            raise Refused(400, str(error)) from None
        return web.Response(body=body, content_type="application/json")


def encoded(answer: Answer, runs: Runs, query: Query) -> bytes:
    """Return an answer as JSON; raise QueryError if there is none."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    with _readable():
        return orjson.dumps(answer(runs, query), _as_list, options)


def _as_list(value: Any) -> Any:
    """Convert what orjson does not support: arrays that are not contiguous."""
    return value.tolist()
