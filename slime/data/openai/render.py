"""Messages as text: the whole conversation, or only what follows an answer the model has just given."""

from __future__ import annotations

import inspect
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from slime.data.openai.requests import ApiError, Message
from slime.data.openai.tool_calls import with_parsed_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
) -> str:
    """Render the conversation with the start of the next answer.

    `template_kwargs` of a client must have passed `check_template_kwargs`.
    """
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
    except Exception as error:  # a template is a program from the checkpoint and may raise anything
        raise ApiError(f"the chat template fails for these messages: {error}") from None


def render_after_answer(
    tokenizer: PreTrainedTokenizerBase,
    history: list[Message],
    messages: list[Message],
    template_kwargs: dict[str, Any],
) -> str:
    """Render the end of the answer's turn and the new `messages`, with the start of the next answer.

    A random placeholder stands for the answer, so that what the template does to past answers
    (dropping thinking, reformatting JSON) does not change the tokens that were generated.
    """
    mark = f"answer{secrets.token_hex(16)}"
    first = next((m for m in history if m["role"] == "user"), {"role": "user", "content": "."})
    answer = {"role": "assistant", "content": mark}
    text = render_chat(tokenizer, [first, answer, *messages], [], template_kwargs)
    if text.count(mark) != 1:
        raise ApiError("the chat template omits past answers: the conversation cannot be continued")
    return text.split(mark, 1)[1]


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, given: dict[str, Any]) -> None:
    """Raise ApiError for a key of `chat_template_kwargs` that is no variable of the model's template.

    The parameters of `apply_chat_template` itself would let the client replace the template, which is a
    program, and the names of special tokens would let it write them.
    """
    template = tokenizer.chat_template or ""
    texts = tuple(template.values()) if isinstance(template, dict) else (template,)
    allowed = set().union(*map(_variables, texts))
    allowed -= {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    allowed -= tokenizer.special_tokens_map.keys()
    for name in given:
        if name not in allowed or name.startswith("return_") or name.endswith("_token"):
            known = ", ".join(sorted(allowed)) or "none"
            raise ApiError(
                f"`chat_template_kwargs` must not have the key {str(name)[:100]!r}: the model's chat "
                f"template takes these: {known}"
            )


@lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """Return the names that the template reads and does not set."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateError as error:
        raise ApiError(f"the model's chat template cannot be read: {error}") from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which transformers adds to Jinja and which does not change the text."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
