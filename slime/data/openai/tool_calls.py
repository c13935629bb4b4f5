"""Parse tool calls in the text of a response, in the format of Qwen's and Hermes' templates.

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    """Return the text without its calls, and the calls; one that is not JSON stays in the text.

    The marks are found with `str.find`, so that the time is linear in the text: a regular expression
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
