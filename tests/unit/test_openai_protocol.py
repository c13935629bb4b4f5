"""Tool calls in text, streams that take nothing back, and what follows an answer."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest

from slime.data.openai_encode import check_template_kwargs, render_after_answer
from slime.data.openai_replies import Answer, parse_tool_calls, same_calls
from slime.data.openai_requests import ApiError, parse_chat
from slime.engine.server.openai_routes import TextStream
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


DEGENERATE = {
    "newlines after an open call": lambda n: "<tool_call>" + "\n" * n,
    "open calls": lambda n: "<tool_call>" * (n // 11),
    "closed calls": lambda n: "</tool_call>" * (n // 12),
    "empty calls": lambda n: "<tool_call></tool_call>" * (n // 23),
    "calls with spaces": lambda n: ("<tool_call>" + " " * 100 + "</tool_call>") * (n // 123),
    "beginnings of calls": lambda n: "<tool_call" * (n // 10),
    "newlines": lambda n: "\n" * n,
    "open brackets in a call": lambda n: "<tool_call>" + "[" * n + "</tool_call>",
    "digits in a call": lambda n: "<tool_call>" + "1" * n + "</tool_call>",
    "quotes in a call": lambda n: "<tool_call>" + '"\\' * (n // 2) + "</tool_call>",
    "one stop string over and over": lambda n: "STOP" * (n // 4),
    "beginnings of a stop string": lambda n: "STO" * (n // 3),
    "half characters": lambda n: "\ufffd" * n,
}


def seconds(work: Callable[[], object]) -> float:
    """The least of a few runs."""
    times = []
    for _ in range(5):
        start = time.thread_time()  # what other processes take does not count
        work()
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("kind", DEGENERATE)
def test_time_is_linear_in_the_models_text(kind):
    """Eight times the text may take eight times the time, and as much again for noise."""
    make = DEGENERATE[kind]
    stops = ("STOP", "</end>")

    def stream(text: str) -> Callable[[], str]:
        return lambda: TextStream(stops, hold_tool_calls=True).push(text, None)

    small, large = make(25_000), make(200_000)
    for of in (lambda text: lambda: parse_tool_calls(text, "x"), stream):
        assert seconds(of(large)) < 16 * seconds(of(small)) + 0.01


def test_a_call_that_is_not_json_stays_and_the_next_is_found():
    text = f"a\n<tool_call>{{bad</tool_call>\n{CALL}\nb<tool_call>{{open"
    rest, calls = parse_tool_calls(text, "x")
    assert rest == "a\n<tool_call>{bad</tool_call>\nb<tool_call>{open"
    assert [call.name for call in calls] == ["add"]


def test_template_variables_are_read_from_the_template():
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = (
        "{% set ns = namespace(x=1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% continue %}{% endif %}"
        "{% if enable_thinking is defined %}{{ custom }}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ strftime_now('%d') }}{% if tools %}{{ tools }}{% endif %}{{ documents }}"
    )
    check_template_kwargs(tokenizer, {"enable_thinking": False, "custom": "x"})
    for name in (
        "chat_template",
        "tools",
        "documents",
        "bos_token",
        "ns",
        "m",
        "other",
        "conversation",
    ):
        with pytest.raises(ApiError, match=f"must not have the key '{name}'"):
            check_template_kwargs(tokenizer, {name: 1})
    with pytest.raises(ApiError, match="`chat_template_kwargs` must be an object"):
        parse_chat({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": ["a"]})
