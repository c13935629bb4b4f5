"""/generate, asked of both engines in the same words."""

from __future__ import annotations

import itertools
import json
import urllib.request

import pytest

from slime.utils.engine_keys import key_headers
from tests.conformance.calls import GREEDY, flush, generate, refusal
from tests.conformance.conftest import LABEL
from tests.conformance.reference import greedy, log_probs
from tests.tiny import EOS_ID, make_byte_tokenizer

IDS = [10, 20, 30]


def test_text_and_ids_give_the_reply_of_the_model(subject):
    tokenizer = make_byte_tokenizer()
    ids = tokenizer.encode("hello wörld")
    by_text = generate(subject, text="hello wörld", sampling_params=GREEDY)
    by_ids = generate(subject, input_ids=ids, sampling_params=GREEDY)
    expected = greedy(subject.checkpoint, ids, 12)
    assert by_text["output_ids"] == by_ids["output_ids"] == expected
    assert by_text["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    meta = by_ids["meta_info"]
    assert meta["prompt_tokens"] == len(ids) and meta["completion_tokens"] == 12
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["weight_version"] == LABEL
    assert meta["weight_versions"] == [{"version": LABEL, "start": 0, "end": 12}]
    assert "output_token_logprobs" not in meta


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_model_at_that_temperature(subject, temperature):
    params = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
    reply = generate(subject, input_ids=IDS, sampling_params=params, return_logprob=True)
    output, meta = reply["output_ids"], reply["meta_info"]
    expected = log_probs(subject.checkpoint, IDS + output, temperature)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == output
    assert meta["output_token_logprobs_length"] == len(output) == 24
    for place, (value, token, text) in enumerate(meta["output_token_logprobs"]):
        assert abs(value - expected[len(IDS) + place - 1, token]) < 1e-4
        assert text is None


def test_log_probs_of_the_prompt(subject):
    ids = [5, 6, 7, 8]
    reply = generate(
        subject, input_ids=ids, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
    )
    entries = reply["meta_info"]["input_token_logprobs"]
    assert entries[0] == [None, 5, None]
    expected = log_probs(subject.checkpoint, ids)
    for place, (value, token, _) in enumerate(entries[1:], start=1):
        assert token == ids[place]
        assert abs(value - expected[place - 1, token]) < 1e-4


def test_a_prompt_is_scored_without_generating(subject):
    reply = generate(
        subject,
        input_ids=[1, 2, 3, 4],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert reply["output_ids"] == []
    assert len(reply["meta_info"]["input_token_logprobs"]) == 4


def test_a_batch_answers_in_order_with_its_own_parameters(subject):
    prompts = [[1, 2, 3], [4, 5], [6]]
    params = [{**GREEDY, "max_new_tokens": count} for count in (2, 5, 3)]
    replies = generate(subject, input_ids=prompts, sampling_params=params, rid=["x", "y", "z"])
    assert [reply["meta_info"]["id"] for reply in replies] == ["x", "y", "z"]
    for prompt, param, reply in zip(prompts, params, replies, strict=True):
        assert reply["output_ids"] == greedy(subject.checkpoint, prompt, param["max_new_tokens"])


def test_several_samples_of_one_prompt(subject):
    params = {"n": 3, "max_new_tokens": 12, "ignore_eos": True}
    replies = generate(subject, text="abc", sampling_params=params)
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 3


def test_stop_tokens_end_a_response_and_belong_to_it(subject):
    expected = greedy(subject.checkpoint, IDS, 12)
    stop_id = expected[4]
    params = {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [stop_id]}
    reply = generate(subject, input_ids=IDS, sampling_params=params)
    assert reply["output_ids"] == expected[: expected.index(stop_id) + 1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}


def test_stop_strings_are_cut_off_unless_asked_for(subject):
    a, b = make_byte_tokenizer().encode("ab")
    spell = {
        "temperature": 0,
        "max_new_tokens": 12,
        "logit_bias": {str(a): 100, str(b): 99.5},
        "frequency_penalty": 2,
    }
    plain = generate(subject, input_ids=IDS, sampling_params=spell)["text"]
    assert set(plain) == {"a", "b"}
    cut = generate(subject, input_ids=IDS, sampling_params={**spell, "stop": ["zz", "ba"]})
    assert cut["text"] == plain[: plain.index("ba")]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ba"}
    keep = {**spell, "stop": "ba", "no_stop_trim": True}
    assert generate(subject, input_ids=IDS, sampling_params=keep)["text"] == cut["text"] + "ba"


def test_the_end_of_text(subject):
    to_end = {"temperature": 0, "max_new_tokens": 6, "logit_bias": {str(EOS_ID): 1000}}
    ended = generate(subject, input_ids=IDS, sampling_params=to_end)
    assert ended["output_ids"] == [EOS_ID] and ended["text"] == ""
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    ignoring = generate(subject, input_ids=IDS, sampling_params={**to_end, "ignore_eos": True})
    assert ignoring["output_ids"] == [EOS_ID] * 6
    later = generate(subject, input_ids=IDS, sampling_params={**to_end, "min_new_tokens": 3})
    assert later["output_ids"].index(EOS_ID) == 3 and len(later["output_ids"]) == 4


def test_a_stream_is_cumulative_and_ends_with_done(subject):
    body = json.dumps({"input_ids": IDS, "sampling_params": GREEDY, "stream": True}).encode()
    url = f"{subject.server.url}/generate"
    headers = {"Content-Type": "application/json", **key_headers(url)}
    call = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(call) as response:
        lines = response.read().decode().split("\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    for earlier, later in itertools.pairwise(chunks):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    assert chunks[-1]["output_ids"] == greedy(subject.checkpoint, IDS, 12)
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_a_prefix_is_cached_until_the_cache_is_flushed(subject):
    prompt = list(range(40, 80))
    cached = []
    for flushed in (True, False, True):
        if flushed:
            flush(subject)
        reply = generate(subject, input_ids=prompt, sampling_params=GREEDY)
        assert reply["output_ids"] == greedy(subject.checkpoint, prompt, 12)
        cached.append(reply["meta_info"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert 32 <= cached[1] < 40  # whole pages of it, and never the last token


def test_mistakes_are_named(subject):
    ids = {"input_ids": [1, 2]}
    assert "unknown field `foo`, expected one of" in refusal(
        subject, **ids, sampling_params={"foo": 1}
    )
    context, count = subject.context, subject.context + 88
    text = refusal(subject, input_ids=[1] * count)
    told = (
        f"The input ({count} tokens) is longer than the model's context length ({context} tokens)."
    )
    assert told in text
    refusal(subject)
    refusal(subject, input_ids=[[1], [2]], rid=["a", "a"])
    refusal(subject, **ids, sampling_params={"temperature": -1})
    refusal(subject, **ids, sampling_params={"top_p": 2})
    # unknown keys at the top are ignored
    assert generate(subject, **ids, sampling_params=GREEDY, colour="blue")["output_ids"]


def test_a_session_may_be_named(subject):
    reply = generate(subject, input_ids=IDS, sampling_params=GREEDY, routing_key="s-1")
    assert reply["output_ids"] == greedy(subject.checkpoint, IDS, 12)
