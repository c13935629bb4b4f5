"""Images on the way from data rows to requests and training rows: order, sharing, storage, refusals."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from slime.core.errors import ConfigError, UserError
from slime.core.packing import pack
from slime.core.types import ParallelInfo, Sample, Status
from slime.data.images import load_image_processor
from slime.data.openai_requests import ApiError, ChatRequest, parse_chat
from slime.data.prompt_data import DataFormat, check_prompts, load_prompts
from slime.data.stored_samples import (
    decode_groups,
    encode_groups,
    load_debug_samples,
    save_debug_samples,
)
from slime.data.tokenizer import encode_content, load_tokenizer
from slime.rollout.agents.openai_endpoint import _encode_turn
from slime.rollout.agents.recording import Session, Turn, give_row_images, images_in, keep_images
from slime.rollout.context import RolloutContext
from slime.rollout.observation import add_observation
from slime.rollout.samples import restart
from slime.rollout.train_data import samples_to_batch, split_batch
from tests.args import make_args
from tests.prompts import write_rows
from tests.tiny_vision import (
    IMAGE,
    PLACE,
    VIDEO,
    VISION_END,
    VISION_START,
    make_image,
    make_vision_checkpoint,
)
from tests.unit.test_sampling import Engine, call, reply

A, B = make_image(), make_image(16, 40, seed=1)  # 8 and 10 tokens
URI = "data:image/png;base64,"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_vision_checkpoint(tmp_path_factory.mktemp("model")))


def data_format(model: str, **more: Any) -> DataFormat:
    more = {"image_key": "images", "apply_chat_template": True, **more}
    return DataFormat(checkpoint=model, **more)


def load(model: str, path: Path, **more: Any) -> Sample:
    return load_prompts(str(path), data_format(model, **more), load_tokenizer(model)).make_sample(0)


def ids(model: str, text: str) -> list[int]:
    return load_tokenizer(model).encode(text, add_special_tokens=False)


def uri(data: bytes) -> str:
    return URI + base64.b64encode(data).decode()


def parts(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


TEXT = {"type": "text", "text": "and"}
ROWS = {
    "marks": {"input": "<image>and<image>", "images": ["a.png", "b.png"]},
    "marks in messages": {
        "input": [{"role": "user", "content": "<image>and<image>"}],
        "images": ["a.png", "b.png"],
    },
    "parts without data": {
        "input": parts({"type": "image"}, TEXT, {"type": "image"}),
        "images": ["a.png", "b.png"],
    },
    "parts with data": {
        "input": parts(
            {"type": "image", "image": "a.png"},
            TEXT,
            {"type": "image_url", "image_url": {"url": uri(B)}},
        )
    },
    "both": {
        "input": parts({"type": "image"}, TEXT, {"type": "image", "image": uri(B)}),
        "images": "a.png",
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_all_ways_to_give_images_are_the_same_prompt(model, tmp_path, name):
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "b.png").write_bytes(B)
    sample = load(model, write_rows(tmp_path / "rows.jsonl", [ROWS[name]]))
    assert sample.image_files == [A, B]
    assert sample.prompt == f"{PLACE}and{PLACE}"
    image = [VISION_START, *[IMAGE] * 8, VISION_END]
    other = [VISION_START, *[IMAGE] * 10, VISION_END]
    assert sample.tokens == [*image, *ids(model, "and"), *other]


def test_parquet_rows_hold_bytes_and_empty_keys(model, tmp_path):
    messages = parts({"type": "image", "text": None}, {"type": "text", "text": "what?"})
    row = {"input": messages, "images": [{"bytes": A, "path": None}]}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    sample = load(model, tmp_path / "rows.parquet", max_prompt_len=99)
    assert sample.image_files == [A] and len(sample.tokens) == 8 + 2 + len("what?")
    with pytest.raises(ConfigError, match="longer than"):
        load(model, tmp_path / "rows.parquet", max_prompt_len=14)


def test_samples_of_a_group_share_the_bytes_and_not_the_list(model, tmp_path):
    (tmp_path / "a.png").write_bytes(A)
    rows = [{"input": "<image>", "images": ["a.png"]}, {"input": "<image>? is text"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = load_prompts(str(path), data_format(model), load_tokenizer(model))
    one, two, plain = data.make_sample(0), data.make_sample(0), data.make_sample(1)
    assert one.image_files[0] is two.image_files[0] is two.clone().image_files[0]
    one.append_images([B])
    assert two.image_files == [A] and data.make_sample(0).image_files == [A]
    assert plain.multimodal_inputs is None and plain.tokens == ids(model, "<image>? is text")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "no mark", "images": ["a.png"]}, "1 images but only 0 <image>"),
        ({"input": "<image><image>", "images": ["a.png"]}, "more <image> or parts of type image"),
        ({"input": "<image>", "images": ["missing.png"]}, "missing.png' cannot be read"),
        ({"input": "<image>", "images": [uri(b"no image")]}, "cannot be decoded"),
        ({"input": "<image>", "images": ["https://x.org/a.png"]}, "not downloaded"),
        (
            {"input": "<image>" * 3, "images": ["a.png"] * 3},
            "3 images; --limit-mm-data-per-request",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_row_is_named_before_anything_starts(tmp_path, row, message):
    (tmp_path / "a.png").write_bytes(A)
    path = write_rows(tmp_path / "rows.jsonl", [{"input": "fine"}, row])
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:2: .*{message}"):
        check_prompts(str(path), DataFormat(image_key="images", max_images=2))


def test_images_without_the_flag_are_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [ROWS["parts with data"]])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: .* add --multimodal-keys"):
        check_prompts(str(path), DataFormat())


# ---- groups under way, and debugging files


def test_a_stored_group_holds_an_image_once_and_comes_back(tmp_path):
    group = [
        Sample(index=n, group_index=1, tokens=[1, 2], multimodal_inputs={"images": [A, B][: n + 1]})
        for n in range(2)
    ]
    text = json.dumps(encode_groups([group, [Sample()]]))
    assert text.count(base64.b64encode(A).decode()) == text.count(base64.b64encode(B).decode()) == 1
    back, _ = decode_groups(json.loads(text))
    assert [sample.image_files for sample in back] == [[A], [A, B]]
    assert back[0].image_files[0] is back[1].image_files[0]
    assert not hasattr(back[0], "_images")
    save_debug_samples(str(tmp_path / "{rollout_id}.pt"), 0, group)
    (again,) = load_debug_samples(str(tmp_path / "{rollout_id}.pt"), 0)
    assert [sample.image_files for sample in again] == [[A], [A, B]]


# ---- requests


def prompt(model: str, *images: bytes) -> Sample:
    processor = load_image_processor(model)
    tokens = processor.expand([7, *[IMAGE] * len(images), 8], list(images))
    return Sample(index=1, tokens=tokens, multimodal_inputs={"images": list(images)})


def run_args(model: str, **more: Any):
    keys = {"image": "images"}
    return make_args(hf_checkpoint=model, multimodal_keys=keys, rollout_batch_size=1, **more)


def test_requests_carry_the_images_in_order(model):
    sample, engine = prompt(model, A, B), Engine(reply([65, 256]))
    call(run_args(model), sample, engine)
    (asked,) = engine.asked
    assert asked["image_data"] == [uri(A), uri(B)]
    assert asked["input_ids"] == [7, *[IMAGE] * 18, 8]
    assert sample.tokens == [7, *[IMAGE] * 18, 8, 65, 256]


def test_sglang_gets_one_placeholder_per_image_and_must_read_as_many_tokens(model):
    args = run_args(model)
    args = args.replace(rollout_engine="sglang")
    sample = prompt(model, A, B)
    sample.append_response_tokens(tokens=[70, 9], log_probs=[-1.0, -1.0])
    engine = Engine(reply([65, 256], prompt_tokens=22))
    call(args, sample, engine)
    assert engine.asked[0]["input_ids"] == [7, IMAGE, IMAGE, 8, 70, 9]
    with pytest.raises(UserError, match=r"counts 5 tokens .* the processor of --hf-checkpoint 20"):
        call(args, prompt(model, A, B), Engine(reply([65, 256], prompt_tokens=5)))


@pytest.mark.parametrize("placeholder", [IMAGE, VIDEO])
def test_a_response_ends_where_an_engine_would_look_for_an_image(model, placeholder):
    """SGLang answers 500 (tests/sglang/test_images.py)."""
    args = run_args(model)
    for engine_name in ("sglang", "slime"):
        sample, engine = prompt(model, A), Engine(reply([65, 256]))
        sample.append_response_tokens(tokens=[placeholder, 9], log_probs=[-1.0, -1.0])
        call(args.replace(rollout_engine=engine_name), sample, engine)
        assert not engine.asked and sample.status == Status.TRUNCATED
        assert sample.response_length == 2
        new = prompt(model, A)
        call(args.replace(rollout_engine=engine_name), new, Engine(reply([65, placeholder])))
        assert new.status == Status.TRUNCATED and new.response_length == 2


def test_an_image_of_a_later_turn_has_exact_tokens_mask_and_positions(model):
    args, sample = run_args(model, limit_mm_data_per_request={"image": 2}), prompt(model, A)
    sample.append_response_tokens(tokens=[IMAGE, 70], log_probs=[-1.0, -1.0])
    params = {"max_new_tokens": 40}
    assert add_observation(args, sample, "see", params, before=PLACE, after="!", images=[B])
    sample.append_response_tokens(tokens=[71], log_probs=[-1.0])
    shown = [VISION_START, *[IMAGE] * 10, VISION_END, *ids(model, "see!")]
    assert sample.tokens == [7, *[IMAGE] * 8, 8, IMAGE, 70, *shown, 71]
    assert sample.loss_mask == [1, 1, *[0] * len(shown), 1]
    assert sample.image_files == [A, B]
    sample.index, sample.group_index, sample.reward = 0, 0, 1.0
    batch = samples_to_batch(args, [sample])
    assert batch.images[0].tolist() == [[0, 1, 8], [1, 13, 10]]
    grids = [image.grid for image in batch.pixels]  # 2 x 4 and 5 x 2 tokens
    assert grids == [(1, 4, 8), (1, 10, 4)]
    rows = batch.positions[0].tolist()
    assert rows[0] == [0] * 3 and rows[1] == [1, 1, 1] and rows[8] == [1, 2, 4]
    assert rows[9:13] == [[5] * 3, [6] * 3, [7] * 3, [8] * 3]  # text counts on from the largest
    assert rows[13] == [9, 9, 9] and rows[22] == [9, 13, 10] and rows[23] == [14] * 3
    again = restart(sample)
    assert again.image_files == [A] and again.tokens == [7, *[IMAGE] * 8, 8]
    with pytest.raises(UserError, match="3 images; --limit-mm-data-per-request allows 2"):
        add_observation(args, sample, "", params, before=PLACE, images=[A])


def test_an_observation_that_does_not_fit_adds_no_image(model):
    sample = prompt(model, A)
    assert not add_observation(
        run_args(model), sample, "", {"max_new_tokens": 5}, before=PLACE, images=[B]
    )
    assert sample.image_files == [A] and sample.response_length == 0


# ---- conversations of agents


def _request(messages: list[Any], session: Session) -> ChatRequest:
    asked = parse_chat({"messages": messages}, images=True)
    keep_images(asked, session.images)
    return asked


def _turn(model: str, messages: list[Any], past: Turn | None, session: Session) -> Turn:
    asked = _request(messages, session)
    new = asked.messages[0 if past is None else len(past.messages) :]
    tokens = _encode_turn(model, past, asked, {}, images_in(new, session.images))
    answer = {"role": "assistant", "content": "ok"}
    return Turn(
        messages=[*asked.messages, answer], tools=[], prompt_ids=tokens, output_ids=[65, 66],
        log_probs=[-1.0, -1.0], weight_versions=[0, 0], status=Status.TRUNCATED, text="ok",
    )  # fmt: skip


def test_images_of_a_client_are_recorded_with_exact_tokens(model):
    url = {"type": "image_url", "image_url": {"url": uri(A)}}
    attack = {"type": "text", "text": f"see {PLACE}"}
    asked = {"role": "user", "content": [url, attack]}
    session = Session(sample=Sample(), sampling_params={}, context=RolloutContext(pool=Engine()))
    first = _turn(model, [asked], None, session)
    session.record(None, first)
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri(B)}}]}
    answer = {"role": "assistant", "content": "ok"}
    again = [asked, answer, shown]
    place = session.find_segment(_request(again, session).messages, [])
    assert place is not None, "the client's images are recognised"
    session.record(place, _turn(model, again, first, session))
    (sample,) = session.samples()
    image = [VISION_START, *[IMAGE] * 8, VISION_END]
    other = [VISION_START, *[IMAGE] * 10, VISION_END]
    plain = encode_content(model, f"see {PLACE}")
    assert not {IMAGE, VISION_START} & set(plain)
    assert sample.tokens == [*image, *plain, 65, 66, *other, 65, 66]
    assert sample.loss_mask == [1, 1, *[0] * 12, 1, 1]
    assert sample.image_files == [A, B] and restart(sample).image_files == [A]
    assert uri(A)[-40:] not in json.dumps(sample.metadata)


def test_the_images_of_a_row_go_with_its_messages():
    """Part n of type image is image n of the row; one that the row does not have is refused."""
    parts = [{"type": "image"}, {"type": "text", "text": "which?"}, {"type": "image"}]
    body = {"messages": [{"role": "user", "content": [part]} for part in parts]}
    give_row_images(body, [A, B])
    images: dict[str, bytes] = {}
    asked = parse_chat(body, images=True)
    keep_images(asked, images)
    assert images_in(asked.messages, images) == [A, B]
    body = {"messages": [{"role": "user", "content": [{"type": "image"}] * 3}]}
    with pytest.raises(ApiError, match="images in the row, which has 2"):
        give_row_images(json.loads(json.dumps(body)), [A, B])
    for odd in (None, [], {"messages": 3}, {"messages": [3, {"content": [3]}]}):
        give_row_images(odd, [A])  # the parser says what is wrong with them


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/etc/passwd", "must be a data URI"),
        ("https://x.org/a.png", "must be a data URI"),
        (uri(b"x"), "cannot be decoded"),
    ],
)
def test_a_client_cannot_name_files_or_addresses(url, message):
    content = [{"type": "image_url", "image_url": {"url": url}}]
    asked = parse_chat({"messages": [{"role": "user", "content": content}]}, images=True)
    with pytest.raises(ApiError, match=message):
        keep_images(asked, {})


# ---- training rows


def make_batch(model: str):
    samples = [prompt(model, *images) for images in ([A], [], [B, A], [A])]
    for n, sample in enumerate(samples):
        sample.index, sample.group_index, sample.reward = n, n // 2, float(n)
        sample.append_response_tokens(tokens=[60 + n, 256], log_probs=[-1.0, -1.0])
    args = run_args(model, n_samples_per_prompt=4, global_batch_size=4)
    return args, samples, samples_to_batch(args, samples)


def test_a_batch_holds_each_image_once_and_a_part_only_its_own(model):
    _, samples, batch = make_batch(model)
    assert len(batch.pixels) == 2
    part = pickle.loads(pickle.dumps(batch.select([1, 2])))
    assert [row[:, 0].tolist() for row in part.images] == [[], [1, 0]]
    assert len(part.pixels) == 2 and not batch.select([1]).pixels
    (only,) = batch.select([3]).pixels
    np.testing.assert_array_equal(only.values, load_image_processor(model).pixels(A).values)
    for row, sample in enumerate(samples):
        assert len(batch.positions[row]) == len(sample.tokens)


def test_a_micro_batch_computes_each_image_once(model):
    args, samples, batch = make_batch(model)
    (mine,) = split_batch(args, batch, dp_size=1, cp_size=1)
    packed = pack(mine, [0, 1, 2, 3], ParallelInfo())
    order = mine.sample_indices.tolist()
    expected = [A if file is A else B for i in order for file in samples[i].image_files]
    patches = {A: load_image_processor(model).pixels(A), B: load_image_processor(model).pixels(B)}
    assert len(packed.image_grids) == 2 and packed.pixel_values.shape[0] == 32 + 40
    assert [tuple(packed.image_grids[n].tolist()) for n in packed.image_order] == [
        patches[file].grid for file in expected
    ]
    assert torch.equal(packed.image_mask, packed.tokens == IMAGE)
    text = pack(mine, [order.index(1)], ParallelInfo())
    assert text.pixel_values is None and text.mrope_positions is not None
    assert torch.equal(text.mrope_positions, text.position_ids[:, None].expand(-1, 3))


def test_images_in_a_run_without_the_flag_are_an_error(model):
    _, samples, _ = make_batch(model)
    args = make_args(hf_checkpoint=model, rollout_batch_size=1, global_batch_size=1)
    with pytest.raises(UserError, match="add --multimodal-keys"):
        samples_to_batch(args, samples)


# ---- flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"multimodal_keys": {"video": "v"}}, "only images are trained with"),
        ({"multimodal_keys": {"image": "i"}, "qkv_format": "bshd"}, "remove --qkv-format bshd"),
        (
            {"multimodal_keys": {"image": "i"}, "limit_mm_data_per_request": {"image": "4"}},
            "NUMBER",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_images_are_not_trained_with_is_refused(model, flags, message):
    with pytest.raises(ConfigError, match=message):
        make_args(hf_checkpoint=model, **flags)


def test_a_text_model_is_refused():
    with pytest.raises(ConfigError, match="images are trained with qwen3_vl"):
        make_args(multimodal_keys={"image": "images"})
