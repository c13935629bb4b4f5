"""Public import path of `slime.core.errors`."""

from slime.core.errors import ConfigError, UserError, WeightMismatchError, WeightSyncError

__all__ = ["ConfigError", "UserError", "WeightMismatchError", "WeightSyncError"]
