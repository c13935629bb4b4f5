"""The command line: one argparse parser, generated from the flags."""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from slime.config.flags.registry import all_flags, options
from slime.config.flags.spec import Flag
from slime.config.flags.values import convert, nearest
from slime.core.errors import ConfigError


def read_command_line(argv: list[str]) -> dict[str, Any]:
    """The values given on a command line, converted; nothing else."""
    known, unknown = _parser().parse_known_args(argv)
    for token in unknown:
        if token.startswith("-"):
            raise ConfigError(_unknown_option(token.split("=")[0]))
    if unknown:
        raise ConfigError(
            f"unexpected value {unknown[0]!r}: a value follows its flag, as in --lr 1e-6"
        )
    flags = all_flags()
    return {
        name: convert(flags[name], raw, flags[name].option) for name, raw in vars(known).items()
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_program(),
        usage="%(prog)s [--config FILE] [--flag value ...]",
        description="Train a language model by reinforcement learning.",
        epilog="Flags of Megatron, SGLang and its router keep the defaults of those packages.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=40, width=110),
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in all_flags().values():
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag)
    return parser


def _program() -> str:
    script = Path(sys.argv[0]).name
    return script if script in ("train.py", "train_async.py") else "slime train"


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    text = _help(flag)
    if flag.kind != "bool":
        metavar = (
            flag.name.upper() if not flag.choices else "{" + ",".join(map(str, flag.choices)) + "}"
        )
        nargs = "+" if flag.many else None
        group.add_argument(*flag.options, dest=flag.name, metavar=metavar, nargs=nargs, help=text)
        return
    group.add_argument(*flag.options, dest=flag.name, action="store_true", help=text)
    if flag.off_options:
        shown = f"turns {flag.option} off" if flag.default else argparse.SUPPRESS
        group.add_argument(*flag.off_options, dest=flag.name, action="store_false", help=shown)


def _help(flag: Flag) -> str:
    text = flag.help if flag.family == "slime" else flag.summary
    default = f"default: {flag.default}" if flag.default not in (None, False, [], {}) else ""
    notes = "; ".join(filter(None, (flag.rules, default)))
    text += f" ({notes})" if notes else ""
    return text.replace("%", "%%")


def _unknown_option(option: str) -> str:
    near = nearest(option, options())
    return f"there is no flag {option}" + (f"; did you mean {near}?" if near else "")
