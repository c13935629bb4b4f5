"""`generate`: the request that an engine gets, and what its reply changes in the sample."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from slime.core.errors import UserError
from slime.core.types import Sample, Status, decode_experts
from slime.rollout.context import GenerationState, RolloutContext
from slime.rollout.observation import add_observation
from slime.rollout.sampling import generate, hash32
from slime.rollout.train_data import image_columns
from tests.args import make_args
from tests.prompts import rollout_args
from tests.tiny import EOS, EOS_ID
from tests.tiny_vision import IMAGE, VISION_END, VISION_START, make_image, make_vision_checkpoint


class Engine:
    """Answers with what it was given, one reply after the other, and keeps what it was asked."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies, self.asked, self.sessions = list(replies), [], []

    async def generate(self, payload, session_id=None):
        self.asked.append(json.loads(json.dumps(payload)))
        self.sessions.append(session_id)
        return self.replies.pop(0)


def reply(tokens: list[int], kind: str = "stop", text: str = "", **meta: Any) -> dict[str, Any]:
    finish = {"type": kind, **({"matched": tokens[-1]} if kind == "stop" else {})}
    log_probs = [[-token / 1000, token, None] for token in tokens]
    meta = {"finish_reason": finish, "output_token_logprobs": log_probs, **meta}
    return {"text": text, "output_ids": tokens, "meta_info": meta}


def call(
    args,
    sample: Sample,
    engine: Engine,
    state: GenerationState | None = None,
    limit: int | None = 8,
    **params: Any,
):
    with RolloutContext(pool=engine, generation=state).active():  # type: ignore[arg-type]
        return asyncio.run(generate(args, sample, {"max_new_tokens": limit, **params}))


def asked(length: int = 0, **fields: Any) -> Sample:
    """A prompt of three tokens and a response of so many."""
    values = {"index": 4, "group_index": 2, "tokens": [1, 2, 3]}
    sample = Sample(**{**values, **fields})
    if length:
        sample.append_response_tokens(
            tokens=[50] * length, log_probs=[-0.05] * length, weight_versions=[1] * length
        )
        sample.response = "x" * length
    return sample


@pytest.mark.parametrize(
    ("limit", "context", "length", "room"),
    [
        (8, None, 0, 8),
        (8, None, 5, 3),  # what the sample has already counts
        (8, None, 7, 1),
        (8, None, 8, 0),
        (8, 7, 0, 4),  # the context holds the prompt of three as well
        (8, 7, 3, 1),
        (8, 7, 4, 0),
        (None, 7, 0, 4),
        (8, 99, 0, 8),
    ],
)
def test_a_response_has_the_room_that_limit_and_context_leave(
    tmp_path, limit, context, length, room
):
    args = rollout_args(tmp_path).replace(rollout_max_context_len=context)
    engine = Engine(reply([60, EOS_ID]))
    sample = call(args, asked(length), engine, limit=limit)
    if room:
        assert engine.asked[0]["sampling_params"] == {"max_new_tokens": room}
        assert engine.asked[0]["input_ids"] == [1, 2, 3] + [50] * length
        assert engine.asked[0]["return_logprob"] is True
    else:
        assert not engine.asked and sample.status == Status.TRUNCATED
        assert sample.response_length == length


@pytest.mark.parametrize(("length", "least"), [(0, 6), (2, 4), (6, 0), (7, 0)])
def test_a_least_length_is_of_the_whole_response(tmp_path, length, least):
    engine = Engine(reply([60, EOS_ID]))
    call(rollout_args(tmp_path), asked(length), engine, min_new_tokens=6)
    params = engine.asked[0]["sampling_params"]
    assert params == {"max_new_tokens": 8 - length, "min_new_tokens": least}


def test_a_least_length_is_never_above_the_room(tmp_path):
    args, engine = rollout_args(tmp_path), Engine(reply([60, EOS_ID]))
    call(args.replace(rollout_max_context_len=7), asked(), engine, min_new_tokens=6)
    assert engine.asked[0]["sampling_params"] == {"max_new_tokens": 4, "min_new_tokens": 4}


def test_an_answer_is_appended_token_by_token(tmp_path):
    engine = Engine(reply([60, 61, EOS_ID], text=f"ab{EOS}", weight_version="9"))
    sample = call(rollout_args(tmp_path), asked(2), engine)
    assert sample.tokens == [1, 2, 3, 50, 50, 60, 61, EOS_ID]
    assert sample.response == "xxab"  # the token that ended it is no part of the text
    assert sample.rollout_log_probs == [-0.05, -0.05, -0.06, -0.061, -EOS_ID / 1000]
    assert sample.weight_versions == [1, 1, 9, 9, 9]
    assert sample.loss_mask == [1] * 5 and sample.status == Status.COMPLETED


