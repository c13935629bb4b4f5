"""OpenAI's routes of the embedded engine, called by the real `openai` client."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai")

from tests.engines import engine_server  # noqa: E402
from tests.tiny import make_byte_tokenizer, make_tiny_checkpoint  # noqa: E402

TOKENIZER = make_byte_tokenizer()
MESSAGES = [{"role": "system", "content": "Say: "}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("openai") / "model")
    with engine_server(model) as running:
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
    with pytest.raises(openai.BadRequestError, match="`top_logprobs` is not supported"):
        client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model="m", messages=MESSAGES, response_format={"type": "json_object"}
        )


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id
