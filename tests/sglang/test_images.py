"""Images on the real SGLang: log-probs and weight updates are Hugging Face's, tower included.

Its kernels for GPUs are replaced by those of tools/sglang_cpu; requests, image processing, the tower,
positions, the cache and the loading of weights are SGLang's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.core.types import EngineInfo, Sample
from slime.data.images import data_uri, load_image_processor
from slime.rollout.sampling import image_payload
from slime.utils.sync_http import HttpError
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.sync import WeightSync
from tests.args import make_args
from tests.conformance.test_weights import buckets
from tests.engines import TOKEN, EngineServer
from tests.sglang_server import sglang_server
from tests.tiny_vision import IMAGE, PLACE, make_image, make_vision_checkpoint
from tests.vision_reference import encode, log_probs_of, make_prompts

pytestmark = pytest.mark.timeout(1800)  # a start of a server takes minutes on busy cores

FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
COUNTS = (1, 0, 2, 3, 0, 7)  # images in each prompt
TOLERANCE = 1e-5  # in fp32; differences of 1e-6 were seen
LENGTH = 12


@dataclass(kw_only=True, frozen=True)
class Subject:
    """A server and the checkpoint that it was started with."""

    server: EngineServer
    checkpoint: Path
    family: str

    def ask(self, tokens: list[int], images: list[bytes], **more: Any) -> dict[str, Any]:
        """Send one prompt as the rollout sends it."""
        args = make_args(
            hf_checkpoint=str(self.checkpoint),
            rollout_engine="sglang",
            multimodal_keys={"image": "images"},
        )
        params = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, **more}
        if images:
            sample = Sample(tokens=tokens, multimodal_inputs={"images": images})
            body |= image_payload(args, sample)
        return self.server.post("/generate", body, timeout=300)


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request, tmp_path_factory) -> Iterator[Subject]:
    checkpoint = make(tmp_path_factory.mktemp("model") / "m", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")  # SGLang keeps bf16 windows otherwise
        keys = {"image": "images"}
        with sglang_server(checkpoint, "first", multimodal_keys=keys) as server:
            yield Subject(server=server, checkpoint=checkpoint, family=request.param)


def make(path: Path, family: str, seed: int = 0) -> Path:
    """Make a checkpoint as it is published: Qwen3-VL's experts transposed, as transformers reads too.

    For Qwen3.5, SGLang needs settings that transformers does not write: the kinds of layers as
    `full_attention_interval`, the share of RoPE beside `rope_parameters` (0.25 unless it is given), and
    that the tower has no deepstack features.
    """
    more = {"full_attention_interval": 2} if family.startswith("qwen3_5") else {}
    make_vision_checkpoint(path, family, seed=seed, max_position_embeddings=2048, **more)
    config = json.loads((path / "config.json").read_text())
    config["vision_config"].setdefault("deepstack_visual_indexes", [])
    rope = config["text_config"]["rope_parameters"]
    config["text_config"]["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    (path / "config.json").write_text(json.dumps(config))
    if family == "qwen3_vl_moe":
        file = path / "model.safetensors"
        tensors = {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    return path


def gaps(checkpoint: Path, tokens: list[int], images: list[bytes], reply: dict) -> list[float]:
    """Return how far the log-prob of each sampled token is from Hugging Face's."""
    meta, prompt_len = reply["meta_info"], len(tokens)
    assert meta["prompt_tokens"] == prompt_len  # SGLang repeats placeholders as the trainer does
    expected = log_probs_of(checkpoint, tokens + reply["output_ids"], images, prompt_len)
    found = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    assert len(found) == LENGTH
    return (found[: len(expected) - prompt_len + 1] - expected[prompt_len - 1 :]).abs().tolist()


def check(subject: Subject, checkpoint: Path, seed: int) -> None:
    """Send prompts with and without images at once and compare those with and those without."""
    prompts, images = make_prompts(subject.checkpoint, *COUNTS, seed=seed)
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(subject.ask, prompts, images))
    found: dict[bool, list[float]] = {True: [], False: []}
    for tokens, files, reply in zip(prompts, images, replies, strict=True):
        found[bool(files)] += gaps(checkpoint, tokens, files, reply)
    worst = {key: max(values) for key, values in found.items()}
    print(f"{subject.family}: {worst[True]:.1e} with images, {worst[False]:.1e} without")
    assert max(worst.values()) < TOLERANCE, worst


def test_log_probs_of_sampled_tokens_are_those_of_hugging_face(subject):
    check(subject, subject.checkpoint, seed=1)


def test_log_probs_of_a_prompt_with_images_are_those_of_hugging_face(subject):
    [tokens], [images] = make_prompts(subject.checkpoint, 3, seed=2)
    reply = subject.ask(tokens, images, logprob_start_len=0)
    expected = log_probs_of(subject.checkpoint, tokens, images, len(tokens))
    entries = reply["meta_info"]["input_token_logprobs"][1:]
    texts = [place for place, token in enumerate(tokens[1:]) if token != IMAGE]
    found = torch.tensor([entries[place][0] for place in texts])
    torch.testing.assert_close(found, expected[texts], atol=TOLERANCE, rtol=0)


def test_a_prefix_is_reused_for_the_same_pixels_only(subject):
    text = "abc" + PLACE + "how many shapes, and in which order?"
    for seed, again in ((1, False), (1, True), (2, False)):
        images = [make_image(32, 16, seed=seed)]
        tokens = encode(subject.checkpoint, text, images)  # the same for both images
        reply = subject.ask(tokens, images)
        cached = reply["meta_info"]["cached_tokens"]
        if (
            subject.family.startswith("qwen3_vl") or not again
        ):  # recurrent states are kept at few places
            assert (cached > tokens.index(IMAGE)) == again, cached
        assert max(gaps(subject.checkpoint, tokens, images, reply)) < TOLERANCE


def test_a_placeholder_without_an_image_is_refused_beside_images_only(subject):
    """It ends one request, not the server; Qwen3.5's is never answered. The rollout sends none such."""
    [text], _ = make_prompts(subject.checkpoint, 0)
    [tokens], [images] = make_prompts(subject.checkpoint, 1)
    assert len(subject.ask([*text, IMAGE, *text], [])["output_ids"]) == LENGTH
    given = [*tokens, *[-1] * 2]
    processor = load_image_processor(str(subject.checkpoint))
    body = {
        "input_ids": processor.collapse([*tokens, IMAGE, 9], given, images),
        "image_data": [data_uri(image) for image in images],
    }
    with pytest.raises(HttpError, match=r"status 500|no answer within 20 s"):
        subject.server.post("/generate", body, timeout=20)
    assert len(subject.ask(tokens, images)["output_ids"]) == LENGTH


def test_an_update_replaces_all_weights(subject, tmp_path):
    other = make(tmp_path / "other", subject.family, seed=5)
    sync = WeightSync(DistributedTransport(host="127.0.0.1", backend="gloo"), token=TOKEN)
    info = EngineInfo(url=subject.server.url, kind="sglang")
    sync.update(buckets(other), [info], 7)
    check(subject, other, seed=4)
