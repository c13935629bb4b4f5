"""Tool calls in text, streams that take nothing back, and what follows an answer."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.data.openai_encode import check_template_kwargs, render_after_answer
from slime.data.openai_replies import Answer, parse_tool_calls, same_calls
from slime.data.openai_requests import (
    _REFUSED,
    _SAMPLING,
    ApiError,
    parse_chat,
    parse_completion,
)
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


# A value of each field of the table in docs/engines.md that is not what leaving it out means.
VALUES = {
    "messages": [{"role": "user", "content": "b"}], "prompt": "b", "model": "m", "max_tokens": 5,
    "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.5, "n": 2, "seed": 1, "stop": "x",
    "presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"1": 2}, "stream": True,
    "stream_options": {"include_usage": True}, "logprobs": 1, "top_logprobs": 2,
    "tools": [{"type": "function"}], "tool_choice": "none", "parallel_tool_calls": False,
    "functions": [{}], "function_call": "auto", "response_format": {"type": "json_object"},
    "regex": "a", "ebnf": "a", "json_schema": "{}", "echo": True, "suffix": "a", "best_of": 2,
    "audio": {"voice": "a"}, "modalities": ["audio"], "prediction": {"type": "content"},
    "web_search_options": {"a": 1}, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
    "stop_token_ids": [1], "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False,
    "lora_path": "a", "chat_template_kwargs": {"a": 1}, "user": "u", "store": True,
    "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low",
}  # fmt: skip


def documented_fields() -> list[tuple[str, str, str]]:
    """(field, chat, completions) of each row of the table."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    table = page.split("## OpenAI routes of the embedded engine")[1].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]
    return [
        (name.strip(" `"), chat.strip(), completions.strip())
        for names, chat, completions in rows
        for name in names.split(",")
    ]


def test_every_field_that_is_parsed_is_documented():
    documented = {name for name, *_ in documented_fields()}
    assert documented == set(VALUES) and documented >= {*_SAMPLING, *_REFUSED}


@pytest.mark.parametrize(("name", "chat", "completions"), documented_fields())
def test_the_table_of_fields_is_true(name, chat, completions):
    base = {
        "messages": [{"role": "user", "content": "a"}], "prompt": "a",
        "tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": None,
    }  # fmt: skip
    for parse, state in ((parse_chat, chat), (parse_completion, completions)):
        body = {**base, name: VALUES[name]}
        if name == "top_logprobs" and parse is parse_chat:
            body["logprobs"] = True
        if state == "refused":
            with pytest.raises(ApiError, match=name):
                parse(body)
        else:
            assert (parse(body) != parse(base)) == (state == "yes"), state


def test_a_limit_that_is_null_is_not_given():
    chat = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": None}
    assert parse_chat({**chat, "max_tokens": 5}).max_tokens == 5


@pytest.mark.parametrize("stop", [5, "", [""], ["a", 1], {"a": "b"}, True])
def test_a_stop_that_is_no_text_is_refused(stop):
    with pytest.raises(ApiError, match="`stop`"):
        parse_chat({"messages": [{"role": "user", "content": "a"}], "stop": stop})


def nested(depth: int) -> dict:
    value: dict = {"type": "object"}
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [nested(400)]},
        {"chat_template_kwargs": nested(400)},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(400)}}},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"arguments": nested(400)}}]}
            ]
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_body_that_is_nested_too_deep_is_refused(fields):
    with pytest.raises(ApiError, match="nested"):
        parse_chat({"messages": [{"role": "user", "content": "a"}], **fields})
    parse_chat({"messages": [{"role": "user", "content": "a"}], "tools": [nested(20)]})
