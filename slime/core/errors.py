"""Exceptions with a meaning of their own.

UserError                 a mistake of the user's; its text is all they see, no traceback
└── ConfigError           wrong flag, impossible combination; exit status 2
WeightSyncError           an update that did not reach an engine, which may be dead
WeightMismatchError       an engine does not hold the weights the trainer sent
"""


class UserError(Exception):
    """What is wrong, where, and what to type instead; printed alone, without a traceback."""

    exit_status = 1


class ConfigError(UserError):
    exit_status = 2


class WeightSyncError(RuntimeError):
    """An update that did not reach an engine; the text names the engine and the bucket."""


class WeightMismatchError(RuntimeError):
    """The checksums of some tensors in an engine differ from those the trainer sent."""
