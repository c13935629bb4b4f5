"""FP8 and the precision-aware optimizer on one GPU with TransformerEngine: passes, sleep, checkpoints.

Sums are made deterministic, so that what must be equal is compared bit for bit.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not find_spec("transformer_engine"), reason="needs TransformerEngine"),
]

from slime.backends.megatron_utils.optimizer import grad_buffers  # noqa: E402
from tests.args import make_args  # noqa: E402
from tests.fsdp import Case  # noqa: E402
from tests.gpu.test_megatron_te import ON_ONE_GPU, process_group  # noqa: E402, F401
from tests.megatron import DIST_OPT, megatron_args, my_rows, start_actor, whole_weights  # noqa: E402
from tests.parity.test_families import tokens  # noqa: E402
from tests.parity.tiny_families import make_family  # noqa: E402
from tests.tiny import make_tiny_checkpoint  # noqa: E402

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 256}
TE = {"bf16": True, "transformer_impl": "transformer_engine"}
RECIPES = ["delayed", "tensorwise", "blockwise"]
AWARE = {**DIST_OPT, "use_precision_aware_optimizer": True}
HALF_MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "remainders": AWARE,
    "whole main parameters": {**AWARE, "store_param_remainders": False},
    "bf16 moments": {**AWARE, **HALF_MOMENTS},
    "bf16 gradients and moments": {**AWARE, **HALF_MOMENTS, "main_grads_dtype": "bf16"},
    "fp16 moments": {**AWARE, "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16"},
    "fp16 main parameters": {**AWARE, "main_params_dtype": "fp16"},
}
# Scales of fp16 tensors are computed anew from what was loaded, and may be off by one bit of fp32.
SCALED = ("fp16 moments", "fp16 main parameters")
# Bytes of optimizer state per parameter
STATE_BYTES = {
    "remainders": 2 + 8,
    "whole main parameters": 4 + 8,
    "bf16 moments": 2 + 4,
    "bf16 gradients and moments": 2 + 4,
    "fp16 moments": 2 + 4,
    "fp16 main parameters": 2 + 8,
}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    forget_other_models()
    yield
    torch.use_deterministic_algorithms(False)


def forget_other_models() -> None:
    """TransformerEngine updates the delayed scales of all models of a process in every forward pass."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def fp8(recipe: str) -> dict[str, Any]:
    history = {"fp8_amax_history_len": 4} if recipe == "delayed" else {}
    return {**TE, "fp8_format": "hybrid", "fp8_recipe": recipe, **history}


def trainer(folder: Path, family: str = "qwen3", **flags: Any) -> Any:
    from tests.parity.megatron_model import MegatronTrainer

    checkpoint = folder / family
    if not checkpoint.exists():
        sizes = SIZES | (EXPERTS if family == "qwen3_moe" else {})
        make_family(checkpoint, family, dtype="bfloat16", **sizes)
    args = make_args(hf_checkpoint=str(checkpoint), **{**ON_ONE_GPU, "lr": 1e-2, **flags})
    model = MegatronTrainer(args)
    model.load(checkpoint)
    return model


def actor_of(folder: Path, *flags: dict[str, Any]) -> Any:
    sizes = {**SIZES, "weight_scale": 3.0}
    if not (folder / "model").exists():
        make_tiny_checkpoint(folder / "model", **sizes)
    case = Case(model=str(folder / "model"), flags={"micro_batch_size": 16})
    return start_actor(megatron_args(case, 1, *flags), 0, 1)


def saved(folder: Path, model: Any) -> Path:
    from slime.backends.megatron_utils.checkpoint import Checkpointer

    path = folder / "checkpoint"
    path.mkdir()
    steps = model.optimizer.num_steps
    Checkpointer("qwen3").save(path, 0, model.model, model.optimizer, num_steps=steps)
    return path


def load(path: Path, model: Any) -> None:
    from slime.backends.megatron_utils.checkpoint import Checkpointer

    Checkpointer("qwen3").load(path, model.model, model.optimizer)


def log_probs(model: Any) -> torch.Tensor:
    """Return those of the pass without gradients."""
    return _passes(model, train=False)


def trained_log_probs(model: Any) -> torch.Tensor:
    return _passes(model, train=True)


