"""Public import path of `load_function` and `SingletonMeta` of `slime.compat.loading`."""

from slime.compat.loading import SingletonMeta, load_function

__all__ = ["SingletonMeta", "load_function"]
