"""The engine's HTTP, route by route, as SGLang's protocol has it."""

from __future__ import annotations

import itertools
import json
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.utils.engine_keys import key_headers
from slime.utils.sync_http import HttpError, get_json, post_json
from tests.engines import LONG_CONTEXT, ROOM, EngineServer, engine_server
from tests.tiny import EOS_ID, make_byte_tokenizer, make_tiny_checkpoint
from tests.waiting import wait_for

GREEDY = {"temperature": 0, "max_new_tokens": 16}
ENDLESS = {"temperature": 0, "max_new_tokens": LONG_CONTEXT - 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("m")
    return make_tiny_checkpoint(folder, max_position_embeddings=LONG_CONTEXT)


@pytest.fixture(scope="module")
def server(checkpoint: Path):
    with engine_server(checkpoint, "--weight-version", "v0", *ROOM) as server:
        yield server


def greedy(checkpoint: Path, ids: list[int], max_new_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    out = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(ids) :].tolist()


def generate(server: EngineServer, **body):
    return post_json(f"{server.url}/generate", body)


def refused(server: EngineServer, **body) -> tuple[int | None, str]:
    with pytest.raises(HttpError) as error:
        generate(server, **body)
    return error.value.status, str(error.value)


def test_text_and_ids_give_the_same_reply(server: EngineServer, checkpoint: Path):
    tokenizer = make_byte_tokenizer()
    ids = tokenizer.encode("hello wörld")
    by_text = generate(server, text="hello wörld", sampling_params=GREEDY)
    by_ids = generate(server, input_ids=ids, sampling_params=GREEDY)
    expected = greedy(checkpoint, ids, 16)
    assert by_text["output_ids"] == by_ids["output_ids"] == expected
    assert by_text["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    meta = by_ids["meta_info"]
    assert meta["prompt_tokens"] == len(ids) and meta["completion_tokens"] == 16
    assert meta["finish_reason"] == {"type": "length", "length": 16}
    assert meta["weight_version"] == "v0"
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 16}]
    assert "output_token_logprobs" not in meta


def test_log_probs_come_as_triples(server: EngineServer):
    reply = generate(
        server,
        input_ids=[5, 6, 7],
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
    )
    meta = reply["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5, 6, 7]
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    assert all(value <= 0 for value, *_ in meta["input_token_logprobs"][1:])
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["output_token_logprobs_length"] == len(reply["output_ids"])
    with_text = generate(
        server,
        input_ids=[5],
        sampling_params=GREEDY,
        return_logprob=True,
        return_text_in_logprobs=True,
    )
    tokenizer = make_byte_tokenizer()
    for _, token, text in with_text["meta_info"]["output_token_logprobs"]:
        assert text == tokenizer.decode([token])


def test_a_batch_answers_in_order_with_its_own_parameters(server: EngineServer):
    prompts = [[1, 2, 3], [4, 5], [6]]
    params = [{"temperature": 0, "max_new_tokens": n} for n in (2, 5, 3)]
    replies = generate(server, input_ids=prompts, sampling_params=params, rid="batch")
    assert [r["meta_info"]["id"] for r in replies] == ["batch_0", "batch_1", "batch_2"]
    for prompt, param, reply in zip(prompts, params, replies, strict=True):
        assert reply == {
            **reply,
            "output_ids": generate(server, input_ids=prompt, sampling_params=param)["output_ids"],
        }


def test_n_samples_of_one_prompt_differ_and_are_repeatable(server: EngineServer):
    params = {"n": 3, "sampling_seed": 1, "max_new_tokens": 12}
    first = generate(server, text="abc", sampling_params=params)
    again = generate(server, text="abc", sampling_params=params)
    outputs = [tuple(r["output_ids"]) for r in first]
    assert len(set(outputs)) == 3
    assert outputs == [tuple(r["output_ids"]) for r in again]


def test_stop_token_stop_string_and_end_of_text(server: EngineServer, checkpoint: Path):
    ids = [10, 20, 30]
    expected = greedy(checkpoint, ids, 16)
    stop_id = expected[4]
    stopped = generate(
        server, input_ids=ids, sampling_params={**GREEDY, "stop_token_ids": [stop_id]}
    )
    end = expected.index(stop_id) + 1
    assert stopped["output_ids"] == expected[:end]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}

    # Every token is allowed but one of each kind, so the output is known letter by letter.
    tokenizer = make_byte_tokenizer()
    a, b = tokenizer.encode("ab")
    spell = {
        **GREEDY,
        "logit_bias": {str(a): 100, str(b): 99.5},
        "frequency_penalty": 2,
        "max_new_tokens": 12,
    }
    plain = generate(server, input_ids=ids, sampling_params=spell)
    assert set(plain["text"]) == {"a", "b"}
    cut = generate(server, input_ids=ids, sampling_params={**spell, "stop": ["zz", "ba"]})
    assert cut["text"] == plain["text"][: plain["text"].index("ba")]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "ba"}
    kept = generate(
        server, input_ids=ids, sampling_params={**spell, "stop": "ba", "no_stop_trim": True}
    )
    assert kept["text"] == cut["text"] + "ba"

    to_end = {"temperature": 0, "max_new_tokens": 8, "logit_bias": {str(EOS_ID): 1000}}
    ended = generate(server, input_ids=ids, sampling_params=to_end)
    assert ended["output_ids"] == [EOS_ID] and ended["text"] == ""
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    ignoring = generate(server, input_ids=ids, sampling_params={**to_end, "ignore_eos": True})
    assert ignoring["output_ids"] == [EOS_ID] * 8
    later = generate(server, input_ids=ids, sampling_params={**to_end, "min_new_tokens": 3})
    assert len(later["output_ids"]) == 4 and later["output_ids"].index(EOS_ID) == 3


