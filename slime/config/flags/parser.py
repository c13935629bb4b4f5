"""The command line and the file of --config: one argparse parser, one YAML reader, one conversion."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Container
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from slime.config.flags.former_names import FORMER_NAMES, FORMER_VALUES
from slime.config.flags.registry import all_flags, options
from slime.config.flags.spec import Flag, Kind, did_you_mean, option_of
from slime.core.errors import ConfigError


def read_command_line(argv: list[str]) -> dict[str, Any]:
    """Return the values given on a command line, converted, without defaults."""
    known, unknown = _parser().parse_known_args(argv)
    for token in unknown:
        if token.startswith("-"):
            option = token.split("=")[0]
            raise ConfigError(f"there is no flag {option}{_instead(option)}")
    if unknown:
        raise ConfigError(
            f"unexpected value {unknown[0]!r}: a value follows its flag, as in --lr 1e-6"
        )
    flags = all_flags()
    return {
        name: convert(flags[name], raw, flags[name].option) for name, raw in vars(known).items()
    }


def read_config(path: str, own: Container[str] = ()) -> dict[str, Any]:
    """Return the values of a YAML file by attribute; errors name the file and the key.

    `own` are names of options that the user's script added.
    """
    values: dict[str, Any] = {}
    for key, raw in load_mapping(path, "--config").items():
        if key in own:
            values[key] = raw
            continue
        flag, negated = _find_key(str(key), path)
        if flag.name in values:
            raise ConfigError(f"{path}: {flag.option} is given twice, once as {key}: remove one")
        if raw is None:  # "load:" without a value is a flag that is not given
            continue
        value = convert(flag, raw, f"{path}: {key}")
        values[flag.name] = not value if negated else value
    return values


def read_custom_config(path: str) -> dict[str, Any]:
    """Return the keys of the YAML file of --custom-config-path, none of which may be a flag."""
    values = load_mapping(path, "--custom-config-path")
    for key in values:
        flag = options().get(option_of(str(key))) or all_flags().get(str(key))
        if flag is not None:
            raise ConfigError(
                f"--custom-config-path: {path}: {key} is the flag {flag.option}: give it on the command "
                "line or in the file of --config; this file is for names that are no flags"
            )
        if not str(key).isidentifier() or str(key).startswith("_"):
            raise ConfigError(
                f"--custom-config-path: {path}: {key!r} cannot be an attribute of args: "
                "use letters, digits and _"
            )
    return values


AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


def read_custom_arguments(
    add: AddArguments, argv: list[str], configured: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options that `add` declares, with defaults, and the remaining arguments.

    `configured`, their values in the file of --config, replaces their defaults.
    """
    parser = _Parser(prog=_program(), add_help=False, allow_abbrev=False)
    parser = add(parser) or parser
    for action in parser._actions:
        taken = [option for option in action.option_strings if option in options()]
        if taken or action.dest in all_flags():
            flag = options()[taken[0]] if taken else all_flags()[action.dest]
            raise ConfigError(
                f"add_custom_arguments: {(action.option_strings or [action.dest])[0]} is already the flag "
                f"{flag.option}: choose another name"
            )
    parser.set_defaults(**configured or {})
    known, rest = parser.parse_known_args(argv)
    return vars(known), rest


