"""Tool calls in text, streams that take nothing back, and what follows an answer."""

from __future__ import annotations

import json
import random

import pytest

from slime.engine.openai_stream import TextStream
from slime.utils.openai.render import render_after_answer
from slime.utils.openai.replies import Answer
from slime.utils.openai.requests import ApiError, parse_chat
from slime.utils.openai.tool_calls import parse_tool_calls, same_calls
from tests.tiny import make_byte_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_calls_are_taken_out_of_the_text():
    text, calls = parse_tool_calls(f"Let me add.\n{CALL}\n{CALL}", "x")
    assert text == "Let me add."
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("add", {"a": 1, "b": [2]})] * 2
    assert [c.id for c in calls] == ["call_x_0", "call_x_1"]


@pytest.mark.parametrize(
    "text", ["no call", "<tool_call>{bad json}</tool_call>", "<tool_call>", "", "[1]"]
)
def test_text_without_a_call_stays(text):
    assert parse_tool_calls(text, "x") == (text, [])


def test_calls_compare_by_value():
    one = [{"id": "a", "function": {"name": "f", "arguments": '{"x": 1, "y": 2}'}}]
    other = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"y":2,"x":1}'}}
    ]
    assert same_calls(one, other) and not same_calls(one, [])
    assert same_calls(None, [])


@pytest.mark.parametrize("seed", range(30))
def test_streams_take_nothing_back(seed):
    """Text that grows by random steps, with stop strings and calls in it at random places."""
    dice = random.Random(seed)
    body = "".join(dice.choice(["ab", "<", "<t", "STO", "x ", "é"]) for _ in range(30))
    end = dice.choice(["", "STOP"])
    call = dice.choice(["", f"\n{CALL}"]) if not end else ""
    full = body.split("STOP")[0] + call
    stops = ("STOP",)
    text, calls = parse_tool_calls(full, "x")
    answer = Answer(text=text, finish="stop", num_tokens=1, calls=calls)
    stream, sent, position = TextStream(stops, hold_tool_calls=True), "", 0
    shown = full + end
    while position < len(shown):
        position += dice.randint(1, 4)
        sent += stream.push(shown[:position], None)
        assert text.startswith(sent)
    assert sent + stream.push(full, answer) == text


def test_what_follows_an_answer_does_not_depend_on_the_answer():
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = CHATML
    history = [{"role": "user", "content": "q"}]
    text = render_after_answer(tokenizer, history, [{"role": "tool", "content": "5"}], {})
    assert text == "<|end|>\n<|tool|>5<|end|>\n<|assistant|>"


def test_stream_options_of_another_kind_are_refused():
    with pytest.raises(ApiError, match="`stream_options` must be an object"):
        parse_chat({"messages": [{"role": "user", "content": "a"}], "stream_options": 5})


def test_messages_are_made_plain():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = parse_chat({"messages": [{"role": "user", "content": parts, "name": None}]})
    assert asked.messages == [{"role": "user", "content": "ab"}]
    with pytest.raises(ApiError, match="only text"):
        parse_chat({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    for body in ([], {"messages": "x"}, {"messages": [{"content": "x"}]}, {"messages": [1]}):
        with pytest.raises(ApiError):
            parse_chat(body)
