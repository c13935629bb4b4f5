"""config.yaml and config_resolved.yaml of run folders: written plainly, read as if somebody else had written them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime.core.errors import UserError
from slime.utils.untrusted_files import read_regular

_MOST_BYTES = 4 << 20
_DEEPEST = 32
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OPENS = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSES = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


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
        return read_regular(path, _MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} cannot be read: {reason}") from None


def parse_run_yaml(text: str, path: Path) -> dict[str, Any]:
    try:
        _check(text)
        found = yaml.load(text, Loader=_LOADER)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{path} cannot be read: it has no names with values")
    return found


def _check(text: str) -> None:
    """Refuse what a run never writes: the C loader recurses without a limit, and aliases multiply."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, _OPENS) - isinstance(event, _CLOSES)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested over {_DEEPEST} deep")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise ValueError("it has aliases or tags")
