"""Messages to text and to token ids, so that only the chat template writes control tokens.

A tool's output that contains `<|im_end|>` must not end the turn. Each text of a client is rendered
between two random marks, which show where the template put it:

    <|im_start|>tool\\n  7f3a  42<|im_end|>  7f3a  <|im_end|>\\n<|im_start|>assistant\\n
    frame                 │   text           │      frame

If no text contains a control token, the ids are those of the whole rendering, as
`apply_chat_template` returns them. Otherwise the texts that do are tokenized separately as plain text.
"""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from slime.core.errors import UserError
from slime.data.openai_replies import with_parsed_arguments
from slime.data.openai_requests import ApiError, Message
from slime.data.tokenizer import control_tokens, encode_content, encode_rendered, spelt_exactly

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = list[dict[str, Any]]
Render = Callable[[list[Message], Tools], str]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: Tools,
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
    """Raise ApiError for a key of `chat_template_kwargs` that is not a variable of the template.

    The parameters of `apply_chat_template` itself would let the client replace the template, which is a
    program, and the names of special tokens would let it write them.
    """
    allowed = _template_variables(tokenizer)
    allowed -= {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    allowed -= tokenizer.special_tokens_map.keys()
    for name in given:
        if name not in allowed or name.startswith("return_") or name.endswith("_token"):
            known = ", ".join(sorted(allowed)) or "none"
            raise ApiError(
                f"`chat_template_kwargs` must not have the key {str(name)[:100]!r}: the model's chat "
                f"template takes these: {known}"
            )


def drops_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the model's chat template ignores `tools`."""
    return "tools" not in _template_variables(tokenizer)


def _template_variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    template = tokenizer.chat_template or ""
    texts = tuple(template.values()) if isinstance(template, dict) else (template,)
    return set().union(*map(_variables, texts))


def encode_messages(path: str, messages: list[Message], tools: Tools, render: Render) -> list[int]:
    """Return the ids of `render(messages, tools)` with the tokenizer of `path`.

    Raise ApiError if control tokens in texts cannot be told from those of the template.
    """
    messages = [with_parsed_arguments(message) for message in messages]
    texts = _Texts(path=path)
    marked = [texts.mark_message(message) for message in messages]
    marked_tools = texts.mark(tools, "tool")
    if texts.hostile:
        pieces = texts.split(render(marked, marked_tools))
        if pieces is None:
            raise _cannot_separate(texts.hostile)
        return _encode_pieces(path, pieces, texts.hostile)
    whole, pieces = render(messages, tools), None
    with suppress(ApiError):
        pieces = texts.split(render(marked, marked_tools))
    if pieces is None or "".join(text for text, _ in pieces) != whole:
        # The template changes texts; none of them contains a control token.
        return encode_rendered(path, whole)
    return _encode_pieces(path, pieces, [])


def refuse_control_tokens(path: str, value: Any) -> None:
    """Raise ApiError if any text in this JSON value contains a control token."""
    texts = _Texts(path=path)
    texts.mark(value, "user")
    if texts.hostile:
        raise _cannot_separate(texts.hostile)


@dataclass(kw_only=True)
class _Texts:
    """The marks around the texts of a request, and the texts that contain control tokens."""

    path: str
    hostile: list[str] = field(default_factory=list)
    _marks: dict[str, bool] = field(default_factory=dict)  # mark -> whether its text is hostile

    def mark_message(self, message: Message) -> Message:
        """Put marks around a message's content, and around hostile texts in its other fields."""
        role = message["role"]
        content, always = message["content"], role != "assistant"
        if isinstance(content, list):  # texts between images
            content = [self._mark_part(part, role, always) for part in content]
        else:
            content = self._mark_text(content, role, always=always)
        others = {k: v for k, v in message.items() if k not in ("role", "content")}
        return {"role": role, "content": content, **self.mark(others, role)}

    def _mark_part(self, part: dict[str, Any], role: str, always: bool) -> dict[str, Any]:
        if part["type"] != "text":
            return part
        return {**part, "text": self._mark_text(part["text"], role, always=always)}

    def mark(self, value: Any, role: str) -> Any:
        """Put marks around every hostile text in a JSON value; a hostile key raises ApiError."""
        if isinstance(value, str):
            return self._mark_text(value, role)
        if isinstance(value, list):
            return [self.mark(item, role) for item in value]
        if not isinstance(value, dict):
            return value
        for key in value:
            if self._is_hostile(str(key), role):
                raise _cannot_separate([str(key)])
        return {key: self.mark(item, role) for key, item in value.items()}

    def _mark_text(self, text: str, role: str, *, always: bool = False) -> str:
        hostile = self._is_hostile(text, role)
        if not text.strip() or not (hostile or always):
            return text
        if hostile:
            self.hostile.append(text)
        mark = secrets.token_hex(16)
        self._marks[mark] = hostile
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        return f"{text[:start]}{mark}{text[start:end]}{mark}{text[end:]}"

    def _is_hostile(self, text: str, role: str) -> bool:
        """Return whether a text contains control tokens; an answer may have those that are not special."""
        control = control_tokens(self.path, special_only=role == "assistant")
        if spelt_exactly(self.path) and not any(word in text for word in control.values()):
            return False
        return not control.keys().isdisjoint(encode_rendered(self.path, text))

    def split(self, marked: str) -> list[tuple[str, bool]] | None:
        """Split the rendering into (text, is hostile); None if the template moved the marks apart."""
        if not self._marks:
            return [(marked, False)]
        pieces, opened = [], None
        for part in re.split(f"({'|'.join(self._marks)})", marked):
            if part not in self._marks:
                pieces.append((part, opened is not None and self._marks[opened]))
            elif opened is None:
                opened = part
            elif opened == part:
                opened = None
            else:
                return None
        return pieces if opened is None else None


def _encode_pieces(path: str, pieces: list[tuple[str, bool]], hostile: list[str]) -> list[int]:
    """Tokenize adjacent pieces together, and hostile texts separately.

    Raise ApiError if a control token appears only where two pieces meet.
    """
    control = control_tokens(path)
    wanted = [
        token
        for text, is_hostile in pieces
        if not is_hostile
        for token in encode_rendered(path, text)
        if token in control
    ]
    ids: list[int] = []
    run = ""
    for text, is_hostile in [*pieces, ("", True)]:
        if not is_hostile:
            run += text
            continue
        ids += encode_rendered(path, run)
        run = ""
        try:
            ids += encode_content(path, text)
        except UserError as error:  # the tokenizer cannot encode it as plain text
            raise ApiError(str(error)) from None
    if [token for token in ids if token in control] != wanted:
        raise _cannot_separate(hostile)
    return ids


def _cannot_separate(texts: list[str]) -> ApiError:
    shown = texts[0][:60] if texts else ""
    return ApiError(
        f"a message contains a control token of the chat template ({shown!r}), which cannot be told from "
        "those of the template: remove it from the message"
    )


@lru_cache(maxsize=16)
def _variables(template: str) -> frozenset[str]:
    """Return the names that the template reads but does not set."""
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
