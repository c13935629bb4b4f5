"""What a flag is, and how a group of flags is declared as a dataclass.

Everything about one flag is on its declaration: type, default, help, bounds, and the
conditions under which it has an effect. `slime/config/flags/draft.py` applies them::

    tis_clip: float = flag(2.0, "upper bound of the importance weight", min=0, needs="use_tis")
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

Kind = Literal["str", "int", "float", "bool", "json", "size"]
Backend = Literal["megatron", "fsdp"]
_SAME_WORD = 0.75  # similarity from which two words count as one with a typo: "szie" and "size"


class Values(Protocol):
    """The values of all flags by name; a `Draft` is one."""

    def __getitem__(self, name: str) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A test of other flags, and how messages write it: `--use-kl-loss or --kl-coef`."""

    names: tuple[str, ...]
    holds: Callable[[Values], bool]
    text: str
    note: str = ""  # what follows the text in a message: the reason

    def __or__(self, other: Condition) -> Condition:
        return Condition(
            names=self.names + other.names,
            holds=lambda values: self.holds(values) or other.holds(values),
            text=f"{self.text} or {other.text}",
            note=self.note or other.note,
        )


def is_set(name: str, note: str = "") -> Condition:
    """Hold if the flag is on, or has a value other than None, 0 and the empty text."""
    return Condition(
        names=(name,), holds=lambda values: bool(values[name]), text=option_of(name), note=note
    )


def equals(name: str, *choices: str, note: str = "") -> Condition:
    """Hold if the flag has one of these values."""
    return Condition(
        names=(name,),
        holds=lambda values: values[name] in choices,
        text=f"{option_of(name)} {_listed(choices)}",
        note=note,
    )


def differs(name: str, default: str) -> Condition:
    """Hold if the flag has any other value, such as a function of the user's."""
    return Condition(
        names=(name,),
        holds=lambda values: values[name] != default,
        text=f"another {option_of(name)}",
    )


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag: the attribute it sets, the options that set it, and what values it takes.

    `--disable-bias-linear` of Megatron, for example, is::

        Flag(name="add_bias_linear", kind="bool", options=("--add-bias-linear",),
             off_options=("--disable-bias-linear",), family="megatron", ...)
    """

    name: str
    kind: Kind
    options: tuple[str, ...]  # messages and documentation use the first
    off_options: tuple[str, ...] = ()  # for a bool: these set it to False
    default: Any = None
    help: str = ""
    group: str = ""
    family: Literal["slime", "megatron", "sglang", "router"] = "slime"
    choices: tuple[str | int | float, ...] = ()
    same_values: Mapping[str, str] = field(default_factory=dict)  # other names of choices
    many: bool = False  # takes one or more values
    secret: bool = False
    backend: Backend | None = None  # only this trainer honours it
    versions: tuple[str, ...] = ()  # of the package that have this flag, if several were read
    sets: tuple[str, ...] = ()  # fields of Megatron's configs, as "OptimizerConfig.lr"
    min: float | None = None
    above: float | None = None  # like `min`, but the bound itself is not allowed
    max: float | None = None
    special: int | None = None  # a value allowed beside the bounds
    hint: str = ""  # what the message about a value out of bounds adds
    required: str = ""  # what to give if the flag is missing; empty: the flag is optional
    excludes: str | None = None  # the flag that cannot be given together with this one
    requires: Condition | None = None  # without it the flag is an error
    needs: Condition | None = None  # without it the flag has no effect
    ignored: str = ""  # why the flag has no effect at all; scripts of other versions have it
    unless: tuple[Condition, ...] = ()  # with one of these the flag has no effect

    @property
    def option(self) -> str:
        return self.options[0]

    @property
    def bounds(self) -> str:
        """Return "at least 1", "above 0 and at most 1", ...; empty without bounds."""
        if self.min is not None and self.max is not None:
            return f"between {self.min:g} and {self.max:g}"
        least = f"at least {self.min:g}" if self.min is not None else ""
        least = f"above {self.above:g}" if self.above is not None else least
        most = f"at most {self.max:g}" if self.max is not None else ""
        special = f"{self.special} or " if self.special is not None else ""
        return special + " and ".join(filter(None, (least, most)))

    def allows(self, value: float) -> bool:
        """Return whether a number is within the bounds."""
        return value == self.special or (
            (self.min is None or value >= self.min)
            and (self.above is None or value > self.above)
            and (self.max is None or value <= self.max)
        )

    @property
    def rules(self) -> str:
        """Return bounds and conditions in words, for the help and docs/arguments.md."""
        required = f"needs {self.requires.text}" if self.requires else ""
        needed = f"only with {self.needs.text}" if self.needs else ""
        excluded = f"not with {option_of(self.excludes)}" if self.excludes else ""
        return "; ".join(filter(None, (self.bounds, required, needed, excluded)))

    @property
    def summary(self) -> str:
        """Return the first sentence of the help."""
        first = re.split(r"(?<=[.!?])\s", self.help, maxsplit=1)[0]
        return first if len(first) <= 200 else first[:197] + "..."


def flag(
    default: Any,
    help: str,
    *,
    secret: bool = False,
    backend: Backend | None = None,
    same_values: Mapping[str, str] | None = None,
    min: float | None = None,
    above: float | None = None,
    max: float | None = None,
    special: int | None = None,
    hint: str = "",
    required: str = "",
    excludes: str | None = None,
    requires: Condition | None = None,
    needs: str | Condition | None = None,
    ignored: str = "",
    unless: Condition | tuple[Condition, ...] = (),
) -> Any:
    """Declare a field of a group; the other parameters are those of `Flag`.

    The field's annotation is the type of the value once it is resolved, so a flag that slime derives
    when it is not given has the default None and the type `int`. `needs="use_tis"` is short for
    `needs=is_set("use_tis")`.
    """
    metadata = {
        "help": help or f"no effect: {ignored}",
        "secret": secret,
        "backend": backend,
        "same_values": same_values or {},
        "min": min,
        "above": above,
        "max": max,
        "special": special,
        "hint": hint,
        "required": required,
        "excludes": excludes,
        "requires": requires,
        "needs": is_set(needs) if isinstance(needs, str) else needs,
        "ignored": ignored,
        "unless": unless if isinstance(unless, tuple) else (unless,),
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(group: type) -> list[Flag]:
    """Return the flags that a group's dataclass declares, in its order."""
    hints = get_type_hints(group)
    return [_flag_of(group, field, hints[field.name]) for field in dataclasses.fields(group)]


