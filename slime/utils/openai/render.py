"""Messages as text: the whole conversation, or only what follows an answer the model has just given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.utils.openai.requests import ApiError, Message
from slime.utils.openai.tool_calls import with_parsed_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "slime0mark0of0an0answer"


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
) -> str:
    """The conversation with the opening of the next answer."""
    if not tokenizer.chat_template:
        raise ApiError("the model's tokenizer has no chat template: use /v1/completions")
    try:
        return str(
            tokenizer.apply_chat_template(
                [with_parsed_arguments(message) for message in messages],
                tools=tools or None,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=True,
                **template_kwargs,
            )
        )
    except (
        Exception
    ) as error:  # templates are programs of the checkpoint's author: any error may come
        raise ApiError(f"the chat template does not take these messages: {error}") from None


def render_after_answer(
    tokenizer: PreTrainedTokenizerBase,
    history: list[Message],
    messages: list[Message],
    template_kwargs: dict[str, Any],
) -> str:
    """The end of the answer's turn and the new `messages`, with the opening of the next answer.

    Rendered behind a stand-in for the answer, so that whatever the template does to past answers
    (leaving thoughts out, writing JSON anew) cannot touch the tokens that were really generated.
    """
    first = next((m for m in history if m["role"] == "user"), {"role": "user", "content": "."})
    answer = {"role": "assistant", "content": _MARK}
    text = render_chat(tokenizer, [first, answer, *messages], [], template_kwargs)
    if text.count(_MARK) != 1:
        raise ApiError("the chat template does not show past answers: conversations cannot go on")
    return text.split(_MARK, 1)[1]
