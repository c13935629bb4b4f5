"""Public import path of `load_tokenizer` and `load_processor` of `slime.compat.loading`."""

from slime.compat.loading import load_processor, load_tokenizer

__all__ = ["load_processor", "load_tokenizer"]
