"""Replies of /v1/chat/completions and /v1/completions, whole or as chunks of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from slime.data.openai.tool_calls import ToolCall

# the engine's finish reason -> OpenAI's
_FINISH = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(kw_only=True, frozen=True)
class TokenLogProb:
    token: str
    log_prob: float

    def to_json(self) -> dict[str, Any]:
        raw = list(self.token.encode(errors="replace"))
        return {"token": self.token, "bytes": raw, "logprob": self.log_prob, "top_logprobs": []}


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

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls and self.finish == "stop" else _FINISH[self.finish]

    def message(self) -> dict[str, Any]:
        calls = [call.to_json() for call in self.calls]
        content = self.text if self.text or not calls else None
        message = {"role": "assistant", "content": content, "reasoning_content": None}
        return {**message, "tool_calls": calls or None}


def chat_reply(name: str, model: str, answers: list[Answer], num_prompt: int) -> dict[str, Any]:
    choices = [
        {
            "index": number,
            "message": answer.message(),
            "logprobs": _chat_log_probs(answer),
            "finish_reason": answer.finish_reason,
            "matched_stop": answer.matched,
        }
        for number, answer in enumerate(answers)
    ]
    return {
        **_head(name, model, "chat.completion"),
        "choices": choices,
        "usage": usage(num_prompt, answers),
        "metadata": _weights(answers),
    }


def completion_reply(
    name: str, model: str, answers: list[Answer], num_prompt: int
) -> dict[str, Any]:
    choices = [
        {
            "index": number,
            "text": answer.text,
            "logprobs": _completion_log_probs(answer),
            "finish_reason": answer.finish_reason,
            "matched_stop": answer.matched,
        }
        for number, answer in enumerate(answers)
    ]
    return {
        **_head(name, model, "text_completion"),
        "choices": choices,
        "usage": usage(num_prompt, answers),
        "metadata": _weights(answers),
    }


def chat_chunk(
    name: str, model: str, index: int, delta: dict[str, Any], answer: Answer | None = None
) -> dict[str, Any]:
    """Return one chunk of a stream; with the finished `answer` it is the last."""
    choice: dict[str, Any] = {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None,
    }
    if answer is not None:
        choice |= {"finish_reason": answer.finish_reason, "matched_stop": answer.matched}
    return {**_head(name, model, "chat.completion.chunk"), "choices": [choice], "usage": None}


def completion_chunk(
    name: str, model: str, index: int, text: str, answer: Answer | None = None
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    if answer is not None:
        choice |= {"finish_reason": answer.finish_reason, "matched_stop": answer.matched}
    return {**_head(name, model, "text_completion"), "choices": [choice], "usage": None}


def usage_chunk(
    name: str, model: str, kind: str, num_prompt: int, answers: list[Answer]
) -> dict[str, Any]:
    return {**_head(name, model, kind), "choices": [], "usage": usage(num_prompt, answers)}


def tool_call_deltas(calls: list[ToolCall]) -> list[dict[str, Any]]:
    return [{"index": number, **call.to_json()} for number, call in enumerate(calls)]


def chat_log_probs(tokens: list[TokenLogProb]) -> dict[str, Any]:
    return {"content": [token.to_json() for token in tokens], "refusal": None}


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


def _weights(answers: list[Answer]) -> dict[str, Any]:
    first = answers[0]
    return {"weight_version": first.weight_version, "weight_versions": first.weight_versions}


def _chat_log_probs(answer: Answer) -> dict[str, Any] | None:
    return None if answer.log_probs is None else chat_log_probs(answer.log_probs)


def _completion_log_probs(answer: Answer) -> dict[str, Any] | None:
    if answer.log_probs is None:
        return None
    offsets, position = [], 0
    for entry in answer.log_probs:
        offsets.append(position)
        position += len(entry.token)
    return {
        "text_offset": offsets,
        "tokens": [entry.token for entry in answer.log_probs],
        "token_logprobs": [entry.log_prob for entry in answer.log_probs],
        "top_logprobs": None,
    }