def _passes(model: Any, *, train: bool) -> torch.Tensor:
    from tests.parity.megatron_model import packed

    seen: list[torch.Tensor] = []

    def read(chunk: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        inner = getattr(chunk, "module", chunk)
        values, _ = model.head.log_probs(inner, hidden, batch, with_entropy=False)
        seen.append(values.detach().clone())
        return -values.sum()

    batches = [packed(tokens(), model.parallel)]
    if train:
        model.optimizer.zero_grad()
        model.passes.train(model.model, batches, read)
    else:
        model.passes.collect(model.model, batches, read)
    return seen[0]


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


# ---- FP8


@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probs_and_training_are_in_the_same_precision(tmp_path: Path, recipe: str):
    model = trainer(tmp_path, **fp8(recipe))
    model.train(tokens())  # delayed scaling starts with scales of 1
    before = log_probs(model)
    assert torch.equal(trained_log_probs(model), before)
    bf16 = trainer(tmp_path, **TE)
    assert not torch.equal(log_probs(bf16), log_probs(trainer(tmp_path, **fp8(recipe))))


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_sleeps_and_wakes_bit_for_bit(tmp_path: Path, recipe: str):
    weights = []
    for sleeps in (False, True):
        forget_other_models()
        actor = actor_of(tmp_path, fp8(recipe))
        actor.train(0, my_rows(actor, 0))
        before = actor.log_probs(my_rows(actor, 1), "actor")
        if sleeps:
            actor.sleep()
            torch.full((64 << 20,), 7.0, device="cuda")  # whoever has the memory writes to it
            actor.wake_up()
        after = actor.log_probs(my_rows(actor, 1), "actor")
        assert all((a == b).all() for a, b in zip(after, before, strict=True))
        actor.train(1, my_rows(actor, 1))
        weights.append({name: weight.cpu() for name, weight in whole_weights(actor).items()})
    assert same(weights[1], weights[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gap_to_the_engine_is_reported_as_in_bf16(tmp_path: Path, recipe: str):
    names = [
        set(actor.train(0, my_rows(actor, 0)).metrics)
        for actor in (actor_of(tmp_path, TE), actor_of(tmp_path, fp8(recipe)))
    ]
    assert names[0] == names[1] and any("log_prob_gap_mean" in name for name in names[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_in_fp8_go_on_after_a_checkpoint(tmp_path: Path, recipe: str):
    from slime.backends.megatron_utils.checkpoint_state import fp8_state

    first = trainer(tmp_path, "qwen3_moe", **fp8(recipe))
    first.train(tokens())
    path = saved(tmp_path, first)
    second = trainer(tmp_path, "qwen3_moe", **fp8(recipe))
    load(path, second)
    assert same(second.exported(), first.exported())
    if recipe == "delayed":
        wanted = {key: tensor.data for key, tensor in fp8_state(first.chunks).items()}
        assert wanted and any(scale.ne(1).any() for scale in wanted.values())
        assert same({k: t.data for k, t in fp8_state(second.chunks).items()}, wanted)
    gap = (log_probs(second) - log_probs(first)).abs().max()
    assert gap < 0.05, gap  # sums over experts come in any order


def test_delayed_scaling_goes_on_after_a_checkpoint_bit_for_bit(tmp_path: Path):
    first = trainer(tmp_path, **fp8("delayed"))
    for _ in range(2):
        first.train(tokens())
    path = saved(tmp_path, first)
    wanted = _go_on(first)
    forget_other_models()
    second = trainer(tmp_path, **fp8("delayed"))
    load(path, second)
    assert same(_go_on(second), wanted)


def _go_on(model: Any) -> dict[str, torch.Tensor]:
    values = {"log-probs": log_probs(model)}
    for _ in range(2):
        model.train(tokens())
    return values | model.exported()


# ---- FusedAdam


def adam_of(model: Any) -> Any:
    (optimizer,) = model.optimizer.inner.chained_optimizers
    return optimizer.optimizer


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("distributed", [False, True])
def test_fused_adam_is_used_for_either_layers(tmp_path: Path, impl: str, distributed: bool):
    flags = {"use_distributed_optimizer": distributed, "transformer_impl": impl, "bf16": True}
    assert type(adam_of(trainer(tmp_path, **flags))).__name__ == "FusedAdam"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_precision_aware_optimizer_moves_weights_as_fp32_does(tmp_path: Path, name: str):
    """Adam's first steps are of the size of the learning rate, so weights end within a few bf16 steps."""
    plain = trainer(tmp_path, **TE, **DIST_OPT)
    start = {key: weight.clone() for key, weight in plain.exported().items()}
    aware = trainer(tmp_path, **TE, **OPTIMIZERS[name])
    for _ in range(3):
        plain.train(tokens())
        aware.train(tokens())
    found, wanted = aware.exported(), plain.exported()
    for key, weight in wanted.items():
        moved = (weight.float() - start[key].float()).norm()
        error = (found[key].float() - weight.float()).norm()
        assert moved > 0 and error < 0.2 * moved, (key, error / moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_precision_aware_optimizer_takes_the_memory_it_says(tmp_path: Path, name: str):
    model = trainer(tmp_path, **TE, **OPTIMIZERS[name])
    model.train(tokens())
    count = sum(param.numel() for chunk in model.chunks for param in chunk.parameters())
    state = adam_of(model).state.values()
    held = sum(tensor.nbytes for entry in state for tensor in entry.values())
    assert held == STATE_BYTES[name] * count
    grads = {grad.dtype for grad in grad_buffers(model.optimizer._chunks)}
    half = OPTIMIZERS[name].get("main_grads_dtype") == "bf16"
    assert grads == {torch.bfloat16 if half else torch.float32}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_precision_aware_optimizer_goes_on_after_a_checkpoint(tmp_path: Path, name: str):
    first = trainer(tmp_path, **TE, **OPTIMIZERS[name])
    for _ in range(2):
        first.train(tokens())
    path = saved(tmp_path, first)
    second = trainer(tmp_path, **TE, **OPTIMIZERS[name])
    load(path, second)
    for _ in range(2):
        first.train(tokens())
        second.train(tokens())
    found, wanted = second.exported(), first.exported()
    if name not in SCALED:
        assert same(found, wanted)
    for key, weight in wanted.items():
        error = (found[key].float() - weight.float()).abs().max()
        assert error <= 2**-7 * weight.float().abs().max(), key


@pytest.mark.parametrize("name", ["remainders", "bf16 moments"])
@pytest.mark.parametrize("back", [False, True])
def test_checkpoints_of_either_optimizer_load_in_the_other(tmp_path: Path, name: str, back: bool):
    flags = [OPTIMIZERS[name], DIST_OPT]
    first = trainer(tmp_path, **TE, **flags[back])
    for _ in range(2):
        first.train(tokens())
    second = trainer(tmp_path, **TE, **flags[not back])
    load(saved(tmp_path, first), second)
    assert same(second.exported(), first.exported())
    first.train(tokens())
    second.train(tokens())
    for key, weight in first.exported().items():
        error = (second.exported()[key].float() - weight.float()).abs().max()
        assert error <= 2**-7 * weight.float().abs().max(), key


@pytest.mark.parametrize("name", ["remainders", "bf16 moments", "fp16 moments"])
def test_a_precision_aware_optimizer_sleeps_and_wakes(tmp_path: Path, name: str):
    rested, awake = (actor_of(tmp_path, TE, OPTIMIZERS[name]) for _ in range(2))
    for rollout_id in range(2):
        for actor in (rested, awake):
            actor.train(rollout_id, my_rows(actor, rollout_id))
        held = torch.cuda.memory_allocated()
        rested.sleep()
        count = sum(p.numel() for chunk in rested.chunks for p in chunk.parameters())
        assert held - torch.cuda.memory_allocated() >= (2 + STATE_BYTES[name]) * count
        torch.full((64 << 20,), 7.0, device="cuda")
        rested.wake_up()
    assert same(whole_weights(rested), whole_weights(awake))


def test_fp8_with_a_precision_aware_optimizer(tmp_path: Path):
    """Both together go on after a checkpoint bit for bit."""
    flags = {**fp8("blockwise"), **OPTIMIZERS["bf16 moments"]}
    first = trainer(tmp_path, **flags)
    first.train(tokens())
    path = saved(tmp_path, first)
    second = trainer(tmp_path, **flags)
    load(path, second)
    first.train(tokens())
    second.train(tokens())
    assert same(second.exported(), first.exported())


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_in_host_memory_with_transformer_engine(
    tmp_path: Path, fraction: float, overlap: bool
):
    """Some of it in host memory and the rest in FusedAdam's hands: as all of it on the GPU, and resumed."""
    flags = {
        **AWARE,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "overlap_cpu_optimizer_d2h_h2d": overlap,
    }
    plain, first = trainer(tmp_path, **TE, **DIST_OPT), trainer(tmp_path, **TE, **flags)
    start = {key: weight.clone() for key, weight in plain.exported().items()}
    for _ in range(2):
        plain.train(tokens())
        first.train(tokens())
    path = saved(tmp_path, first)
    second = trainer(tmp_path, **TE, **flags)
    load(path, second)
    for model in (plain, first, second):
        model.train(tokens())
    wanted = first.exported()
    for other in (plain, second):
        for key, weight in other.exported().items():
            # Attention's backward pass is not deterministic, and Adam turns a sign into a whole step;
            # what is left of that is often one step of bf16, which a small tensor moves few of.
            moved = (weight.float() - start[key].float()).norm()
            apart = (wanted[key].float() - weight.float()).abs()
            apart = apart[apart > 2**-7 * weight.float().abs()]
            assert apart.norm() <= 0.05 * moved, key
