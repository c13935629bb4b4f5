"""Abort, pause, cache, memory, keys and information, asked of both engines in the same words."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.utils.engine_keys import forget_keys, remember_key
from slime.utils.sync_http import HttpError, get_json, post_json
from tests.conformance.calls import (
    GREEDY,
    Running,
    control_refusal,
    flush,
    generate,
)
from tests.conformance.conftest import LABEL
from tests.conformance.differences import skip_where_different
from tests.conformance.reference import check_greedy, greedy, log_probs


def test_an_abort_gives_the_partial_output(subject):
    with (
        Running(subject, [9], return_logprob=True) as first,
        Running(subject, [9], return_logprob=True) as second,
    ):
        subject.server.post("/abort_request", {"rid": "nobody"})
        first.abort()
        reply = first.result()
        subject.server.post("/abort_request", {"abort_all": True})
        other = second.result()
    for one in (reply, other):
        meta = one["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["finish_reason"]["message"] == "Aborted"
        assert 0 < len(one["output_ids"]) < first.max_new_tokens
        assert [entry[1] for entry in meta["output_token_logprobs"]] == one["output_ids"]
        check_greedy(subject.checkpoint, [9], one["output_ids"])


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_pause_holds_everything_until_continue(subject, mode):
    ids = [8, 8, 9]
    with ThreadPoolExecutor() as pool, Running(subject, ids) as running:
        assert subject.server.post("/pause_generation", {"mode": mode})["status"] == "ok"
        late = pool.submit(generate, subject, input_ids=[7], sampling_params=GREEDY)
        time.sleep(0.5)
        assert not late.done()
        if mode == "abort":
            assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert running.done() == (mode == "abort")
        if mode == "in_place":
            assert "Flush cache failed" in control_refusal(subject, "/flush_cache", {})
        elif mode == "retract":
            subject.server.post("/flush_cache")
        held = running.num_tokens
        assert subject.server.post("/continue_generation")["status"] == "ok"
        assert late.result()["output_ids"] == greedy(subject.checkpoint, [7], 12)
        running.wait_for_tokens(held + 50)
        running.abort()
        output = running.result()["output_ids"]
    if mode != "abort":
        assert len(output) >= min(held + 50, running.max_new_tokens)
    check_greedy(subject.checkpoint, ids, output)


def test_memory_is_released_when_idle_and_comes_back(subject):
    flush(subject)
    tags = ["kv_cache", "weights"]
    assert subject.server.post("/release_memory_occupation", {"tags": tags}) is None
    for tag in reversed(tags):
        assert subject.server.post("/resume_memory_occupation", {"tags": [tag]}) is None
    reply = generate(subject, input_ids=[4, 2], sampling_params=GREEDY)
    assert reply["output_ids"] == greedy(subject.checkpoint, [4, 2], 12)


def test_every_route_but_health_needs_the_key(subject):
    server = subject.server
    posts = (
        "/generate",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/weights_checker",
        "/update_weights_from_disk",
        "/release_memory_occupation",
    )
    forget_keys([server.url])  # or the client would send it by itself
    for token in (None, "wrong"):
        for route in posts:
            with pytest.raises(HttpError) as error:
                post_json(f"{server.url}{route}", {}, token=token)
            assert error.value.status == 401, route
        for route in ("/model_info", "/server_info", "/v1/models"):
            with pytest.raises(HttpError) as error:
                get_json(f"{server.url}{route}", token=token)
            assert error.value.status == 401, route
    for route in ("/health", "/health_generate"):
        get_json(f"{server.url}{route}")
    remember_key([server.url], server.token)
    with pytest.raises(HttpError, match="status 404"):
        server.post("/no_such_route")


def test_information(subject):
    model = subject.server.get("/model_info")
    assert model["model_path"] == str(subject.checkpoint)
    assert model["tokenizer_path"] == str(subject.checkpoint)
    assert model["weight_version"] == LABEL
    assert model["is_generation"] is True
    server = subject.server.get("/server_info")
    assert server["model_path"] == str(subject.checkpoint)
    assert isinstance(server["version"], str)
    assert subject.server.get("/v1/models")["data"][0]["max_model_len"] == subject.context


def test_the_log_prob_of_a_given_token(subject):
    skip_where_different(subject, "token_ids_logprob")
    ids, token = [3, 1, 4], 15
    reply = generate(
        subject,
        input_ids=ids,
        sampling_params={"temperature": 0.7, "max_new_tokens": 1},
        return_logprob=True,
        token_ids_logprob=[token],
    )
    [[[value, found, _]]] = reply["meta_info"]["output_token_ids_logprobs"]
    assert found == token
    assert abs(value - log_probs(subject.checkpoint, ids, 0.7)[-1, token]) < 1e-4