def test_versions_of_weights_are_the_engines_or_zero(tmp_path):
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    for meta, versions in (
        ({"weight_versions": spans, "weight_version": "7"}, [3, 5, 5]),
        ({"weight_version": "default"}, [0, 0, 0]),
        ({}, [0, 0, 0]),
    ):
        sample = call(rollout_args(tmp_path), asked(), Engine(reply([60, 61, EOS_ID], **meta)))
        assert sample.weight_versions == versions


def test_how_it_ended(tmp_path):
    args = rollout_args(tmp_path)
    for kind, status in (("length", Status.TRUNCATED), ("abort", Status.ABORTED)):
        assert call(args, asked(), Engine(reply([60], kind))).status == status


def test_samples_of_a_group_ask_the_same_engine_and_a_session_of_its_own_its_own(tmp_path):
    args, sessions = rollout_args(tmp_path), []
    for fields in ({"index": 4}, {"index": 5}, {"index": 6, "session_id": "mine"}):
        engine = Engine(reply([EOS_ID]))
        call(args, asked(**fields), engine)
        sessions += engine.sessions
    assert sessions[0] == sessions[1] and sessions[2] == "mine"


def test_a_continued_response_does_not_repeat_the_seed_of_its_beginning(tmp_path):
    """A seed for each sample, and another for each place where a response goes on."""
    args, seeds = rollout_args(tmp_path), []
    for sample in (asked(), asked(2), asked(3), asked(index=5)):
        engine = Engine(reply([EOS_ID]))
        call(args, sample, engine, GenerationState(seed_parts=("run", 1)))
        seeds.append(engine.asked[0]["sampling_params"]["sampling_seed"])
    assert len(set(seeds)) == 4
    assert seeds[0] == hash32("run", 1, 4) and seeds[3] == hash32("run", 1, 5)


@pytest.mark.parametrize("keep", [False, True])
def test_a_request_that_was_aborted_by_others_is_made_again(tmp_path, keep):
    """From the beginning, or with --partial-rollout behind what had come."""
    engine = Engine(reply([60], "abort", "a"), reply([61, EOS_ID], text="b"))
    sample = call(rollout_args(tmp_path), asked(), engine, GenerationState(keep_partial=keep))
    begun = [60] if keep else []
    assert engine.asked[1]["input_ids"] == [1, 2, 3, *begun]
    assert engine.asked[1]["sampling_params"]["max_new_tokens"] == 8 - len(begun)
    assert sample.tokens == [1, 2, 3, *begun, 61, EOS_ID]
    assert sample.response == ("ab" if keep else "b")
    assert len(sample.rollout_log_probs) == len(sample.weight_versions) == len(begun) + 2


def test_a_constrained_request_is_made_again_from_its_beginning(tmp_path):
    """Engines parse what a request generates: the rest of a JSON text is no JSON text."""
    engine = Engine(reply([60], "abort", "a"), reply([61, EOS_ID], text="b"))
    args, state = rollout_args(tmp_path), GenerationState(keep_partial=True)
    sample = call(args, asked(), engine, state, json_schema="{}")
    assert [one["input_ids"] for one in engine.asked] == [[1, 2, 3]] * 2
    assert sample.tokens == [1, 2, 3, 61, EOS_ID] and sample.response == "b"
    state.aborting = True
    left = call(args, asked(), Engine(reply([60], "abort", "a")), state, json_schema="{}")
    assert left.status == Status.ABORTED and left.response_length == 0


def test_the_end_of_a_rollout_takes_what_has_come(tmp_path):
    args, run = rollout_args(tmp_path), GenerationState()

    class Ending(Engine):
        async def generate(self, payload, session_id=None):
            run.aborting = True
            return await super().generate(payload, session_id)

    engine = Ending(reply([60], "abort"))
    assert call(args, asked(), engine, run).tokens == [1, 2, 3, 60]
    sample = call(args, asked(), engine, run)  # and asks nothing more
    assert sample.status == Status.ABORTED and len(engine.asked) == 1


def test_aborts_that_bring_nothing_end_and_those_that_bring_tokens_go_on(tmp_path):
    args, run = rollout_args(tmp_path), GenerationState(keep_partial=True)
    steps = [reply([60], "abort") for _ in range(30)]
    sample = call(args, asked(), Engine(*steps, reply([EOS_ID])), run, limit=40)
    assert sample.response_length == 31 and sample.status == Status.COMPLETED
    nothing = Engine(*(reply([], "abort") for _ in range(50)))
    with pytest.raises(UserError, match=r"sample 4 .* times in a row"):
        call(args, asked(), nothing, run)


