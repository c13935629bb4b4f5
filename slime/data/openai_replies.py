"""Replies of /v1/chat/completions and /v1/completions, whole or as chunks of a stream.

Tool calls are parsed from the text of a response, in the format of Qwen's and Hermes' templates:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(kw_only=True, frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def parse_tool_calls(text: str, id_prefix: str) -> tuple[str, list[ToolCall]]:
    """Return the text without its calls, and the calls; a call that is not JSON stays in the text.

    The tags are found with `str.find`, so that the time is linear in the text: a regular expression
    backtracks over the newlines that degenerate policies repeat up to the length limit.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        inner = start + len(_OPEN)
        close = text.find(_CLOSE, inner)
        if close < 0:
            break
        end = close + len(_CLOSE)
        call = _parse(text[inner:close].strip(), f"call_{id_prefix}_{len(calls)}")
        if call is None:
            kept.append(text[position:end])
        else:
            calls.append(call)
            kept.append(text[position:start].removesuffix("\n"))
        position = end
    kept.append(text[position:])
    return ("".join(kept).strip() if calls else text), calls


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as chat templates expect it: arguments of calls as objects, not JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = _loads(function.get("arguments", "{}"))
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def same_calls(one: list[dict[str, Any]] | None, other: list[dict[str, Any]] | None) -> bool:
    """Return whether calls are equal up to the formatting of their JSON."""
    return [_key(call) for call in one or []] == [_key(call) for call in other or []]


@dataclass(kw_only=True, frozen=True)
class TokenLogProb:
    token: str
    log_prob: float
    top: list[TokenLogProb] = field(default_factory=list)  # the most likely tokens in its place

    def to_json(self) -> dict[str, Any]:
        top = [entry._fields() for entry in self.top]
        return {**self._fields(), "top_logprobs": top}

    def _fields(self) -> dict[str, Any]:
        raw = list(self.token.encode(errors="replace"))
        return {"token": self.token, "bytes": raw, "logprob": self.log_prob}


@dataclass(kw_only=True, frozen=True)
class Answer:
    """One choice; its tool calls are in `calls` and not in `text`."""

    text: str
    finish: str  # stop, length, abort
    num_tokens: int
    matched: int | str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    log_probs: list[TokenLogProb] | None = None
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    weight_version: str | None = None

    def end(self) -> dict[str, Any]:
        """Return the fields of a choice that say why it ended."""
        reason = "tool_calls" if self.calls and self.finish == "stop" else self.finish
        return {"finish_reason": reason, "matched_stop": self.matched}

    def message(self) -> dict[str, Any]:
        calls = [call.to_json() for call in self.calls]
        content = self.text if self.text or not calls else None
        message = {"role": "assistant", "content": content, "reasoning_content": None}
        return {**message, "tool_calls": calls or None}


def chat_reply(name: str, model: str, answers: list[Answer], num_prompt: int) -> dict[str, Any]:
    contents = [
        {"message": a.message(), "logprobs": _log_probs(a, chat_log_probs)} for a in answers
    ]
    return _reply(_head(name, model, "chat.completion"), contents, answers, num_prompt)


def completion_reply(
    name: str, model: str, answers: list[Answer], num_prompt: int
) -> dict[str, Any]:
    contents = [{"text": a.text, "logprobs": _log_probs(a, completion_log_probs)} for a in answers]
    return _reply(_head(name, model, "text_completion"), contents, answers, num_prompt)


def _reply(
    head: dict[str, Any], contents: list[dict[str, Any]], answers: list[Answer], num_prompt: int
) -> dict[str, Any]:
    choices = [
        {"index": i, **content, **a.end()}
        for i, (content, a) in enumerate(zip(contents, answers, strict=True))
    ]
    first = answers[0]
    weights = {"weight_version": first.weight_version, "weight_versions": first.weight_versions}
    return {**head, "choices": choices, "usage": usage(num_prompt, answers), "metadata": weights}


def chat_chunk(
    name: str, model: str, index: int, delta: dict[str, Any], answer: Answer | None = None
) -> dict[str, Any]:
    """Return one chunk of a stream; with the finished `answer` it is the last."""
    head = _head(name, model, "chat.completion.chunk")
    return _chunk(head, {"index": index, "delta": delta}, answer)


def completion_chunk(
    name: str, model: str, index: int, text: str, answer: Answer | None = None
) -> dict[str, Any]:
    return _chunk(_head(name, model, "text_completion"), {"index": index, "text": text}, answer)


def _chunk(head: dict[str, Any], content: dict[str, Any], answer: Answer | None) -> dict[str, Any]:
    end = {"finish_reason": None} if answer is None else answer.end()
    return {**head, "choices": [{**content, "logprobs": None, **end}], "usage": None}


def usage_chunk(
    name: str, model: str, kind: str, num_prompt: int, answers: list[Answer]
) -> dict[str, Any]:
    return {**_head(name, model, kind), "choices": [], "usage": usage(num_prompt, answers)}


def tool_call_deltas(calls: list[ToolCall]) -> list[dict[str, Any]]:
    return [{"index": number, **call.to_json()} for number, call in enumerate(calls)]


def chat_log_probs(tokens: list[TokenLogProb]) -> dict[str, Any]:
    return {"content": [token.to_json() for token in tokens], "refusal": None}


def completion_log_probs(tokens: list[TokenLogProb], position: int = 0) -> dict[str, Any]:
    """Return the log-probs of `tokens`, the first of which begins at `position` of the text."""
    offsets = []
    for entry in tokens:
        offsets.append(position)
        position += len(entry.token)
    return {
        "text_offset": offsets,
        "tokens": [entry.token for entry in tokens],
        "token_logprobs": [entry.log_prob for entry in tokens],
        "top_logprobs": [_by_token(entry) for entry in tokens]
        if tokens and tokens[0].top
        else None,
    }


def _by_token(entry: TokenLogProb) -> dict[str, float]:
    """Return the most likely tokens and, as OpenAI does, the sampled one; equal texts keep the higher log-prob."""
    rows = sorted([*entry.top, entry], key=lambda row: row.log_prob)
    return {row.token: row.log_prob for row in rows}


def usage(num_prompt: int, answers: list[Answer]) -> dict[str, Any]:
    generated = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": generated,
        "total_tokens": num_prompt + generated,
        "prompt_tokens_details": None,
    }


def _head(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _log_probs(
    answer: Answer, as_json: Callable[[list[TokenLogProb]], dict[str, Any]]
) -> dict[str, Any] | None:
    return None if answer.log_probs is None else as_json(answer.log_probs)


def _key(call: dict[str, Any]) -> tuple[Any, ...]:
    function = call.get("function") or {}
    return call.get("id"), function.get("name"), _loads(function.get("arguments"))


def _parse(text: str, call_id: str) -> ToolCall | None:
    made = _loads(text)
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        return None
    arguments = made.get("arguments", made.get("parameters", {}))
    arguments = (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
    return ToolCall(id=call_id, name=made["name"], arguments=arguments)


def _loads(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
