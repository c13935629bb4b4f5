"""The names `--rm-type` takes."""

from __future__ import annotations

from slime.utils.errors import ConfigError

WITH_LABEL = ("math", "deepscaler", "dapo", "f1")
WITHOUT_LABEL = (
    "random",
    "remote_rm",
    "gpqa",
    "ifbench",
    "code",
    "reasoning_gym",
)  # or in the metadata
RM_TYPES = (*WITH_LABEL, *WITHOUT_LABEL)
_OWN_BOX = ("math", "deepscaler")  # these look for the box themselves
BOXED = "boxed_"


def needs_label(rm_type: str | None) -> bool:
    return rm_type is not None and rm_type.removeprefix(BOXED) in WITH_LABEL


def check_rm_type(rm_type: str, where: str = "--rm-type") -> None:
    base = rm_type.removeprefix(BOXED)
    if base not in RM_TYPES:
        raise ConfigError(
            f"{where} {rm_type}: choose one of {', '.join(RM_TYPES)}, or boxed_ and one of them"
        )
    if base != rm_type and base in _OWN_BOX:
        raise ConfigError(f"{where} {rm_type}: {base} reads the box itself; write {where} {base}")
