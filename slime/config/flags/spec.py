"""What a flag is, and how a group of them is written down as a dataclass."""

from __future__ import annotations

import dataclasses
import re
import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Kind = Literal["str", "int", "float", "bool", "json", "size"]
Backend = Literal["megatron", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag: the attribute it sets, the options that set it, and what values it takes.

    `--disable-bias-linear` of Megatron, for example, is::

        Flag(name="add_bias_linear", kind="bool", options=("--add-bias-linear",),
             off_options=("--disable-bias-linear",), family="megatron", ...)
    """

    name: str
    kind: Kind
    options: tuple[str, ...]  # the first is the one that messages and documents use
    off_options: tuple[str, ...] = ()  # for a bool: these set it to False
    default: Any = None
    help: str = ""
    group: str = ""
    family: Literal["slime", "megatron", "sglang", "router"] = "slime"
    choices: tuple[str | int | float, ...] = ()
    many: bool = False  # takes one or more values
    secret: bool = False
    backend: Backend | None = None  # only this trainer honours it
    versions: tuple[str, ...] = ()  # of the package it was read from, where several were read
    sets: tuple[str, ...] = ()  # fields of Megatron's configs, as "OptimizerConfig.lr"

    @property
    def option(self) -> str:
        return self.options[0]

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        first = re.split(r"(?<=[.!?])\s", self.help, maxsplit=1)[0]
        return first if len(first) <= 200 else first[:197] + "..."


def flag(
    default: Any,
    help: str,
    *,
    secret: bool = False,
    backend: Backend | None = None,
) -> Any:
    """A field of a group. The field's annotation is the type of the value once it is resolved, so a
    flag that slime derives when it is not given has the default None and the type `int`."""
    metadata = {"help": help, "secret": secret, "backend": backend}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(group: type) -> list[Flag]:
    """The flags a group's dataclass declares, in its order."""
    hints = get_type_hints(group)
    return [_flag_of(group, field, hints[field.name]) for field in dataclasses.fields(group)]


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag_of(group: type, field: dataclasses.Field[Any], hint: Any) -> Flag:
    default = None if field.default is dataclasses.MISSING else field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    kind, choices, many = _shape_of(hint)
    off = ("--no-" + field.name.replace("_", "-"),) if kind == "bool" else ()
    return Flag(
        name=field.name,
        kind=kind,
        options=(option_of(field.name),),
        off_options=off,
        default=default,
        help=field.metadata.get("help", ""),
        group=(group.__doc__ or group.__name__).strip().rstrip("."),
        choices=choices,
        many=many,
        secret=field.metadata.get("secret", False),
        backend=field.metadata.get("backend"),
    )


def _shape_of(hint: Any) -> tuple[Kind, tuple[Any, ...], bool]:
    """Kind, choices and whether it takes several values, from a field's annotation."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return "str", get_args(hint), False
    if get_origin(hint) is list:
        kind, choices, _ = _shape_of(get_args(hint)[0])
        return kind, choices, True
    if get_origin(hint) is dict:
        return "json", (), False
    names: dict[type, Kind] = {str: "str", int: "int", float: "float", bool: "bool"}
    return names[hint], (), False
