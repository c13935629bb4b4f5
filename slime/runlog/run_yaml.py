"""config.yaml and config_resolved.yaml of run folders: written without aliases, read as untrusted files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime.core.errors import UserError
from slime.utils.untrusted_files import read_regular

_MAX_BYTES = 4 << 20
_MAX_DEPTH = 32
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_OPENS = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSES = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


class _Loader(_BASE):
    """Reads dates as text: JSON has no dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in _BASE.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_run_yaml(values: dict[str, Any]) -> str:
    """Return the text of a mapping, sorted and without aliases."""
    return yaml.dump(values, Dumper=_Dumper)


def read_run_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the file; raise UserError if there is none."""
    return parse_run_yaml(read_text(path), path)


def read_resolved(path: Path) -> dict[str, dict[str, Any]]:
    """Return {"lr": {"value": 1e-6, "origin": "command line"}, ...} of config_resolved.yaml."""
    found = read_run_yaml(path)
    return {name: e for name, e in found.items() if isinstance(e, dict) and "value" in e}


def read_text(path: Path) -> str:
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read: {reason}") from None


def parse_run_yaml(text: str, path: Path) -> dict[str, Any]:
    try:
        _check(text)
        found = yaml.load(text, Loader=_Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{path} cannot be read: it has no names with values")
    return found


def _check(text: str) -> None:
    """Refuse aliases, tags and deep nesting: the C loader recurses without a limit, and aliases multiply."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, _OPENS) - isinstance(event, _CLOSES)
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested over {_MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise ValueError("it has aliases or tags")
