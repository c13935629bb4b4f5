"""Public import path of `slime.data.tokenizer`."""

from slime.data.tokenizer import load_hf_config, load_tokenizer

__all__ = ["load_hf_config", "load_tokenizer"]
