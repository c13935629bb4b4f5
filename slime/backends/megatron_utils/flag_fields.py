"""Values for the fields of megatron-core's configuration classes, from the flags that set them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.utils.flags.registry import all_flags

if TYPE_CHECKING:
    from slime.utils.arguments import Args


def flag_fields(args: Args, config_class: str) -> dict[str, Any]:
    """{"lr": 1e-6, ...} for "OptimizerConfig": what the user or a rule has set, defaults left out."""
    fields = {}
    for flag in all_flags().values():
        for target in flag.sets:
            owner, field = target.split(".")
            if owner != config_class or args.origin(flag.name) == "default":
                continue
            value = getattr(args, flag.name)
            if value is not None:
                fields[field] = value
    return fields
