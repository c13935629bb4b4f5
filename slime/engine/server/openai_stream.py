"""The growing text of a response as parts that never have to be taken back."""

from __future__ import annotations

from slime.data.openai.replies import Answer

_TOOL_CALL = "<tool_call>"


class TextStream:
    """`push` takes all the text so far and gives what may be sent now.

    Held back: half a character, what may turn out to be the start of a stop string, and everything
    from a tool call on, which is sent as a call and not as text.
    """

    def __init__(self, stops: tuple[str, ...], *, hold_tool_calls: bool) -> None:
        self._marks = (*stops, _TOOL_CALL) if hold_tool_calls else stops
        self._hold_tool_calls = hold_tool_calls
        self._sent = ""

    def push(self, text: str, answer: Answer | None) -> str:
        """`answer`: the finished one, whose text is final."""
        if answer is not None:
            final = answer.text
            part = final[len(self._sent) :] if final.startswith(self._sent) else ""
        else:
            part = self._safe(text)[len(self._sent) :]
        self._sent += part
        return part

    def _safe(self, text: str) -> str:
        if self._hold_tool_calls and _TOOL_CALL in text:
            return text[: text.index(_TOOL_CALL)].rstrip()
        text = text.rstrip("\ufffd")
        held = max((_overlap(text, mark) for mark in self._marks), default=0)
        text = text[: len(text) - held] if held else text
        return text.rstrip() if self._hold_tool_calls else text


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` are the beginning of `mark`."""
    for size in range(min(len(mark), len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
