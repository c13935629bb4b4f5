"""FLOPs against torch's own counter on the real module; seconds on a clock that the test moves."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slime.runlog.perf_metrics import (
    ModelShape,
    Timer,
    forward_flops,
    peak_flops,
    throughput_metrics,
    train_flops,
)

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def counted(config: PretrainedConfig, length: int) -> tuple[int, int]:
    """Forward, and forward with backward, as torch counts the matrix products that really happen."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.arange(length)[None] % 64
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(tokens)
    with FlopCounterMode(display=False) as both:
        model(tokens).logits.sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


@pytest.mark.parametrize("length", [1, 7, 32])
def test_dense_forward_is_what_torch_counts(length: int):
    config = Qwen3Config(**COMMON)
    shape = ModelShape.from_hf_config(config.to_dict())
    # Eager attention computes all length^2 pairs and masks half away; the count is of those needed.
    masked_pairs = length * (length - 1) / 2
    masked = 4 * 2 * 4 * 16 * masked_pairs
    assert forward_flops(shape, [length]) + masked == counted(config, length)[0]


def test_a_training_step_is_three_forwards():
    config = Qwen3Config(**COMMON)
    length = 32
    forward, both = counted(config, length)
    assert both == pytest.approx(3 * forward, rel=0.05)  # the first layer's input needs no gradient
    shape = ModelShape.from_hf_config(config.to_dict())
    assert train_flops(shape, [3, 5]) == 3 * (forward_flops(shape, [3]) + forward_flops(shape, [5]))


def test_a_mixture_counts_only_the_experts_a_token_visits():
    dense = ModelShape.from_hf_config(Qwen3Config(**COMMON).to_dict())
    mixture = ModelShape.from_hf_config(Qwen3MoeConfig(**COMMON, **MOE).to_dict())
    feed_forward = 2 * 3 * 32 * 48  # two layers of three matrices
    experts = 2 * (3 * 32 * (2 * 24) + 32 * 4)  # two of four experts, and the router
    assert mixture.weights_per_token == dense.weights_per_token - feed_forward + experts


SHARED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 3,
    "first_k_dense_replace": 1,
}
LATENT = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "head_dim": 6,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        (Glm4MoeConfig(**COMMON, **SHARED), 3 * 24),
        (
            Qwen2MoeConfig(
                **COMMON, **MOE, shared_expert_intermediate_size=40, mlp_only_layers=[0]
            ),
            40,
        ),
    ],
    ids=["glm-4.5", "qwen2-moe"],
)
def test_every_token_visits_the_shared_experts(config: PretrainedConfig, shared: int):
    shape = ModelShape.from_hf_config({**config.to_dict(), "first_k_dense_replace": 1})
    attention = 2 * 32 * (2 * 4 + 2 * 2) * 16  # two layers; q and o of four heads, k and v of two
    dense = 3 * 32 * 48  # the first layer
    mixed = 3 * 32 * (2 * 24 + shared) + 32 * 4  # the second: two of four experts, shared, router
    weights = attention + dense + mixed + 32 * 64  # and the output head
    assert shape.weights_per_token == weights
    pairs = 5 * 6 / 2
    assert forward_flops(shape, [5]) == 2 * 5 * weights + 2 * 2 * 2 * 4 * 16 * pairs


@pytest.mark.parametrize("q_rank", [None, 12])
def test_latent_attention_is_what_torch_counts(q_rank: int | None):
    sizes = {**COMMON, **LATENT, "q_lora_rank": q_rank}
    config = DeepseekV3Config(**sizes, **{**SHARED, "first_k_dense_replace": 2})  # no experts
    shape = ModelShape.from_hf_config(config.to_dict())
    masked = 2 * 2 * 4 * (10 + 6 + 14) * (7 * 6 / 2)  # two layers; eager attention computes them
    assert forward_flops(shape, [7]) + masked == counted(config, 7)[0]
    q = 32 * 12 + 12 * 4 * 16 if q_rank else 32 * 4 * 16
    attention = q + 32 * (20 + 6) + 20 * 4 * (10 + 14) + 4 * 14 * 32
    assert shape.weights_per_token == 2 * (attention + 3 * 32 * 48) + 32 * 64
    mixture = ModelShape.from_hf_config({**config.to_dict(), **SHARED})
    experts = 3 * 32 * (2 * 24 + 3 * 24) + 32 * 4  # in the second layer
    assert mixture.weights_per_token == shape.weights_per_token - 3 * 32 * 48 + experts


