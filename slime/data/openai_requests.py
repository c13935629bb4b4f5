"""Parse and check the bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # role, content, tool_calls, tool_call_id, name: the client's JSON

# OpenAI's name -> the engines' sampling parameter
_SAMPLING = {
    "seed": "sampling_seed",
    "min_tokens": "min_new_tokens",
    **{
        name: name
        for name in (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "stop", "stop_token_ids", "n", "ignore_eos",
            "skip_special_tokens", "logit_bias", "regex", "json_schema",
        )
    },
}  # fmt: skip
_MAX_TOP_LOG_PROBS = 20
_MAX_DEPTH = 64  # of a body's values: what walks them recursively must not exceed Python's limit
_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Parameters that raise an error rather than being ignored.
_REFUSED = (
    "functions", "function_call", "audio", "modalities", "prediction", "web_search_options",
    "suffix", "best_of", "echo", "ebnf",
)  # fmt: skip


class ApiError(Exception):
    """An error reply with this HTTP status."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": None, "code": self.code},
            "object": "error",
            "message": str(self),
        }


@dataclass(kw_only=True)
class ApiRequest:
    """Fields of both routes; `sampling` has the engines' names and only the values given."""

    model: str
    sampling: dict[str, Any]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    log_probs: bool
    num_top_log_probs: int = 0  # most likely tokens to return beside each token
    lora_path: str | None = None  # SGLang's: the LoRA adapter


@dataclass(kw_only=True)
class ChatRequest(ApiRequest):
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)  # URLs of the image parts, in order


@dataclass(kw_only=True)
class CompletionRequest(ApiRequest):
    """Prompts as text or token ids; the reply has one choice for each."""

    prompts: list[str] | list[list[int]]


def parse_chat(body: Any, *, images: bool = False) -> ChatRequest:
    """Parse a body; with `images`, messages may have parts of type image_url."""
    urls: list[str] | None = [] if images else None
    common = _parse_common(body, log_probs=bool)
    common["num_top_log_probs"] = count = _top_log_probs(body, "top_logprobs")
    if count and not common["log_probs"]:
        raise ApiError("`top_logprobs` needs `logprobs`: true")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("`messages` must be a non-empty list")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(f"messages[{number}] must be an object with a role")
        if not _ROLE.fullmatch(message["role"]):  # templates write it between control tokens
            raise ApiError(f"messages[{number}]: a role is a word of letters, digits, `_` and `-`")
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none", None):
        raise ApiError(f"`tool_choice` {choice!r} is not supported: use auto or none")
    tools = body.get("tools") if choice != "none" else None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ApiError("`tools` must be a list of objects")
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise ApiError("`chat_template_kwargs` must be an object")
    return ChatRequest(
        messages=[plain_message(message, urls) for message in messages],
        tools=tools or [],
        template_kwargs=kwargs,
        images=urls or [],
        **common,
    )


def parse_completion(body: Any) -> CompletionRequest:
    common = _parse_common(body, log_probs=lambda value: value is not None and value is not False)
    common["num_top_log_probs"] = _top_log_probs(body, "logprobs")
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (_is_ids(prompt)):
        prompts = [prompt]
    elif (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(p, str) or _is_ids(p) for p in prompt)
    ):
        prompts = prompt
    else:
        raise ApiError("`prompt` must be a text, a list of token ids, or a list of either")
    return CompletionRequest(prompts=prompts, **common)


def plain_message(message: Message, urls: list[str] | None = None) -> Message:
    """Return the message with its text parts joined and without empty fields.

    Image parts become {"type": "image"} and their URLs are appended to `urls`; None: no images allowed.
    """
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise ApiError("the content of a message must be a text or a list of text parts")
    if isinstance(content, list) and urls is not None and any(map(_is_image, content)):
        content = [_image_or_text(part, urls) for part in content]
    elif isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ApiError("only text content is supported")
        content = "".join(text or "" for text in texts)
    kept = {name: message[name] for name in _KEPT if message.get(name)}
    calls = kept.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise ApiError("`tool_calls` must be a list of objects with a `function`")
    return {"role": message["role"], "content": content or "", **kept}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _image_or_text(part: Any, urls: list[str]) -> dict[str, str]:
    if _is_image(part):
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str):
            raise ApiError('an image must be {"type": "image_url", "image_url": {"url": DATA_URI}}')
        urls.append(url)
        return {"type": "image"}
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ApiError("the parts of a message must be texts and images")
    return {"type": "text", "text": text}


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")


def _parse_common(body: Any, *, log_probs: Callable[[Any], bool]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    _check_depth(body)
    for name in _REFUSED:
        if body.get(name) not in (None, False, 0, "", [], {}, 1 if name == "best_of" else None):
            raise ApiError(f"`{name}` is not supported")
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"))
    max_tokens = next((limit for limit in limits if limit is not None), None)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ApiError("`max_tokens` must be an integer above 0")
    stops = body.get("stop")
    for stop in stops if isinstance(stops, list) else [stops]:
        if not (isinstance(stop, str) and stop) and stops is not None:
            raise ApiError("`stop` must be a text that is not empty, or a list of such texts")
    lora_path = body.get("lora_path")
    if lora_path is not None and not isinstance(lora_path, str):
        raise ApiError("`lora_path` must be the name of an adapter")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError("`stream_options` must be an object")
    given = {parameter: body.get(name) for name, parameter in _SAMPLING.items()}
    sampling = {parameter: value for parameter, value in given.items() if value is not None}
    return {
        "model": str(body.get("model") or ""),
        "sampling": sampling | _constraint(body.get("response_format")),
        "max_tokens": max_tokens,
        "stream": bool(body.get("stream")),
        "include_usage": bool(options.get("include_usage")),
        "log_probs": log_probs(body.get("logprobs")),
        "lora_path": lora_path,
    }


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        inside = (
            v for value in level for v in (value.values() if isinstance(value, dict) else value)
        )
        level = [value for value in inside if isinstance(value, dict | list)]
    if level:
        raise ApiError(f"the body is nested more than {_MAX_DEPTH} deep")


def _constraint(response_format: Any) -> dict[str, str]:
    """Return the sampling parameter for a `response_format`; SGLang takes schemas as JSON texts."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    given = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        raise ApiError(
            "`response_format` must have the type text, json_object, or json_schema with a `json_schema` "
            "that has a `schema`"
        )
    return {"json_schema": json.dumps(given["schema"])}


def _top_log_probs(body: dict[str, Any], name: str) -> int:
    count = body.get(name)
    if count is None or isinstance(count, bool):
        return 0
    if type(count) is not int or not 0 <= count <= _MAX_TOP_LOG_PROBS:
        raise ApiError(f"`{name}` must be an integer from 0 to {_MAX_TOP_LOG_PROBS}")
    return count


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
