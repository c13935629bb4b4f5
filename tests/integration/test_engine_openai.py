"""OpenAI's routes of the embedded engine, called by the real `openai` client."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai")

from tests.engines import engine_server  # noqa: E402
from tests.tiny import make_byte_tokenizer, make_tiny_checkpoint  # noqa: E402

TOKENIZER = make_byte_tokenizer()
MESSAGES = [{"role": "system", "content": "Say: "}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("openai") / "model")


@pytest.fixture(scope="module")
def server(model_path):
    with engine_server(model_path) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0)


def direct(server, text, count, **params):
    """The same through /generate: what the other routes must agree with."""
    body = {
        "input_ids": TOKENIZER.encode(text),
        "sampling_params": {"max_new_tokens": count, "temperature": 0, **params},
        "return_logprob": True,
    }
    return server.post("/generate", body)


def test_chat_is_the_template_and_generate(server, client):
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True
    )
    expected = direct(server, "Say: hello", 12)
    choice = reply.choices[0]
    assert choice.message.content == expected["text"] and choice.message.role == "assistant"
    assert choice.finish_reason == expected["meta_info"]["finish_reason"]["type"]
    entries = choice.logprobs.content
    wanted = [entry[0] for entry in expected["meta_info"]["output_token_logprobs"]]
    assert [e.logprob for e in entries] == pytest.approx(wanted, abs=1e-5)
    assert [e.token for e in entries] == [TOKENIZER.decode([t]) for t in expected["output_ids"]]
    assert reply.usage.prompt_tokens == len("Say: hello")
    assert reply.usage.completion_tokens == len(expected["output_ids"])
    assert reply.model == "tiny" and reply.id.startswith("chatcmpl-")
    assert reply.metadata["weight_versions"][0]["start"] == 0


def test_completions_of_text_ids_and_several_prompts(server, client):
    expected = direct(server, "hello", 6)
    for prompt in ("hello", TOKENIZER.encode("hello")):
        reply = client.completions.create(
            model="m", prompt=prompt, max_tokens=6, temperature=0, logprobs=1
        )
        assert reply.choices[0].text == expected["text"]
        assert len(reply.choices[0].logprobs.token_logprobs) == len(expected["output_ids"])
    both = client.completions.create(
        model="m", prompt=["hello", "abc"], max_tokens=6, temperature=0
    )
    assert [c.text for c in both.choices] == [expected["text"], direct(server, "abc", 6)["text"]]
    assert [c.index for c in both.choices] == [0, 1]


def test_streams_add_up_to_the_whole(server, client):
    whole = direct(server, "Say: hello", 20)
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=20, temperature=0, stream=True, logprobs=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole["text"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    log_probs = [e.logprob for c in chunks if c.choices and c.choices[0].logprobs
                 for e in c.choices[0].logprobs.content]  # fmt: skip
    assert len(log_probs) == len(whole["output_ids"])
    assert chunks[-1].usage.completion_tokens == len(whole["output_ids"])
    stream = client.completions.create(
        model="m", prompt="Say: hello", max_tokens=20, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == whole["text"]


def test_completions_stream_log_probs(client):
    """The chunks' columns, put together, are those of the reply without a stream."""
    options = {"model": "m", "prompt": "hello", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**options).choices[0].logprobs
    parts = [
        chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)
    ]
    assert len(parts) > 1
    for name in ("tokens", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)
    values = [value for part in parts for value in part.token_logprobs]
    assert values == pytest.approx(whole.token_logprobs, abs=1e-5)


def test_stop_strings_are_left_out_also_in_streams(server, client):
    whole = direct(server, "Say: hello", 20)["text"]
    stop = whole[6:8]
    cut = whole[: whole.index(stop)]
    options = {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 20,
        "temperature": 0,
        "stop": [stop],
    }
    reply = client.chat.completions.create(**options)
    assert reply.choices[0].message.content == cut and reply.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == cut


def test_several_choices_and_seeds(client):
    options = {"model": "m", "messages": MESSAGES, "max_tokens": 8, "temperature": 1.0, "seed": 5}
    first = client.chat.completions.create(**options, n=3)
    again = client.chat.completions.create(**options, n=3)
    texts = [c.message.content for c in first.choices]
    assert len(texts) == 3 and len(set(texts)) > 1
    assert texts == [c.message.content for c in again.choices]


