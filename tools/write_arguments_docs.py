"""Generate docs/arguments.md from the flags: `python tools/write_arguments_docs.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.config.flags.engine_options import embedded_support
from slime.config.flags.registry import all_flags, own_flags
from slime.config.flags.spec import Flag

PATH = Path(__file__).resolve().parents[1] / "docs" / "arguments.md"
COMMAND = "python tools/write_arguments_docs.py"

_INTRODUCTION = f"""\
<!-- Written by `{COMMAND}`; change the flags in slime/config/flags instead. -->

# Arguments

`slime train --help-all` lists the same, `slime train --help` those of slime itself. Every flag can also be set in a YAML file given with `--config`,
by its name without the leading dashes (dashes or underscores); the command line overrides the file.
A switch is turned off with `--no-<name>`, also one that a file turns on.
A flag that does not exist is an error with the nearest match, and exit status 2.

`--dry-run` prints every value with its origin (default, derived, config, command line), the placement
and the batches, and starts nothing. Hooks are imported, and model and data files read, as a
start would; files and packages missing on the machine are only warnings. Secrets are never printed or
written.

Bounds and conditions are in parentheses. A value out of bounds is an error, and so is a flag
without one that it *needs*; a flag set without its *only with* has no effect, which is a warning. Flags marked *megatron* or *fsdp* belong to that `--train-backend` and are refused with the other.
Flags of Megatron, SGLang and the router that are not set keep the default of the installed package.
"""

_MEGATRON = """\
The fields of megatron-core's configuration classes and the spellings of Megatron's own parser, for
`--train-backend megatron`.
"""
_SGLANG = """\
Every option of an SGLang server with the prefix `--sglang-`. *Embedded* says what slime's own engine does
with it: `yes` the same as SGLang, `ignored` it has no effect and would never change a result, `-` it is
refused with `--rollout-engine slime`.
"""
_ROUTER = "Every option of SGLang's router with the prefix `--router-`.\n"


def arguments_page() -> str:
    groups: dict[str, list[Flag]] = {}
    for flag in own_flags().values():
        groups.setdefault(flag.group, []).append(flag)
    sections = [_INTRODUCTION]
    sections += [
        _section(group, "", [_own_row(f) for f in flags]) for group, flags in groups.items()
    ]
    sections.append(_foreign_section("megatron", _MEGATRON, ["flag", "default", "meaning"]))
    sections.append(_foreign_section("sglang", _SGLANG, ["flag", "embedded", "default", "meaning"]))
    sections.append(_foreign_section("router", _ROUTER, ["flag", "default", "meaning"]))
    return "\n".join(sections)


def _section(title: str, text: str, rows: list[list[str]], head: list[str] | None = None) -> str:
    head = head or ["flag", "default", "meaning"]
    lines = [f"## {title}", "", *([text] if text else [])]
    lines += [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows), ""]
    return "\n".join(lines)


def _own_row(flag: Flag) -> list[str]:
    backend = f" *{flag.backend}*" if flag.backend else ""
    return [_spelled(flag), _default(flag), _plain(_with_rules(flag, flag.help)) + backend]


def _foreign_section(family: str, text: str, head: list[str]) -> str:
    flags = [f for f in all_flags().values() if f.family == family]
    rows = [[_spelled(f), _default(f), _plain(_with_rules(f, f.summary))] for f in flags]
    if "embedded" in head:
        words = {"honoured": "yes", "harmless": "ignored", "refused": "-"}
        for row, flag in zip(rows, flags, strict=True):
            row.insert(1, words[embedded_support(flag.name.removeprefix("sglang_"))])
    return _section(flags[0].group, text, rows, head)


def _spelled(flag: Flag) -> str:
    options = [*flag.options[:2]]
    if flag.kind == "bool" and flag.default is True:
        options += flag.off_options[:1]
    elif flag.kind != "bool":
        options[-1] += " " + _value(flag)
    return ", ".join(f"`{option}`" for option in options)


def _value(flag: Flag) -> str:
    kind = "|".join(map(str, flag.choices)) if flag.choices else flag.kind
    return f"{kind} ..." if flag.many else kind


def _default(flag: Flag) -> str:
    if flag.kind == "bool":
        return "on" if flag.default is True else ""
    return "" if flag.default in (None, [], {}) else f"`{flag.default}`"


def _with_rules(flag: Flag, text: str) -> str:
    return f"{text} ({flag.rules})" if flag.rules else text


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PATH.write_text(arguments_page())
    print(f"wrote {PATH}")
