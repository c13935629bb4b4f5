"""Secrets stay out of everything that is printed or written."""

from __future__ import annotations

import re
from typing import Any

from slime.utils.env import looks_secret
from slime.utils.flags.registry import all_flags, own_flags

REDACTED = "***"
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redact(name: str, value: Any) -> Any:
    """The value as it may be shown: secret flags, secrets inside dictionaries, users in addresses."""
    flag = own_flags().get(name) or all_flags().get(name)
    if flag is not None and flag.secret and value is not None:
        return REDACTED
    return _redact_inside(value)


def _redact_inside(value: Any) -> Any:
    if isinstance(value, str):
        return _USER_IN_URL.sub(REDACTED, value)
    if isinstance(value, list):
        return [_redact_inside(item) for item in value]
    if isinstance(value, dict):
        return {
            key: REDACTED if looks_secret(str(key)) else _redact_inside(item)
            for key, item in value.items()
        }
    return value
