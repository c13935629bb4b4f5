"""Debian's chromium, driven by playwright, on the page of `slime watch`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def require_browser() -> None:
    """Skip the test, with what to install, where there is no browser."""
    pytest.importorskip("playwright", reason="playwright is missing: pip install -e .[dev]")
    if CHROMIUM is None:
        pytest.skip("chromium is missing: apt-get install chromium")


@contextmanager
def browser(folder: Path) -> Iterator[object]:
    """A browser with a profile of its own; it must end before the folder is removed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder / "profile",
            executable_path=CHROMIUM,
            headless=True,
            args=_FLAGS,
            viewport={"width": 1400, "height": 900},
        )
        yield context
        context.close()


class Watcher:
    """One tab on the page at `url`; `check` fails on script errors and on requests to anybody else."""

    def __init__(self, context, url: str) -> None:
        self.url, self.origin = url, "{0.scheme}://{0.netloc}".format(urlsplit(url))
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.largest = 0
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note)
        self.page.on(
            "dialog", lambda dialog: (self.errors.append(dialog.message), dialog.dismiss())
        )
        self.page.on("request", self._note_request)
        self.page.on("response", self._note_size)

    def open(self, tab: str = "overview", **query: object) -> None:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}#{urlencode({'tab': tab, **query})}")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def check(self) -> None:
        assert self.errors == [] and self.foreign == []

    def close(self) -> None:
        self.page.close()

    def _note(self, message) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _note_request(self, request) -> None:
        if not request.url.startswith((self.origin, "data:", "about:", "blob:")):
            self.foreign.append(request.url)

    def _note_size(self, response) -> None:
        self.largest = max(self.largest, int(response.headers.get("content-length", 0)))


@dataclass(frozen=True, kw_only=True)
class Served:
    url: str  # with the key, as it was printed
    pid: int


@contextmanager
def served(*folders: Path) -> Iterator[Served]:
    """Run `slime watch` on these folders; it must end with status 0."""
    command = [sys.executable, "-m", "slime.cli", "watch", *map(str, folders)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield Served(url=found[0], pid=process.pid)
    finally:
        process.terminate()
        assert process.wait(30) == 0
