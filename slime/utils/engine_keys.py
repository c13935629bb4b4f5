"""API keys of the engines this process calls, by address: sent to these addresses and to no others.

Code that learns an engine's address registers its key here. `slime.utils.http` and `slime.utils.sync_http`
then send it, also for hooks that post to an engine themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

_keys: dict[tuple[str, str], str] = {}  # (scheme, host:port) -> key


def remember_key(urls: Iterable[str], key: str | None) -> None:
    """Send `key`, unless it is None, with every later request to these servers."""
    if key:
        _keys.update(dict.fromkeys(map(_address, urls), key))


def forget_keys(urls: Iterable[str]) -> None:
    for url in urls:
        _keys.pop(_address(url), None)


def key_headers(url: str) -> dict[str, str]:
    """Return the `Authorization` header for this URL; empty if no key is registered."""
    key = _keys.get(_address(url)) if _keys else None
    return {"Authorization": f"Bearer {key}"} if key else {}


def _address(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
