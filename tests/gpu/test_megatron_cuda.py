"""The Megatron trainer on one GPU: kernels, precision, optimizer in host memory, memory given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fsdp import Case, make_rows, naive_log_probs, train_naively

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from tests.megatron import (  # noqa: E402
    DIST_OPT,
    first_gradient,
    megatron_args,
    my_rows,
    start_actor,
    train_megatron,
    whole_weights,
)
from tests.tiny import make_tiny_checkpoint  # noqa: E402

OFFLOAD = {
    **DIST_OPT,
    "optimizer_cpu_offload": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    model = make_tiny_checkpoint(tmp_path / "m", weight_scale=3.0, hidden_size=128, head_dim=64)
    return Case(model=str(model), flags={"micro_batch_size": 4})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp32_gradients_are_those_of_the_naive_loop(tmp_path: Path, family: str):
    model = make_tiny_checkpoint(tmp_path / "m", family, weight_scale=3.0)
    case = Case(model=str(model), flags={"fp32": True, "micro_batch_size": 4})
    actor = start_actor(megatron_args(case, 1), 0, 1)
    expected = train_naively(case).grads
    for name, grad in first_gradient(actor).items():
        if name in expected:  # experts lie fused in the naive model
            scale = expected[name].abs().max()
            torch.testing.assert_close(
                grad.cpu() / scale, expected[name] / scale, rtol=0, atol=2e-4
            )


def test_bf16_log_probs_are_near_those_of_fp32(case: Case):
    """A logit of size 8 is rounded by up to 1/64 in bf16, and so is each of the layers' outputs."""
    from transformers import AutoModelForCausalLM

    args = megatron_args(case, 1, bf16=True)
    actor = start_actor(args, 0, 1)
    found = actor.log_probs(my_rows(actor, 0), "actor")
    hf = AutoModelForCausalLM.from_pretrained(case.model, attn_implementation="eager")
    rows = make_rows(0)
    with torch.no_grad():
        gaps = [
            (torch.from_numpy(mine) - naive_log_probs(hf, rows, row, args)[0]).abs()
            * torch.from_numpy(rows.loss_masks[row])
            for row, mine in enumerate(found)
        ]
    gap = torch.cat(gaps)
    assert gap.mean() < 0.02 and gap.max() < 0.2


def test_one_bf16_step_moves_weights_as_the_naive_loop_does(case: Case):
    """Adam's first steps are of the size of the learning rate wherever the gradient is clear."""
    found = train_megatron(megatron_args(case, 1, DIST_OPT, bf16=True), 0, 1).weights
    start = _checkpoint(case.model)
    expected = train_naively(case).weights
    for name, weight in expected.items():
        if weight.ndim == 1:
            continue  # norms start at 1, where two steps are less than bf16 can tell
        moved, wanted = found[name].float().cpu() - start[name], weight - start[name]
        clear = wanted.abs() > 1e-3
        assert (moved[clear].sign() == wanted[clear].sign()).float().mean() > 0.95, name


def test_an_optimizer_in_host_memory_moves_the_weights_alike(case: Case):
    plain = train_megatron(megatron_args(case, 1, DIST_OPT, bf16=True), 0, 1).weights
    offloaded = train_megatron(megatron_args(case, 1, OFFLOAD, bf16=True), 0, 1).weights
    start = _checkpoint(case.model)
    for name, weight in plain.items():
        if weight.ndim == 1:
            continue
        assert (offloaded[name].float().cpu() - start[name]).abs().max() > 1e-4, name
        error = (offloaded[name].float() - weight.float()).abs().max()
        assert error <= 2 * 2**-8 * weight.abs().max(), name  # one step of bf16's grid each


def test_an_optimizer_in_host_memory_is_there_alone(case: Case):
    """Masters and both moments, 12 bytes a parameter."""
    actor = start_actor(megatron_args(case, 1, OFFLOAD, bf16=True), 0, 1)
    actor.train(0, my_rows(actor, 0))
    count = sum(p.numel() for chunk in actor.chunks for p in chunk.parameters())
    kept = [tensor for tensor in actor.optimizer.tensors() if tensor.dtype == torch.float32]
    assert 12 * count <= sum(tensor.nbytes for tensor in kept) < 12.1 * count
    assert not any(tensor.is_cuda for tensor in kept)


def test_an_optimizer_in_host_memory_goes_on_after_a_checkpoint(case: Case, tmp_path: Path):
    args = megatron_args(case, 1, OFFLOAD, bf16=True)
    unbroken = start_actor(args, 0, 1)
    unbroken.train(0, my_rows(unbroken, 0))
    (tmp_path / "saved").mkdir()
    unbroken.save_to(str(tmp_path / "saved"), 0, force_sync=True)
    unbroken.train(1, my_rows(unbroken, 1))
    resumed = start_actor(args, 0, 1)
    assert resumed.load(str(tmp_path / "saved")) == 0
    resumed.train(1, my_rows(resumed, 1))
    found = whole_weights(resumed)
    start = _checkpoint(case.model)
    for name, weight in whole_weights(unbroken).items():
        if weight.ndim == 1:
            continue
        assert (weight.float().cpu() - start[name]).abs().max() > 1e-4, name
        error = (found[name].float() - weight.float()).abs().max()
        assert error <= 2**-8 * weight.abs().max(), name  # sums of the GPU come in any order


def test_sleeping_gives_memory_back(case: Case):
    args = megatron_args(case, 1, DIST_OPT, bf16=True)
    others = torch.cuda.memory_allocated()
    actor = start_actor(args, 0, 1)
    actor.train(0, my_rows(actor, 0))
    before = {name: weight.cpu() for name, weight in whole_weights(actor).items()}
    held = torch.cuda.memory_allocated() - others
    actor.sleep()
    asleep = torch.cuda.memory_allocated() - others
    actor.wake_up()
    assert asleep < 0.2 * held
    for name, weight in whole_weights(actor).items():
        assert torch.equal(weight.cpu(), before[name]), name
    actor.train(1, my_rows(actor, 1))


def _checkpoint(model: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor.float()
        for file in Path(model).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
