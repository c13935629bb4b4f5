"""Weights under the names of a checkpoint, cast and packed into buckets."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from slime.weights.buckets import CastBucket, hf_views, weight_dtype
from tests.tiny import module_weights

SHAPES = [(7,), (), (64, 2), (0, 4), (3, 5, 2), (32,), (1,)]
TYPES = [torch.bfloat16, torch.float32, torch.float16]


def wanted() -> list[tuple[str, torch.Tensor, torch.dtype]]:
    torch.manual_seed(0)
    return [
        (f"{index}", torch.randn(SHAPES[index % len(SHAPES)]), TYPES[index % len(TYPES)])
        for index in range(20)
    ] + [
        ("turned", torch.randn(6, 4).T, torch.bfloat16),
        ("steps", torch.arange(5), torch.int64),
    ]


@pytest.mark.parametrize("spare", [None, 0, 13], ids=["new memory", "buffer", "larger buffer"])
def test_each_is_what_it_would_be_alone(spare: int | None):
    bucket = CastBucket(wanted())
    buffer = None if spare is None else torch.empty(bucket.nbytes + spare, dtype=torch.uint8)
    cast = bucket.cast(buffer)
    assert [name for name, _ in cast] == [name for name, _, _ in wanted()]
    for (_, place), (_, tensor, dtype) in zip(cast, wanted(), strict=True):
        assert place.dtype == dtype and place.is_contiguous()
        assert torch.equal(place, tensor.to(dtype))
    start = cast[0][1].data_ptr()
    places = [place for _, place in cast if place.numel()]
    assert all((place.data_ptr() - start) % 64 == 0 for place in places), "as a GPU reads fastest"
    for place, following in itertools.pairwise(places):
        assert place.data_ptr() + place.nbytes <= following.data_ptr()
    if buffer is not None:
        assert start == buffer.data_ptr()
        assert places[-1].data_ptr() + places[-1].nbytes <= start + buffer.numel()


def test_what_need_not_be_cast_is_given_as_it_is():
    tensors = [torch.randn(3), torch.randn(2, 2)]
    cast = list(CastBucket([(str(index), t, t.dtype) for index, t in enumerate(tensors)]))
    assert [t.data_ptr() for _, t in cast] == [t.data_ptr() for t in tensors]


BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": EXPERTS,
    "mixtral": LOCAL_EXPERTS,
    "phimoe": LOCAL_EXPERTS,
    "minimax_m2": LOCAL_EXPERTS,
    "granitemoe": LOCAL_EXPERTS,
    "gpt_oss": LOCAL_EXPERTS,
    "deepseek_v3": {**ROUTED_EXPERTS, **MLA},
    "glm4_moe": ROUTED_EXPERTS,
    "glm4_moe_lite": {**ROUTED_EXPERTS, **MLA},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
}


def make_model(model_type: str, **overrides):
    config = AutoConfig.for_model(model_type, **{**BASE, **FAMILIES[model_type], **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.state_dict().values():  # buffers start as zeros, which any view would equal
        if tensor.is_floating_point():
            tensor.normal_()
    return model


def saved_tensors(model, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_and_tensors_are_those_of_save_pretrained(model_type, tmp_path):
    model = make_model(model_type)
    saved = saved_tensors(model, tmp_path)
    views = dict(hf_views(module_weights(model), model_type=model_type))
    assert sorted(views) == sorted(saved)
    for name, tensor in saved.items():
        assert torch.equal(views[name], tensor), name


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_writing_to_the_views_updates_the_model(model_type, tmp_path):
    target, source = make_model(model_type), make_model(model_type)
    for tensor in source.state_dict().values():
        tensor.add_(1.0)
    saved = saved_tensors(source, tmp_path)
    for name, view in hf_views(module_weights(target), model_type=model_type):
        view.copy_(saved[name])
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_tied_weights_are_given_once():
    names = [name for name, _ in module_weights(make_model("qwen3"))]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    untied = [name for name, _ in module_weights(make_model("qwen3", tie_word_embeddings=False))]
    assert "lm_head.weight" in untied


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3"])
def test_dtypes_are_those_a_loaded_model_has(model_type, tmp_path):
    make_model(model_type).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: tensor.dtype for name, tensor in module_weights(loaded)}
    assert {name: weight_dtype(loaded, name, torch.bfloat16) for name in expected} == expected
    assert (torch.float32 in expected.values()) == (model_type == "deepseek_v3")
