"""Public import path of `slime.config.arguments`."""

from slime.config.arguments import Args, parse_args

__all__ = ["Args", "parse_args"]
