"""Public import path of `slime.utils.http.run`."""

from slime.utils.http import run

__all__ = ["run"]