def test_hybrid_models_count_the_layers_of_both_kinds():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
    config = Qwen3_5TextConfig(**{**COMMON, "num_hidden_layers": 4}, **sizes)
    shape = ModelShape.from_hf_config({"text_config": config.to_dict()})
    model = AutoModelForCausalLM.from_config(config)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.weights_per_token == sum(module.weight.numel() for module in linear)
    per_token, pairs, states = 2 * shape.weights_per_token, 5 * 6 / 2, 3 * 4 * 8 * 6
    assert forward_flops(shape, [5]) == 5 * per_token + 4 * 4 * 16 * pairs + 6 * states * 5


def test_speeds_and_mfu():
    metrics = {
        "rollout/tokens": 1000.0,
        "perf/train_tokens": 3000.0,
        "perf/train_flops": 8e12,
        "perf/step_time": 4.0,
        "perf/train_time": 2.0,
    }
    rates = throughput_metrics(metrics, num_gpus=2, train_gpus=1, peak_flops=16e12)
    assert rates == {
        "perf/tokens_per_second": 250.0,
        "perf/tokens_per_gpu_per_second": 125.0,
        "perf/train_tokens_per_second": 1500.0,
        "perf/train_tflops_per_gpu": 4.0,
        "perf/mfu": 0.25,
    }
    on_cpu = throughput_metrics(metrics, num_gpus=2, train_gpus=1, peak_flops=None)
    assert "perf/mfu" not in on_cpu
    assert throughput_metrics({}, num_gpus=1, train_gpus=1, peak_flops=None) == {}


def test_cards_are_found_by_the_longest_name():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3")
    assert peak_flops("NVIDIA H100 PCIe") != peak_flops("NVIDIA H100 80GB HBM3")
    assert peak_flops("NVIDIA GeForce GTX 970") is None


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_nest_and_start_afresh():
    clock = Clock()
    timer = Timer(clock)
    for seconds in (1.0, 2.0):
        with timer.phase("generate"):
            clock.now += seconds
    with timer.phase("train"):
        clock.now += 0.5
        with timer.phase("log_probs"):
            clock.now += 0.25
    clock.now += 4.0
    assert timer.take() == {
        "perf/generate_time": 3.0,
        "perf/train_time": 0.75,
        "perf/train/log_probs_time": 0.25,
        "perf/step_time": 7.75,
    }
    clock.now += 1.0
    assert timer.take() == {"perf/step_time": 1.0}


def test_a_phase_that_raises_is_counted_and_left():
    clock = Clock()
    timer = Timer(clock)
    with pytest.raises(RuntimeError), timer.phase("train"):
        clock.now += 2.0
        raise RuntimeError
    with timer.phase("save"):
        clock.now += 1.0
    assert timer.take() == {"perf/train_time": 2.0, "perf/save_time": 1.0, "perf/step_time": 3.0}


def test_threads_nest_on_their_own():
    timer = Timer(Clock())

    def work() -> None:
        with timer.phase("generate"):
            pass

    with timer.phase("train"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(timer.take()) == {"perf/train_time", "perf/generate_time", "perf/step_time"}


def test_seconds_measured_elsewhere_are_added():
    clock = Clock()
    timer = Timer(clock)
    with timer.phase("train"):
        clock.now += 1.0
    timer.add("train", 0.5)
    assert timer.take()["perf/train_time"] == 1.5
