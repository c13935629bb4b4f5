r"""Loss masks of supervised fine-tuning: tokenize a conversation and mask all but the assistant's turns.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    0            0  00 0         0 0            0        0 1    1         0

Trained and untrained text is tokenized separately, as at generation, where the prompt's tokens end
before the response begins. In reinforcement learning the mask comes from generation
(`Sample.loss_mask`). In both cases `slime.core.dp_schedule.loss_weights` turns it into loss weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Piece = tuple[str, bool]  # text, trained on

_IM_HEADER, _IM_END = "<|im_start|>assistant\n", "<|im_end|>"
_DISTILL_HEADER = "<\uff5cAssistant\uff5c>"  # with full-width bars


def masked_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    *,
    kind: str = "qwen",
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Return the tokens of the conversation and, for each, 1 if it is trained on.

    `qwen`: ChatML; the conversation is rendered as a whole, every assistant turn is trained on.
    `qwen3`: ChatML whose template drops the thinking of earlier turns; here each turn keeps it, as at
    generation. `distill_qwen`: the template drops all thinking; only the last turn is trained on,
    with its thinking.
    """
    if not tokenizer.chat_template:
        raise ConfigError("rows of messages need a chat template, and --hf-checkpoint has none")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError("a conversation without an assistant message has nothing to train on")
    render = _Renderer(tokenizer, tools, template_kwargs or {})
    pieces = _PIECES[kind](render, messages)
    tokens: list[int] = []
    mask: list[int] = []
    for text, trained in pieces:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        mask += [int(trained)] * len(ids)
    if 1 not in mask:
        raise ConfigError(
            f"--loss-mask-type {kind} does not fit the chat template of --hf-checkpoint"
        )
    return tokens, mask


class _Renderer:
    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, kwargs: dict
    ) -> None:
        self._tokenizer, self._tools, self._kwargs = tokenizer, tools, kwargs
        self.eos = str(tokenizer.eos_token)

    def __call__(self, messages: list[Message], *, prompt: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=prompt,
                **self._kwargs,
            )
        )


def _qwen_pieces(render: _Renderer, messages: list[Message]) -> list[Piece]:
    if not render([{"role": "user", "content": "-"}], prompt=True).count(_IM_HEADER):
        return []
    text = render(messages)
    pieces: list[Piece] = []
    start = cursor = 0
    for message in messages:
        if message["role"] != "assistant":
            # Skip the content first, because it may contain the header.
            for part in _texts_of(message):
                found = text.find(part, cursor)
                cursor = found + len(part) if found >= 0 else cursor
            continue
        begin = text.find(_IM_HEADER, cursor)
        if begin < 0:
            return []
        begin += len(_IM_HEADER)
        content = _text_of(message)
        inside = text.find(content, begin)
        if inside < 0 or _IM_END in text[begin:inside]:
            raise _changed_by_template(message, "qwen3")
        cursor = text.find(_IM_END, inside + len(content)) + len(_IM_END)
        _check_kept(message, text[begin:cursor], "qwen3")
        pieces += [(text[start:begin], False), (text[begin:cursor], True)]
        start = cursor
    return [*pieces, (text[start:], False)]


def _qwen3_pieces(render: _Renderer, messages: list[Message]) -> list[Piece]:
    """Render each turn after one short user message, where the template keeps its thinking."""
    probe = [{"role": "user", "content": "-"}]
    probe_text = render(probe)
    pieces: list[Piece] = []
    for turn in _turns(messages):
        if turn[0]["role"] == "system":
            rendered = render([*turn, *probe])
            pieces.append((rendered.removesuffix(_user_turn(probe)), False))
            continue
        if not pieces and probe_text != _user_turn(probe):  # tools, or a default system prompt
            pieces.append((probe_text.removesuffix(_user_turn(probe)), False))
        text = render([*probe, *turn]).removeprefix(probe_text)
        if turn[0]["role"] != "assistant":
            pieces.append((text, False))
            continue
        if not text.startswith(_IM_HEADER):
            return []
        end = text.rindex(_IM_END) + len(_IM_END)
        _check_kept(turn[0], text[:end])
        header = len(_IM_HEADER)
        pieces += [(text[:header], False), (text[header:end], True), (text[end:], False)]
    return pieces


def _distill_pieces(render: _Renderer, messages: list[Message]) -> list[Piece]:
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    prompt = render(messages[:last], prompt=True)
    message = messages[last]
    if message.get("tool_calls") or message.get("reasoning_content"):
        raise UserError(
            "--loss-mask-type distill_qwen trains on the content of the last message, which has tool_calls or "
            "reasoning_content beside it: use --loss-mask-type qwen3, or write them into the content"
        )
    opened = prompt.rsplit(_DISTILL_HEADER, 1)[-1]  # some templates open the thinking themselves
    return [(prompt, False), (_content_of(message).removeprefix(opened) + render.eos, True)]


def _check_kept(message: Message, rendered: str, instead: str | None = None) -> None:
    """Raise unless the message is rendered unchanged; a template may drop thinking or rewrite content."""
    parts = [_text_of(message), str(message.get("reasoning_content") or "").strip()]
    if any(part not in rendered for part in parts):
        raise _changed_by_template(message, instead)


def _changed_by_template(message: Message, instead: str | None) -> UserError:
    text = _text_of(message) or str(message.get("reasoning_content"))
    advice = f": use --loss-mask-type {instead}, or fix the data" if instead else ": fix the data"
    return UserError(
        "the chat template changes an assistant message, so that training on it would teach something "
        f"else ({text[:60]!r}){advice}"
    )


def _content_of(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):  # parts, as in OpenAI's messages
        content = "".join(str(part.get("text", "")) for part in content)
    return str(content)


def _text_of(message: Message) -> str:
    return _content_of(message).strip()


def _texts_of(message: Message) -> list[str]:
    """Return the texts of a message's parts, between which there may be images."""
    content = message.get("content")
    if not isinstance(content, list):
        return [_text_of(message)]
    return [str(part.get("text", "")).strip() for part in content]


def _turns(messages: list[Message]) -> list[list[Message]]:
    """Group messages into turns; consecutive tool results are one turn, as in chat templates."""
    turns: list[list[Message]] = []
    for message in messages:
        if turns and message["role"] == "tool" and turns[-1][-1]["role"] == "tool":
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns


def _user_turn(messages: list[Message]) -> str:
    return f"<|im_start|>user\n{messages[0]['content']}<|im_end|>\n"


_PIECES = {"qwen": _qwen_pieces, "qwen3": _qwen3_pieces, "distill_qwen": _distill_pieces}
