"""Public import path of `slime.data.prompt_data` and of `encode_prompt`."""

from slime.data.prompt_data import DataFormat, PromptDataset, load_prompts, read_rows
from slime.data.tokenizer import encode_prompt

__all__ = ["DataFormat", "PromptDataset", "encode_prompt", "load_prompts", "read_rows"]
