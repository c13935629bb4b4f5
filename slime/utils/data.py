"""Public import path of `slime.data.prompt_data`."""

from slime.data.prompt_data import (
    DataFormat,
    PromptDataset,
    encode_prompt,
    load_prompts,
    read_rows,
)

__all__ = ["DataFormat", "PromptDataset", "encode_prompt", "load_prompts", "read_rows"]
