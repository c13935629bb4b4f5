"""Gated delta nets on one GPU: kernels against plain torch, trainers and engine against Hugging Face.

The kernels are flash-linear-attention's and slime's. Triton compiles them for each shape of heads, so most tests
have the shape of Qwen3.5-4B and 9B; those of models share one tiny shape.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from transformers import AutoModelForCausalLM

from slime.algorithms import delta_kernels, gated_delta
from slime.algorithms.delta_layers import DeltaInputs, DeltaState, continue_sequences
from slime.algorithms.gated_delta import DeltaHeads
from slime.rollout.train_data import split_batch
from tests.delta_nets import FAMILIES
from tests.engines import local_engine
from tests.fsdp import Case, first_gradient, make_rows, naive_log_probs, start_actor, train_naively
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HEADS = DeltaHeads(num_key=16, num_value=32, key_dim=128, value_dim=128)
TINY = {"hidden_size": 128, "head_dim": 64}
LENS = (1, 63, 64, 65, 1, 1000, 2, 130, 1024)
CUDA = torch.device("cuda")
# Of the norm of a result: what passes between kernels is rounded to bf16.
TOLERANCE = 2e-2


@pytest.fixture(params=["fla", "triton"])
def kernels(request: pytest.FixtureRequest) -> delta_kernels.DeltaNetKernels:
    if request.param == "triton":
        return delta_kernels.run_triton
    pytest.importorskip("fla")
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7.1"):
        pytest.skip("flash-linear-attention refuses its backward pass on Hopper GPUs")
    return delta_kernels.run_fla


@pytest.fixture
def one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the first variant of each kernel alone, of up to 25 that Triton would time."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, _: self.configs[:1])


def make_inputs(lens: tuple[int, ...], rate: float = 1.0) -> list[torch.Tensor]:
    """Input of the convolution, its weight, decay and beta; `rate` multiplies the decay."""
    generator, total, width = torch.Generator(CUDA).manual_seed(0), sum(lens), sum(HEADS.widths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=CUDA)

    decay = -rate * normal(HEADS.num_value).exp() * F.softplus(normal(total, HEADS.num_value))
    beta = normal(total, HEADS.num_value).sigmoid().bfloat16()
    return [
        x.requires_grad_()
        for x in (normal(total, width).bfloat16(), normal(width, 4).bfloat16(), decay, beta)
    ]


def in_fp32(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().float().requires_grad_() for x in inputs]


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
    assert error < tolerance, f"{name}: {error:.2g}"


def test_which_inputs_take_the_kernels():
    """The comparison before the first use holds here, forward and backward."""
    x = torch.empty(1, device=CUDA, dtype=torch.bfloat16)
    assert delta_kernels.choose_kernels(x, HEADS, backward=True) is not None
    assert delta_kernels.choose_kernels(x, HEADS, backward=False) is not None
    assert delta_kernels.choose_kernels(x.float(), HEADS, backward=True) is None
    torch.use_deterministic_algorithms(True)
    try:
        found = delta_kernels.choose_kernels(x, HEADS, backward=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found is delta_kernels.run_triton


@pytest.mark.parametrize(
    "lens, rate",
    [(LENS, 1.0), ((4096,), 0.01), (LENS, 40.0)],
    ids=["packed", "long memory", "strong decay"],
)
def test_kernels_compute_what_plain_torch_does(kernels, lens: tuple[int, ...], rate: float):
    """The output of every sample, and all gradients."""
    inputs = make_inputs(lens, rate)
    exact = in_fp32(inputs)
    found = kernels(*inputs, HEADS, lens)[0]
    expected = gated_delta.gated_delta_net(*exact, HEADS, lens)
    samples = zip(found.split(lens), expected.split(lens), strict=True)
    for sample, (one, other) in enumerate(samples):
        assert_near(one, other, 2 * TOLERANCE, f"sample {sample}")
    probe = torch.randn(found.shape, generator=torch.Generator(CUDA).manual_seed(1), device=CUDA)
    grads = torch.autograd.grad((found.float() * probe).sum(), inputs)
    wanted = torch.autograd.grad((expected * probe).sum(), exact)
    for name, one, other in zip(("mixed", "weight", "decay", "beta"), grads, wanted, strict=True):
        assert one.isfinite().all()
        assert_near(one, other, (4 if name == "decay" else 1) * TOLERANCE, name)


def test_states_go_in_and_come_out(kernels):
    lens = (1, 2, 65, 700)
    mixed, weight, decay, beta = (x.detach() for x in make_inputs(lens))
    generator = torch.Generator(CUDA).manual_seed(2)
    windows = torch.randn(4, 3, mixed.shape[1], generator=generator, device=CUDA).bfloat16()
    matrices = 0.1 * torch.randn(4, 32, 128, 128, generator=generator, device=CUDA)
    found, after, states = kernels(mixed, weight, decay, beta, HEADS, lens, windows, matrices)
    exact = DeltaInputs(mixed_qkv=mixed.float(), decay=decay, beta=beta.float())
    before = DeltaState(windows=windows.float(), matrices=matrices)
    out, state = continue_sequences(exact, weight.float(), HEADS, lens, before)
    assert after is not None and states is not None and states.dtype == torch.float32
    assert torch.equal(after.float(), state.windows)
    for name, one, other in (("output", found, out), ("states", states, state.matrices)):
        assert_near(one, other, TOLERANCE, name)


def test_neighbours_change_no_bit_of_a_sample(kernels):
    lens = (70, 1, 300)
    inputs = make_inputs(lens)
    with torch.no_grad():
        inputs[0][70] = float("nan")  # a sample of one token
    for part in (slice(0, 70), slice(71, 371)):
        together = kernels(*inputs, HEADS, lens)[0]
        assert together[70].isnan().any()
        alone = [inputs[0][part], inputs[1], inputs[2][part], inputs[3][part]]
        length = part.stop - part.start
        single = kernels(*alone, HEADS, (length,))[0]
        assert torch.equal(together[part], single)
        (grad,) = torch.autograd.grad(together[part].float().square().sum(), inputs[:1])
        (lone,) = torch.autograd.grad(single.float().square().sum(), inputs[:1])
        assert torch.equal(grad[part], lone[part])


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_gradients_are_those_of_the_naive_loop(tmp_path: Path, family: str, backend: str):
    model = make_tiny_checkpoint(tmp_path / "m", family, weight_scale=3.0)
    case = Case(model=str(model), flags={"fp32": True, "micro_batch_size": 4})
    expected = train_naively(case).grads
    for name, grad in gradients(case, backend).items():
        if name not in expected:  # experts lie fused in the naive model
            continue
        noisy = name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_ba.weight"))
        scale = expected[name].abs().max().clamp(min=1e-3 if noisy else 1e-9)
        torch.testing.assert_close(
            grad.cpu() / scale, expected[name] / scale, rtol=0, atol=5e-3 if noisy else 3e-4
        )


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_bf16_training_by_the_kernels_is_near_fp32(one_variant: None, tmp_path: Path, backend: str):
    """Log-probs of every sample, and the direction of the gradient of every parameter of a delta net."""
    model = make_tiny_checkpoint(tmp_path / "m", "qwen3_5", weight_scale=3.0, **TINY)
    case = Case(model=str(model), flags={"bf16": True, "micro_batch_size": 4})
    actor, args = start(case, backend)
    rows = make_rows(0)
    sent = split_batch(args, make_rows(0), dp_size=1, cp_size=1)[0]
    found = actor.log_probs(sent, "actor")
    hf = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    with torch.no_grad():
        gaps = [
            (torch.from_numpy(mine) - naive_log_probs(hf, rows, row, args)[0]).abs()
            * torch.from_numpy(rows.loss_masks[row])
            for row, mine in enumerate(found)
        ]
    gap = torch.cat(gaps)
    assert gap.mean() < 0.02 and gap.max() < 0.2
    expected = train_naively(Case(model=str(model), flags={"fp32": True})).grads
    for name, grad in gradients(case, backend).items():
        if "linear_attn" in name and expected[name].norm() > 1e-4:
            cosine = F.cosine_similarity(
                grad.cpu().float().flatten(), expected[name].flatten(), dim=0
            )
            assert cosine > 0.95, f"{name}: {cosine:.3f}"


def start(case: Case, backend: str) -> tuple[Any, Any]:
    if backend == "fsdp":
        args = case.args()
        return start_actor(args, 0, 1), args
    pytest.importorskip("megatron.core")
    from tests import megatron

    args = megatron.megatron_args(case, 1)
    return megatron.start_actor(args, 0, 1), args


def gradients(case: Case, backend: str) -> dict[str, torch.Tensor]:
    actor, args = start(case, backend)
    if backend == "fsdp":
        return first_gradient(actor, split_batch(args, make_rows(), dp_size=1, cp_size=1)[0])
    from tests import megatron

    return megatron.first_gradient(actor)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_bf16_engine_is_near_hugging_face(one_variant: None, tmp_path: Path, deterministic: bool):
    """Prompts in chunks by the kernels where installed, then CUDA graphs; deterministic alone = in company."""
    model = make_tiny_checkpoint(tmp_path / "m", "qwen3_5", weight_scale=3.0, **TINY)
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 200))] for _ in range(8)]
    options = {"max_total_tokens": 20000, "enable_deterministic_inference": deterministic}
    params = {"temperature": 0.8, "max_new_tokens": 20, "ignore_eos": True}
    with local_engine(model, chunked_prefill_size=96, **options) as engine:
        requests = engine.generate(prompts, seeds=list(range(8)), **params)
        alone = engine.generate(prompts[:1], seeds=[0], **params)[0]
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    for request in requests:
        with torch.no_grad():
            logits = hf(torch.tensor([request.token_ids], device=CUDA)).logits[0, :-1]
        log_probs = (logits / 0.8).log_softmax(-1)[range(len(logits)), request.token_ids[1:]].cpu()
        found = torch.tensor(request.output_log_probs)
        assert (found - log_probs[request.prompt_len - 1 :]).abs().mean() < 0.05
    if deterministic:
        assert alone.output_ids == requests[0].output_ids
        assert alone.output_log_probs == requests[0].output_log_probs