def load_mapping(path: str, option: str) -> dict[Any, Any]:
    """Return the keys and values of a YAML file; a repeated key raises ConfigError."""
    if not Path(path).is_file():
        raise ConfigError(f"{option}: {path} does not exist")
    try:
        content = yaml.load(Path(path).read_text(), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, 2026-13-01, [[[...
        raise ConfigError(f"{option}: {path} is not YAML: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{option}: {path} must hold 'name: value' lines")
    return content


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


@cache
def _parser(*, help_all: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all flags; without `help_all` its help lists slime's own only."""
    parser = _Parser(
        prog=_program(),
        usage="%(prog)s [--config FILE] [--flag value ...]",
        description="Train a language model by reinforcement learning.",
        epilog="Flags of Megatron, SGLang and its router keep the defaults of those packages"
        + ("." if help_all else "; --help-all shows them too."),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40, width=110),
    )
    text = "show the flags of Megatron, SGLang and its router too and exit"
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in all_flags().values():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag, shown=help_all or flag.family == "slime")
    return parser


class _HelpAll(argparse.Action):
    """Print the help of all flags, those of Megatron, SGLang and its router included, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        _parser(help_all=True).print_help()
        parser.exit()


def _program() -> str:
    script = Path(sys.argv[0]).name
    return script if script in ("train.py", "train_async.py") else "slime train"


def _add(group: argparse._ArgumentGroup, flag: Flag, *, shown: bool) -> None:
    text = _help(flag) if shown else argparse.SUPPRESS
    if flag.kind != "bool":
        choices = ",".join(map(str, flag.choices))
        metavar = f"{{{choices}}}" if choices else flag.name.upper()
        nargs = "+" if flag.many else None
        group.add_argument(*flag.options, dest=flag.name, metavar=metavar, nargs=nargs, help=text)
        return
    group.add_argument(*flag.options, dest=flag.name, action="store_true", help=text)
    if flag.off_options:
        text = f"turns {flag.option} off" if shown and flag.default else argparse.SUPPRESS
        group.add_argument(*flag.off_options, dest=flag.name, action="store_false", help=text)


def _help(flag: Flag) -> str:
    text = flag.help if flag.family == "slime" else flag.summary
    default = f"default: {flag.default}" if flag.default not in (None, False, [], {}) else ""
    notes = "; ".join(filter(None, (flag.rules, default)))
    text += f" ({notes})" if notes else ""
    return text.replace("%", "%%")


def _instead(option: str) -> str:
    """Return what to type instead of an unknown option, as the end of a sentence, or nothing."""
    if option in FORMER_NAMES:
        return f": {FORMER_NAMES[option]}"
    return did_you_mean(option, options())


def _find_key(key: str, path: str) -> tuple[Flag, bool]:
    """Return the flag of a key, and whether the key is the option that turns it off."""
    name = key.removeprefix("--").replace("-", "_")
    option = option_of(name)
    flag = all_flags().get(name) or options().get(option)
    if flag is None:
        raise ConfigError(f"{path}: there is no flag {key}{_instead(option)}")
    if flag.name == "config":
        raise ConfigError(f"{path}: {key} belongs on the command line")
    return flag, name != flag.name and option in flag.off_options


class _Loader(yaml.SafeLoader):
    """A safe loader that raises for a repeated key, of which YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key} is given twice", problem_mark=node.start_mark
                )
        return super().construct_mapping(node, deep)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + (getattr(error, "problem", None) or str(error))


_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def convert(flag: Flag, raw: Any, where: str) -> Any:
    """Convert `raw`, a string of the command line or a YAML value, to the type of `flag`.

    `where` is the location in messages: "--lr", or "run.yaml: lr".
    """
    if flag.many:
        items = raw if isinstance(raw, list) else [raw]
        return [_convert_one(flag, item, where) for item in items]
    return _convert_one(flag, raw, where)


def _convert_one(flag: Flag, raw: Any, where: str) -> Any:
    read, wanted = _KINDS[flag.kind]
    try:
        value = read(raw)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        hint = f": {error}" if flag.kind == "json" or isinstance(error, OverflowError) else ""
        raise ConfigError(f"{where}: {_shown(flag, raw)} is not {wanted}{hint}") from None
    value = flag.same_values.get(value, value) if flag.same_values else value
    if flag.choices and value not in flag.choices:
        choices = [str(choice) for choice in flag.choices]
        advice = FORMER_VALUES.get((flag.option, str(value)))
        hint = f": {advice}" if advice else did_you_mean(str(value), choices)
        raise ConfigError(f"{where}: {_shown(flag, raw)} is not one of {', '.join(choices)}{hint}")
    return value


def _shown(flag: Flag, raw: Any) -> str:
    return "the value" if flag.secret else repr(raw)


def _read_int(raw: Any) -> int:
    if isinstance(raw, bool) or (isinstance(raw, float) and raw != int(raw)):
        raise ValueError
    return int(raw)


def _read_float(raw: Any) -> float:
    if isinstance(raw, bool):
        raise ValueError
    value = float(raw)
    if math.isinf(value):
        raise OverflowError("it is infinite")
    if math.isnan(value):
        raise ValueError
    return value


def _read_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if str(raw).lower() not in ("true", "false"):
        raise ValueError
    return str(raw).lower() == "true"


def _read_str(raw: Any) -> str:
    if isinstance(raw, list | dict | bool) or raw is None:
        raise ValueError
    return str(raw)


def _read_json(raw: Any) -> Any:
    value = json.loads(raw) if isinstance(raw, str) else raw
    json.dumps(value, allow_nan=False, default=str)  # raises for infinity and NaN
    return value


def _read_size(raw: Any) -> int:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti|)", str(raw).strip())
    if not match:
        raise ValueError
    number = float(match[1]) * _SIZES[match[2]]
    if number != int(number):
        raise ValueError
    return int(number)


# kind -> its reader, and what messages call its values
_KINDS: dict[Kind, tuple[Callable[[Any], Any], str]] = {
    "int": (_read_int, "a whole number"),
    "float": (_read_float, "a number"),
    "bool": (_read_bool, "true or false"),
    "str": (_read_str, "text"),
    "json": (_read_json, "JSON"),
    "size": (_read_size, "a whole number, or one with k, M, G (1000s) or Ki, Mi, Gi (1024s)"),
}
