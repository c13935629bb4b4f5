"""Values for the fields of megatron-core's configuration classes, from the flags that set them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from slime.config.flags.registry import all_flags

if TYPE_CHECKING:
    from slime.config.arguments import Args


def flag_fields(args: Args, config_class: type) -> dict[str, Any]:
    """{"lr": 1e-6, ...} for OptimizerConfig: what the user or a rule has set, defaults left out."""
    known = {field.name for field in dataclasses.fields(config_class)}
    fields = {}
    for flag in all_flags().values():
        value = getattr(args, flag.name)
        if not flag.sets or value is None or args.origin(flag.name) == "default":
            continue
        for target in flag.sets:
            owner, field = target.split(".")
            if owner == config_class.__name__ and field in known:
                fields[field] = value
    return fields
