"""`slime.utils.mask_utils`: loss masks of conversations, by the function that supervised training uses."""

from __future__ import annotations

from typing import Any

from slime.data.sft_loss_mask import masked_conversation


class MultiTurnLossMaskGenerator:
    """Tokens and loss masks of whole conversations; `tokenizer_type` is a --loss-mask-type."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of the conversation and, for each, 1 if it is trained on."""
        return masked_conversation(self.tokenizer, messages, kind=self.tokenizer_type, tools=tools)

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Return for each mask the number of tokens from the first 1 on."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """Return the texts that are trained on, one for each run of 1s."""
        texts, current = [], []
        for token, trained in zip([*token_ids, 0], [*loss_masks, 0], strict=True):
            if trained:
                current.append(token)
            elif current:
                texts.append(str(self.tokenizer.decode(current)))
                current = []
        return texts
