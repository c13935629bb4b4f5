"""The FSDP trainer on one GPU: kernels, precision, memory given back and taken again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from slime.backends.fsdp_utils.model import packed_attention
from slime.backends.kernels.packed_attention import PackedLayout, attend_packed, packed_layout
from slime.rollout.train_data import split_batch
from slime.weights.fp8 import Fp8Format, convert_to_fp8, load_causal_lm
from tests.fsdp import (
    Case,
    first_gradient,
    make_rows,
    naive_model,
    start_actor,
    train_naively,
    whole_weights,
)
from tests.tiny import make_tiny_checkpoint
from tests.tiny_vision import make_image_rows, make_vision_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _layout(lens: list[int]) -> PackedLayout:
    return packed_layout(lens, torch.device("cuda"))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_varlen_kernel_agrees_with_padded_fp32(window, kv_heads):
    torch.manual_seed(0)
    layout = _layout([33, 5, 64, 1, 40])
    shapes = [(1, heads, 143, 64) for heads in (8, kv_heads, kv_heads)]
    exact = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    rough = [x.detach().bfloat16().requires_grad_() for x in exact]
    upstream = torch.randn(1, 143, 8, 64, device="cuda")
    results = []
    for inputs in (exact, rough):
        out, _ = packed_attention(
            nn.Module(), *inputs, None, packed=layout, scaling=0.125, sliding_window=window
        )
        results.append([out, *torch.autograd.grad((out.float() * upstream).sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        assert (found.float() - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("head_dim, kv_heads", [(64, 4), (128, 1)])
def test_long_samples_agree_with_softmax_in_fp32(head_dim: int, kv_heads: int):
    """Samples from 4,096 tokens on take another kernel, between shorter ones and padded to multiples of 512."""
    torch.manual_seed(0)
    lens = [70, 8200, 4096, 1, 300, 4097, 9001]
    shapes = [(sum(lens), heads, head_dim) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    upstream = torch.randn(sum(lens), 4, head_dim, device="cuda")
    found = attend_packed(*inputs, _layout(lens), scale=0.1)
    if torch.cuda.get_device_capability()[0] == 9:
        assert functions_behind(found).count("ScaledDotProductCudnnAttentionBackward0") == 4
    grads = torch.autograd.grad((found.float() * upstream).sum(), inputs)
    start = 0
    for length in lens:
        part = slice(start, start + length)
        exact = [x.detach()[part].float().requires_grad_() for x in inputs]
        query, key, value = (x.transpose(0, 1) for x in exact)
        key, value = (x.repeat_interleave(4 // kv_heads, dim=0) for x in (key, value))
        scores = 0.1 * query @ key.transpose(1, 2)
        future = torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1)
        out = (scores.masked_fill(future, float("-inf")).softmax(-1) @ value).transpose(0, 1)
        expected = [out, *torch.autograd.grad((out * upstream[part]).sum(), exact)]
        for right, whole in zip(expected, (found, *grads), strict=True):
            assert (whole[part].float() - right).norm() < 0.02 * right.norm() + 1e-4
        start += length


def functions_behind(tensor: torch.Tensor) -> list[str]:
    """Return the names of the autograd functions that a result comes from."""
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [function for function, _ in node.next_functions]
    return [node.name() for node in found]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp32_gradients_are_those_of_the_naive_loop(tmp_path: Path, family: str):
    model = make_tiny_checkpoint(tmp_path / "m", family, weight_scale=3.0)
    case = Case(model=str(model), flags={"fp32": True, "micro_batch_size": 4})
    args = case.args()
    actor = start_actor(args, 0, 1)
    expected = train_naively(case).grads
    rows = split_batch(args, make_rows(), dp_size=1, cp_size=1)[0]
    for name, grad in first_gradient(actor, rows).items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(grad.cpu() / scale, expected[name] / scale, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_with_images_are_those_of_the_naive_loop(
    tmp_path: Path, family: str, precision: str, monkeypatch: pytest.MonkeyPatch
):
    # torch convolves in TF32 unless told otherwise, the patches of images too
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = str(make_vision_checkpoint(tmp_path / "m", family))
    flags = {"multimodal_keys": {"image": "images"}, "freeze_vision_tower": False}
    case = Case(
        model=model,
        flags={**flags, precision: True, "micro_batch_size": 4},
        make_rows=partial(make_image_rows, model),
    )
    args = case.args()
    actor = start_actor(args, 0, 1)
    expected = train_naively(case).grads
    rough = expected  # in bf16 as near to fp32 as twice Hugging Face's own model
    if precision == "bf16":
        rough = train_naively(case, naive_model(case).bfloat16()).grads
    rows = split_batch(args, case.rows(), dp_size=1, cp_size=1)[0]
    for name, grad in first_gradient(actor, rows).items():
        # the last deepstack merger feeds the last layer's image tokens, which nothing reads
        scale = expected[name].abs().max().clamp_min(1e-6)
        error, own = (
            (x.cpu().float() / scale - expected[name] / scale).abs().max()
            for x in (grad, rough[name])
        )
        assert error < 2 * own + (2e-4 if precision == "fp32" else 0.02), (name, error, own)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_bf16_training_sleeps_wakes_saves_and_resumes(tmp_path: Path, family: str):
    model = make_tiny_checkpoint(tmp_path / "m", family, hidden_size=128, head_dim=64)
    case = Case(model=str(model), flags={"bf16": True, "micro_batch_size": 4})
    args = case.args(num_rollout=4)
    undisturbed, actor = start_actor(args, 0, 1), start_actor(args, 0, 1)
    for rollout_id in range(2):
        reports = []
        for each in (undisturbed, actor):
            rows = split_batch(args, make_rows(rollout_id), dp_size=1, cp_size=1)[0]
            reports.append(each.train(rollout_id, rows).metrics)
        before = torch.cuda.memory_allocated()
        actor.sleep()
        freed = before - torch.cuda.memory_allocated()
        actor.wake_up()
        held = (
            sum(p.numel() for p in actor.model.params.values()) * 4 * 3
        )  # weights and two moments
        assert freed >= held
        assert reports[0]["train/grad_norm"] == pytest.approx(
            reports[1]["train/grad_norm"], rel=1e-3
        )
    (tmp_path / "c").mkdir()
    actor.save_to(str(tmp_path / "c"), 1)
    saved = whole_weights(actor)
    resumed = start_actor(args, 0, 1, checkpoint=str(tmp_path / "c"))
    for name, weight in whole_weights(resumed).items():
        assert torch.equal(weight, saved[name]), name
    assert all(
        not t.is_floating_point() or t.dtype == torch.bfloat16
        for b in actor.hf_buckets()
        for _, t in b
    )


def test_parameters_in_host_memory_train_to_the_same_weights(tmp_path: Path):
    model = make_tiny_checkpoint(tmp_path / "m", hidden_size=128, head_dim=64)
    weights = []
    for offload in (None, True):
        case = Case(model=str(model), flags={"bf16": True, "fsdp_cpu_offload": offload})
        args = case.args()
        actor = start_actor(args, 0, 1)
        actor.train(0, split_batch(args, make_rows(), dp_size=1, cp_size=1)[0])
        weights.append({n: t.float() for bucket in actor.hf_buckets() for n, t in bucket})
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_base_in_fp8_computes_as_its_dequantized_weights_and_sleeps(tmp_path: Path, family: str):
    """Log-probs and gradients of adapters, on the same checkpoint in FP8 and in bf16."""
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128}
    plain = make_tiny_checkpoint(tmp_path / "m", family, weight_scale=3.0, **sizes)
    layout = Fp8Format(strategy="block")
    convert_to_fp8(plain, tmp_path / "fp8", layout)
    load_causal_lm(str(tmp_path / "fp8"), dtype=torch.bfloat16).save_pretrained(tmp_path / "wide")
    targets = ["all-linear", *(["experts"] if family == "qwen3_moe" else [])]
    flags = {"bf16": True, "lora_rank": 8, "lora_target_modules": targets, "micro_batch_size": 4}
    found = []
    for model in ("fp8", "wide"):
        case = Case(
            model=str(tmp_path / model), flags={**flags, "lora_merge_for_rollout": True, "lr": 0.01}
        )
        args = case.args()
        actor = start_actor(args, 0, 1)
        for rollout_id in range(2):
            actor.train(
                rollout_id, split_batch(args, make_rows(rollout_id), dp_size=1, cp_size=1)[0]
            )
            held = {
                n: p.to_local().view(torch.uint8).clone() for n, p in actor.model.params.items()
            }
            actor.sleep()
            actor.wake_up()
            for name, param in actor.model.params.items():
                assert torch.equal(param.to_local().view(torch.uint8), held[name]), name
        rows = split_batch(args, make_rows(), dp_size=1, cp_size=1)[0]
        log_probs = torch.cat([torch.from_numpy(row) for row in actor.log_probs(rows, "actor")])
        grads = first_gradient(actor, rows)
        found.append((log_probs, grads, bool(actor.model.scales)))
    (ours, our_grads, in_fp8), (theirs, their_grads, _) = found
    assert in_fp8 and (ours - theirs).abs().max() < 0.05
    for name, gradient in their_grads.items():
        assert (our_grads[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-6, name
