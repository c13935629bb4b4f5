"""Secrets stay out of everything that is printed or written."""

from __future__ import annotations

import re
from typing import Any

from slime.config.env import looks_secret
from slime.config.flags.registry import all_flags, own_flags
from slime.utils.printable import HIDDEN as REDACTED
from slime.utils.printable import hide_in_address, hide_secrets

_ADDRESS_FLAG = re.compile(r"(url|host|addr|endpoint)s?$")


def redact(name: str, value: Any) -> Any:
    """The value as it may be shown, without secret flags and secrets inside dictionaries and addresses."""
    flag = own_flags().get(name) or all_flags().get(name)
    if flag is not None and flag.secret and value is not None:
        return REDACTED
    if _ADDRESS_FLAG.search(name) and isinstance(value, str) and "://" not in value:
        return hide_in_address(value)
    return _redact_inside(value)


def _redact_inside(value: Any) -> Any:
    if isinstance(value, str):
        return hide_secrets(value)
    if isinstance(value, list):
        return [_redact_inside(item) for item in value]
    if isinstance(value, dict):
        return {
            key: REDACTED if looks_secret(str(key)) else _redact_inside(item)
            for key, item in value.items()
        }
    return value
