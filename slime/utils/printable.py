"""Sanitize text from data, models and other processes for a terminal, a log or a report.

A terminal executes control characters: `ESC ] 0` sets its title, `ESC ] 52` the clipboard, `ESC [ 2 J`
clears it. URLs can contain a password or a key. Standard library only; time is linear in the text.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ADDRESS = re.compile(r"://[^\s\"'<>]+")


def safe_text(text: str) -> str:
    """Return the text without control characters and without secrets in URLs."""
    return printable(hide_secrets(text))


def printable(text: str) -> str:
    r"""Remove colours and write every other control character as \x1b; tabs and newlines stay."""
    return _COLOURS.sub("", text).replace("\r\n", "\n").translate(_CONTROL)


def hide_secrets(text: str) -> str:
    """Hide user, password and query values: http://u:p@host/x?key=S -> http://***@host/x?key=***"""
    return _ADDRESS.sub(lambda match: "://" + hide_in_address(match[0][3:]), text)


def hide_in_address(address: str) -> str:
    """Hide the same in a URL without its scheme: host/x?key=S -> host/x?key=***"""
    before, mark, query = address.partition("?")
    host, slash, path = before.partition("/")
    _, at, host = host.rpartition("@")
    hidden = "&".join(_hide_value(part) for part in query.split("&"))
    return (HIDDEN if at else "") + at + host + slash + path + mark + hidden


def _hide_value(part: str) -> str:
    name, equals, value = part.partition("=")
    if equals:
        return name + equals + (HIDDEN if value else "")
    return HIDDEN if part else ""


# C0 except tab and newline, DEL and C1; lone surrogates (of undecodable file names) cannot be encoded.
_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}
_CONTROL |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
