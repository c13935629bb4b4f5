"""Public import path of `slime.cli.quickstart_task`."""

from slime.cli.quickstart_task import reward, write_model

__all__ = ["reward", "write_model"]
