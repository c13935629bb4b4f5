"""Public import path of `slime.cli.quickstart_task`."""

from slime.cli.quickstart_task import reward

__all__ = ["reward"]
