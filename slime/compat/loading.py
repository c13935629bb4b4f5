"""`slime.utils.misc` and `slime.utils.processing_utils`: hooks by path, singletons, tokenizers."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from slime.core.errors import ConfigError
from slime.data.tokenizer import load_tokenizer as _load_tokenizer


def load_function(path: str) -> Any:
    """Return the function or class at `package.module.name`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """A metaclass of classes with one instance per process; arguments of later calls are ignored."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Return the tokenizer of a folder. Python code in the folder is never run."""
    _refuse(kwargs)
    return _load_tokenizer(str(name_or_path))


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Return the processor of a vision model's folder; None for a text-only model."""
    from transformers import AutoProcessor, ProcessorMixin

    _refuse(kwargs)
    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=False)
    except (OSError, ValueError):  # the folder has no processor
        return None
    return processor if isinstance(processor, ProcessorMixin) else None


def _refuse(kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for options other than `trust_remote_code`, which model folders never get."""
    for name in kwargs.keys() - {"trust_remote_code"}:
        raise ConfigError(f"load_tokenizer and load_processor take no {name}: use transformers")