def test_experts_are_by_token_then_layer(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_experts_per_tok": 3}')
    chosen = np.arange(4 * 2 * 3, dtype=np.int32).reshape(4, 2, 3)
    text = base64.b64encode(chosen.tobytes()).decode()
    np.testing.assert_array_equal(decode_experts(str(tmp_path), text), chosen)


def test_experts_are_asked_for_and_kept_for_replay_only(tmp_path):
    model = tmp_path / "model"
    args = rollout_args(tmp_path)
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(config))
    chosen = np.array([[[0, 5]], [[1, 6]], [[2, 7]]], np.int32)
    text = base64.b64encode(chosen.tobytes()).decode()
    for replay in (False, True):
        engine = Engine(reply([EOS_ID], routed_experts=text))
        sample = call(args.replace(use_rollout_routing_replay=replay), asked(), engine)
        assert engine.asked[0].get("return_routed_experts", False) == replay
        if not replay:
            assert sample.rollout_routed_experts is None
        else:
            np.testing.assert_array_equal(sample.rollout_routed_experts, chosen)


# ---- placeholders of images that the model itself writes


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> str:
    return str(make_vision_checkpoint(tmp_path_factory.mktemp("vision") / "m"))


def vision_args(vision: str, **more: Any):
    keys = {"image": "images"}
    return make_args(hf_checkpoint=vision, multimodal_keys=keys, **more)


@pytest.mark.parametrize("with_image", [True, False])
def test_a_placeholder_that_the_model_writes_ends_the_response(vision, with_image):
    """It is a stop token, and its log-prob is kept: the sample is trained on like another."""
    args = vision_args(vision, rollout_stop_token_ids=[77])
    sample = Sample(
        index=1, tokens=[7, VISION_START, *[IMAGE] * 8, VISION_END] if with_image else [7]
    )
    sample.multimodal_inputs = {"images": [make_image()]} if with_image else None
    engine = Engine(reply([50, IMAGE]))
    found = call(args, sample, engine, stop_token_ids=[77])
    assert engine.asked[0]["sampling_params"]["stop_token_ids"] == [
        77,
        IMAGE,
        IMAGE + 1,
    ]  # and videos
    assert found.status is Status.TRUNCATED and found.tokens[-2:] == [50, IMAGE]
    assert found.rollout_log_probs == [-0.05, -IMAGE / 1000]
    again = call(args, found, engine)  # a partial rollout, or another turn: no request is sent
    assert again.status is Status.TRUNCATED and len(engine.asked) == 1


def test_an_image_that_a_tool_returned_does_not_end_the_response(vision):
    args = vision_args(vision)
    sample = Sample(index=1, tokens=[7])
    sample.append_response_tokens(tokens=[50], log_probs=[-0.1])
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert add_observation(
        args, sample, "", {"max_new_tokens": 99}, before=place, images=[make_image()]
    )
    engine = Engine(reply([51, EOS_ID]))
    found = call(args, sample, engine, limit=99)
    assert found.status is Status.COMPLETED and len(engine.asked) == 1
    assert engine.asked[0]["input_ids"].count(IMAGE) == 8


@pytest.mark.parametrize("masked", [True, False])
def test_a_sampled_placeholder_never_takes_the_features_of_an_image(vision, masked):
    """Also where its loss mask was cleared, as for tokens of old weights."""
    image = make_image()
    prompt = [7, VISION_START, *[IMAGE] * 8, VISION_END, 9]
    sample = Sample(index=0, tokens=[*prompt, 50, IMAGE], response_length=2)
    sample.loss_mask, sample.rollout_log_probs = [0, 0] if masked else [1, 1], [0.0, 0.0]
    sample.multimodal_inputs = {"images": [image]}
    columns = image_columns(vision_args(vision), [sample])
    assert columns["images"][0].tolist() == [[0, 2, 8]]
    # 4 columns and 2 rows: text behind the image continues after 2 + 4, one by one.
    assert columns["positions"][0][-4:, 0].tolist() == [6, 7, 8, 9]


def test_a_model_of_text_has_no_such_stop_token(tmp_path):
    engine = Engine(reply([50, EOS_ID]))
    call(rollout_args(tmp_path), asked(), engine)
    assert "stop_token_ids" not in engine.asked[0]["sampling_params"]
