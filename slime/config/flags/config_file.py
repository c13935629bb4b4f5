"""--config: a YAML file with the names of the flags, dashes or underscores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime.config.flags.registry import all_flags, options
from slime.config.flags.spec import Flag, option_of
from slime.config.flags.values import convert, nearest
from slime.core.errors import ConfigError

_NOT_IN_A_FILE = ("config",)


def read_config(path: str) -> dict[str, Any]:
    """The values of the file by attribute; a mistake names the file and the key."""
    values: dict[str, Any] = {}
    for key, raw in load_mapping(path, "--config").items():
        flag, negated = _find(str(key), path)
        if flag.name in values:
            raise ConfigError(f"{path}: {flag.option} is given twice, once as {key}: remove one")
        if raw is None:  # "load:" with nothing behind it is a flag that is not given
            continue
        value = convert(flag, raw, f"{path}: {key}")
        values[flag.name] = not value if negated else value
    return values


def load_mapping(path: str, option: str) -> dict[Any, Any]:
    """The keys and values of a YAML file; a key that stands there twice is refused."""
    if not Path(path).is_file():
        raise ConfigError(f"{option}: {path} does not exist")
    try:
        content = yaml.load(Path(path).read_text(), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option}: {path} is not YAML: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{option}: {path} must hold 'name: value' lines")
    return content


def _find(key: str, path: str) -> tuple[Flag, bool]:
    """The flag of a key, and whether the key is an option that turns it off."""
    name = key.removeprefix("--").replace("-", "_")
    option = option_of(name)
    flag = all_flags().get(name) or options().get(option)
    if flag is None:
        near = nearest(option, options())
        hint = f"; did you mean {near.removeprefix('--')}?" if near else ""
        raise ConfigError(f"{path}: there is no flag {key}{hint}")
    if flag.name in _NOT_IN_A_FILE:
        raise ConfigError(f"{path}: {key} belongs on the command line")
    return flag, name != flag.name and option in flag.off_options


class _Loader(yaml.SafeLoader):
    """Safe, and without YAML's silent last-one-wins for a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key} stands there twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + (getattr(error, "problem", None) or str(error))