def option_of(name: str) -> str:
    """Return the option of a flag's name: "--rm-type" for "rm_type"."""
    return "--" + name.replace("_", "-")


def _flag_of(group: type, field: dataclasses.Field[Any], hint: Any) -> Flag:
    default = None if field.default is dataclasses.MISSING else field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    kind, choices, many = _shape_of(hint)
    off = (option_of(f"no_{field.name}"),) if kind == "bool" else ()
    return Flag(  # a dataclass that is no group of flags (EvalDataset) has no metadata
        name=field.name,
        kind=kind,
        options=(option_of(field.name),),
        off_options=off,
        default=default,
        group=(group.__doc__ or group.__name__).strip().rstrip("."),
        choices=choices,
        many=many,
        **field.metadata,
    )


def _shape_of(hint: Any) -> tuple[Kind, tuple[Any, ...], bool]:
    """Return kind, choices and whether the flag takes several values, from the annotation."""
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


def _listed(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant to be, or None.

    That is the only one that continues it (`--sglang-tp` -> `--sglang-tp-size`), or the one that has the same
    words up to typos, order and separators (`--rollout-bach-size`). A name that shares only some words
    with `name` is another setting, and suggesting it would mislead.
    """
    known = list(known)
    begun = [other for other in known if other.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    scores = {other: _similarity(name, other) for other in known}
    best = max(known, key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] > 0 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that names the known name; empty if none is near."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def _similarity(name: str, other: str) -> float:
    """Return how similar two names are, between 0 and 1; 0 if a word has no counterpart."""
    words, others = (sorted(filter(None, re.split("[-_]", text))) for text in (name, other))
    if "".join(re.split("[-_]", name)) == "".join(re.split("[-_]", other)):
        return 1.0
    if len(words) != len(others):
        return 0.0
    ratios = []
    for word in words:
        scored = [(difflib.SequenceMatcher(None, word, o).ratio(), o) for o in others]
        ratio, match = max(scored)
        others.remove(match)
        ratios.append(ratio if ratio >= _SAME_WORD else 0.0)
    return min(ratios, default=0.0) and sum(ratios) / len(ratios)