def test_mistakes_are_errors_of_the_api(client):
    with pytest.raises(openai.BadRequestError, match="context length") as caught:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x" * 600}], max_tokens=4
        )
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="`messages` must be a non-empty list"):
        client.chat.completions.create(model="m", messages=[])
    with pytest.raises(openai.BadRequestError, match="`top_logprobs` must be an integer from 0 to"):
        client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, top_logprobs=21)
    with pytest.raises(openai.BadRequestError, match="`top_logprobs` needs `logprobs`"):
        client.chat.completions.create(model="m", messages=MESSAGES, top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="`model` may have at most 8192 characters"):
        client.chat.completions.create(model="m" * 8193, messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model="m", messages=MESSAGES, response_format={"type": "grammar"}
        )


def test_top_log_probs_are_those_of_transformers(server, client, model_path):
    """Greedy, with two more likely tokens than asked for by the other route, in streams too."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"model": "m", "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(
        **options, messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    text = "Say: hello"
    completion = client.completions.create(**options, prompt=text, logprobs=5)
    stream = client.completions.create(**options, prompt=text, logprobs=5, stream=True)
    streamed = [row for chunk in stream for row in chunk.choices[0].logprobs.top_logprobs or []]
    native = server.post("/generate", {
        "input_ids": TOKENIZER.encode(text), "return_logprob": True, "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0},
    })  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.tensor([TOKENIZER.encode(text) + native["output_ids"]])
    logits = model(ids).logits[0, len(text) - 1 : -1]
    values, tokens = torch.log_softmax(logits, dim=-1).topk(5)
    for i, entry in enumerate(chat.choices[0].logprobs.content):
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(
            values[i, :3].tolist(), abs=1e-4
        )
        assert [t.token for t in entry.top_logprobs] == [
            TOKENIZER.decode([t]) for t in tokens[i, :3]
        ]
        found = native["meta_info"]["output_top_logprobs"][i]
        assert [token for _, token, _ in found] == tokens[i, :2].tolist()
        # Bytes that are no text of their own share one: the most likely of them is named.
        texts = [TOKENIZER.decode([token]) for token in tokens[i]]
        wanted = dict(zip(reversed(texts), reversed(values[i].tolist()), strict=True))
        for rows in (completion.choices[0].logprobs.top_logprobs, streamed):
            assert rows[i] == pytest.approx(wanted, abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 10, "maximum": 99},
                   "kind": {"enum": ["even", "odd"]}},
    "required": ["sum", "kind"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1, 5])
def test_responses_follow_a_schema(server, client, temperature):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=200, temperature=temperature, n=3,
        response_format=form, seed=4,
    )  # fmt: skip
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    stream = client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=200, temperature=temperature, seed=4,
        response_format=form, stream=True,
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_constrained_token_has_the_log_prob_of_the_model_alone(server):
    """The log-probs of prompt tokens are computed without any constraint: those of a trainer."""
    pytest.importorskip("llguidance")
    params = {"max_new_tokens": 12, "temperature": 1, "regex": "[0-9]{3}-[a-f]{2}"}
    prompt = TOKENIZER.encode("hello")
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    reply = server.post("/generate", body)
    assert re.fullmatch(params["regex"], reply["text"])
    whole = {"input_ids": prompt + reply["output_ids"], "sampling_params": {"max_new_tokens": 1}}
    scored = server.post("/generate", {**whole, "return_logprob": True, "logprob_start_len": 0})
    wanted = [row[0] for row in scored["meta_info"]["input_token_logprobs"]][len(prompt) :]
    found = [row[0] for row in reply["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(wanted, abs=1e-4)


def test_json_objects_and_plain_requests_share_a_batch(server, client):
    pytest.importorskip("llguidance")
    alone = direct(server, "Say: hello", 12)["text"]

    def ask(number: int) -> str:
        form = {"type": "json_object"} if number % 2 else {"type": "text"}
        reply = client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=12, temperature=0, response_format=form
        )
        return reply.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(8)))
    assert texts[::2] == [alone] * 4
    assert all(text.startswith("{") for text in texts[1::2])


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id