def test_no_new_tokens_still_gives_the_prompts_log_probs(server: EngineServer):
    reply = generate(
        server,
        input_ids=[1, 2, 3, 4],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert reply["output_ids"] == []
    assert len(reply["meta_info"]["input_token_logprobs"]) == 4


def test_stream_is_cumulative_and_ends_with_done(server: EngineServer):
    body = json.dumps({"input_ids": [1, 2], "sampling_params": GREEDY, "stream": True}).encode()
    url = f"{server.url}/generate"
    headers = {"Content-Type": "application/json", **key_headers(url)}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        events = [
            line[6:] for line in response.read().decode().split("\n") if line.startswith("data: ")
        ]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    for earlier, later in itertools.pairwise(chunks):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        assert earlier["meta_info"]["finish_reason"] is None
    whole = generate(server, input_ids=[1, 2], sampling_params=GREEDY)
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_mistakes_in_a_request_are_named(server: EngineServer):
    ids = {"input_ids": [1, 2]}
    status, text = refused(server, **ids, sampling_params={"foo": 1})
    assert status == 400 and '{"error":"unknown field `foo`, expected one of' in text
    status, text = refused(server, **ids, sampling_params={"ebnf": "a+"})
    assert status == 400 and "`ebnf` is not supported" in text
    status, text = refused(server, **ids, return_hidden_states=True)
    assert status == 400 and '{"error":{"message":"`return_hidden_states` is not supported' in text
    status, text = refused(server, **ids, return_routed_experts=True)
    assert status == 400 and "--enable-return-routed-experts" in text
    status, text = refused(server, input_ids=[1] * 66_000)
    assert status == 400
    assert (
        "The input (66000 tokens) is longer than the model's context length (65536 tokens)." in text
    )
    assert (
        "maximum context length of 65536 tokens"
        in refused(server, **ids, sampling_params={"max_new_tokens": 66_000})[1]
    )
    assert "exactly one of" in refused(server)[1]
    assert "exactly one of" in refused(server, text="a", input_ids=[1])[1]
    assert "vocabulary of 320" in refused(server, input_ids=[1, 320])[1]
    assert "vocabulary of 320" in refused(server, input_ids=[-1])[1]
    assert "input_ids" in refused(server, input_ids=[])[1]
    assert "`rid` has duplicates" in refused(server, input_ids=[[1], [2]], rid=["a", "a"])[1]
    long = "a" * 513  # each of 16384 samples would have a copy
    for rid in (long, ["a", long]):
        assert "`rid` may have at most 512" in refused(server, input_ids=[[1], [2]], rid=rid)[1]
    # unknown keys at the top are ignored, as SGLang ignores them
    assert generate(server, **ids, sampling_params=GREEDY, colour="blue")["output_ids"]


@pytest.mark.parametrize("timeout", ["inf", "nan", "soon", [1]])
def test_a_flush_waits_for_a_number_of_seconds(server: EngineServer, timeout: object):
    with pytest.raises(HttpError, match="must be a number of seconds"):
        server.post("/flush_cache", {"timeout": timeout})


def test_information_has_sglangs_names(server: EngineServer):
    for route in ("/health", "/health_generate", "/server_info", "/get_model_info", "/v1/models"):
        get_json(f"{server.url}{route}")
    assert get_json(f"{server.url}/model_info")["weight_version"] == "v0"
    with pytest.raises(HttpError, match="status 404"):
        server.post("/no_such_route")


def test_abort_gives_the_partial_output(server: EngineServer):
    bodies = [
        {"input_ids": [i], "sampling_params": ENDLESS, "rid": f"a{i}", "return_logprob": True}
        for i in range(2)
    ]
    with server.under_way(*bodies) as calls:
        server.post("/abort_request", {"rid": "nobody"})
        server.post("/abort_request", {"rid": "a0"})
        reply = calls[0].result()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert reply["meta_info"]["finish_reason"]["message"] == "Aborted"
        count = len(reply["output_ids"])
        assert count == len(reply["meta_info"]["output_token_logprobs"])
        assert 0 < count < ENDLESS["max_new_tokens"]
        assert server.state["num_running_reqs"] == 1
        server.post("/abort_request", {"abort_all": True})
        assert calls[1].result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_caller_that_goes_away_frees_its_request(server: EngineServer):
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    body = json.dumps({"input_ids": [3], "sampling_params": ENDLESS})
    connection.sendall(
        "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {server.token}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    wait_for(lambda: server.state["num_running_reqs"] == 1)
    connection.close()
    wait_for(lambda: server.state["num_running_reqs"] == 0, timeout=30)
    assert server.state["num_used_tokens"] == 0


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_pause_modes(server: EngineServer, checkpoint: Path, mode: str):
    ids = [9, 9, 9]
    with (
        ThreadPoolExecutor() as pool,
        server.under_way({"input_ids": ids, "sampling_params": ENDLESS}) as [running],
    ):
        assert server.post("/pause_generation", {"mode": mode})["status"] == "ok"
        steps = server.state["num_steps"]
        late = pool.submit(generate, server, input_ids=[7], sampling_params=GREEDY)
        time.sleep(0.3)
        assert not late.done()
        assert server.state["num_steps"] == steps
        if mode == "in_place":
            with pytest.raises(HttpError, match="Flush cache failed"):
                server.post("/flush_cache")
        else:
            server.post("/flush_cache")
        server.post("/continue_generation")
        assert late.result()["meta_info"]["finish_reason"]["type"] == "length"
        if mode != "abort":  # it goes on
            wait_for(lambda: server.state["num_steps"] > steps + 100)
            server.post("/abort_request", {"abort_all": True})
        reply = running.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    if mode != "abort":
        # Each step but those of the late request alone, if there were any, gave it a token.
        assert len(reply["output_ids"]) > 50
        check_greedy(checkpoint, ids, reply["output_ids"])
        assert reply["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    with pytest.raises(HttpError, match="mode must be one of"):
        server.post("/pause_generation", {"mode": "softly"})


def check_greedy(checkpoint: Path, ids: list[int], output: list[int], most: int = 2000) -> None:
    """Every token is the likeliest behind those before it, or as likely as that."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    output = output[:most]
    with torch.no_grad():
        logits = model(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])
    assert (logits.max(-1, keepdim=True).values - chosen).max() < 1e-3


def test_flush_forgets_prefixes(server: EngineServer):
    prompt = list(range(40))
    generate(server, input_ids=prompt, sampling_params=GREEDY)
    assert (
        generate(server, input_ids=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"]
        == 32
    )
    assert "flushed" in server.post("/flush_cache").lower()
    assert (
        generate(server, input_ids=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"]
        == 0
    )


def test_memory_is_released_and_comes_back(server: EngineServer, checkpoint: Path):
    before = generate(server, input_ids=[4, 2], sampling_params=GREEDY)["output_ids"]
    server.post("/flush_cache")
    assert server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}) is None
    with pytest.raises(HttpError, match="memory of weights is released"):
        server.post("/update_weights_from_disk", {"model_path": "/nowhere"})
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(generate, server, input_ids=[4, 2], sampling_params=GREEDY)
        time.sleep(0.2)
        assert not waiting.done()
        server.post("/resume_memory_occupation", {"tags": ["weights"]})
        # Nobody can be in the way of an update while the cache is away.
        server.post("/update_weights_from_disk", {"model_path": str(checkpoint)})
        assert not waiting.done()
        server.post("/resume_memory_occupation")
        assert waiting.result()["output_ids"] == before
    with pytest.raises(HttpError, match="tags must be"):
        server.post("/release_memory_occupation", {"tags": ["everything"]})


def test_ids_only_without_a_tokenizer(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m", with_tokenizer=False)
    with engine_server(path, "--skip-tokenizer-init", token=None) as server:
        reply = generate(server, input_ids=[1, 2, 3], sampling_params=GREEDY)
        assert len(reply["output_ids"]) == 16 and "text" not in reply
        assert "needs a tokenizer" in refused(server, text="a")[1]
        assert (
            "needs a tokenizer" in refused(server, input_ids=[1], sampling_params={"stop": "a"})[1]
        )
        for stream in (False, True):  # before the first byte of an answer
            status, text = refused(
                server, input_ids=[1], return_text_in_logprobs=True, stream=stream
            )
            assert status == 400 and "needs a tokenizer" in text
        # No token was set, so one was made up: control routes stay closed.
        with pytest.raises(HttpError, match="401"):
            post_json(f"{server.url}/flush_cache", {})
