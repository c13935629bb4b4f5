"""The exceptions of slime.

UserError                 a mistake of the user; its text is printed without a traceback
└── ConfigError           a wrong flag or an impossible combination; exit status 2
WeightSyncError           a weight update did not reach an engine, which may be dead
WeightMismatchError       an engine does not hold the weights that the trainer sent
"""


class UserError(Exception):
    """The text says what is wrong, where, and what to type; printed without a traceback."""

    exit_status = 1


class ConfigError(UserError):
    exit_status = 2


class WeightSyncError(RuntimeError):
    """A weight update did not reach an engine; the text names the engine and the bucket."""


class WeightMismatchError(RuntimeError):
    """The checksums of some tensors in an engine differ from those that the trainer sent."""
