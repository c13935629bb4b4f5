"""LoRA in the plan, byte by byte, on counts that are written out here: Qwen3-4B with rank 16."""

import json
from dataclasses import replace

import pytest

from slime.backends.model_size import AdapterCount
from slime.cli.plan.activations import layer_cost
from slime.cli.plan.model_shape import shape_of
from slime.cli.plan.plan import plan_json
from slime.cli.plan.rank_layout import Sizes
from slime.cli.plan.render import summary_lines
from slime.cli.plan.request import PlanOptions, planned_args
from tests.unit.test_plan import (  # noqa: F401 -- a fixture
    GIB,
    QWEN3_4B,
    argv,
    count,
    folder,
    item,
    phase,
    plan_of,
)

RANK, LAYERS, H, Q, KV, F = 16, 36, 2560, 4096, 1024, 9728
BASE = 4_022_468_096
LAYER = 2 * (H + Q) + 2 * (H + KV) + 3 * (H + F)  # in + out of the seven modules of a layer
ADAPTER = RANK * LAYERS * LAYER  # parameters
FSDP = ("--train-backend", "fsdp", "--bf16", "--actor-num-gpus-per-node", "1")
LORA = (*FSDP, "--lora-rank", str(RANK))
MERGED = (*LORA, "--lora-merge-for-rollout")
# An embedded engine on a GPU of its own, which is sent the adapter alone.
ALONE = (
    *(*LORA, "--no-colocate", "--rollout-num-gpus", "1", "--rollout-engine", "slime"),
    *("--sglang-mem-fraction-static", "0.5"),
)


def counted(adapters: bool = True):
    """One rank: the base in bf16, adapters and their moments in fp32."""
    full = count(BASE)
    whole = replace(full.whole, total=BASE, by_part={"attention": BASE}, layer=10**8)
    rank = replace(
        full.ranks[0],
        parameters=BASE + ADAPTER,
        trained_parameters=ADAPTER,
        weight_storages=[2 * BASE + 4 * ADAPTER],
        gradient_storages=[],
        master_sizes={},
        moment_sizes={ADAPTER: 1},
    )
    sizes = AdapterCount(
        rank=RANK,
        widths=LAYERS * LAYER,
        layer=LAYER,
        modules=7,
        in_mlp=True,
        served=LAYERS * LAYER,
    )
    return replace(full, whole=whole, ranks=[rank], adapters=sizes if adapters else None)


def names(plan, name: str) -> set[str]:
    return {item.name for item in phase(plan, name).items}


def test_the_adapter_of_rank_16_has_33_million_parameters():
    assert ADAPTER == 33_030_144


def test_a_trainer_holds_the_base_in_bf16_and_adapters_in_fp32(folder):  # noqa: F811
    plan = plan_of(folder, counted(), *MERGED, "--use-kl-loss", "--kl-loss-coef", "0.1")
    training = phase(plan, "training").items
    assert item(training, "parameters") == 2 * BASE + 4 * ADAPTER
    assert item(training, "Adam's moments") == 8 * ADAPTER
    assert item(training, "gradients") == 4 * ADAPTER
    layer = 2 * (10**8 + RANK * LAYER)  # one at a time: a single rank prefetches none
    assert item(training, "gathered parameters") == layer
    assert "fp32 master weights" not in names(plan, "training")
    assert "reference weights" not in names(plan, "training")  # it is the base itself


def test_a_base_in_fp8_is_gathered_in_fp8_and_dequantized_matrix_by_matrix(folder):  # noqa: F811
    full = counted()
    rank = replace(full.ranks[0], fp8_parameters=BASE)
    plan = plan_of(folder, replace(full, ranks=[rank]), *MERGED)
    training = phase(plan, "training").items
    assert item(training, "gathered parameters") == 10**8 + 2 * RANK * LAYER
    assert item(training, "matrix being dequantized") == (4 + 2) * H * F
    (held,) = [item for item in training if item.name == "parameters"]
    assert held.note == "fp8, sharded; adapters fp32"
    assert "matrix being dequantized" not in names(plan_of(folder, full, *MERGED), "training")


def test_a_layer_keeps_the_output_of_every_a_and_the_inputs_of_the_mlp(folder):  # noqa: F811
    with planned_args(argv(folder, *MERGED), PlanOptions()) as args:
        full, lora = (
            layer_cost(
                args,
                shape_of(QWEN3_4B),
                Sizes(world=1),
                repeats_keys=False,
                adapters=counted(with_lora).adapters,
            )
            for with_lora in (False, True)
        )
    assert lora.dense.total - full.dense.total == 7 * RANK + 2 * F
    assert lora.dense.boundary == full.dense.boundary


def test_a_frozen_output_layer_has_no_gradient(folder):  # noqa: F811
    lora = plan_of(folder, counted(), *MERGED)
    full = plan_of(folder, counted(adapters=False), *FSDP)
    head = [item(phase(plan, "training").items, "logits and loss") for plan in (full, lora)]
    assert head[0] - head[1] == 151936 * H * (4 + 2)


def test_engines_have_slots_for_adapters_beside_their_cache(folder):  # noqa: F811
    plan = plan_of(folder, counted(), *ALONE)
    slots = ADAPTER * 2
    assert item(phase(plan, "rollout").items, "adapter slots") == slots
    assert plan.cache is not None
    room = 80 * GIB * 0.5 - 2 * BASE - slots - 0.5 * GIB
    assert plan.cache.tokens == int(room // (36 * 2 * 8 * 128 * 2))
    two = plan_of(folder, counted(), *ALONE, "--sglang-max-loras-per-batch", "2")
    assert item(phase(two, "rollout").items, "adapter slots") == 2 * ADAPTER * 2
    merged = plan_of(folder, counted(), *MERGED)
    assert "adapter slots" not in names(merged, "rollout")


def test_the_embedded_engine_dequantizes_a_base_in_fp8(tmp_path):
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_4B, "quantization_config": blocks}))
    weights = {}
    for engine in ("slime", "sglang"):
        plan = plan_of(str(tmp_path), counted(), *ALONE, "--rollout-engine", engine)
        weights[engine] = item(phase(plan, "rollout").items, "engine weights")
    assert weights["slime"] == 2 * BASE
    assert weights["sglang"] == int(BASE * (1 + 4 / 128**2))


def test_an_update_sends_the_adapter_alone(folder):  # noqa: F811
    plan = plan_of(folder, counted(), *ALONE)
    assert item(phase(plan, "weight_update").items, "adapter being sent") == 2 * ADAPTER
    assert "weight buckets" not in names(plan, "weight_update")
    cost = plan.adapter
    assert cost is not None and (cost.parameters, cost.sent_bytes) == (ADAPTER, 2 * ADAPTER)
    tensors = 2 * 7 * LAYERS
    assert cost.seconds == pytest.approx(0.003 + tensors * 1e-5 + 2 * ADAPTER / 10e9)
    assert plan_json(plan)["adapter"]["sent_bytes"] == 2 * ADAPTER
    (line,) = [line for line in summary_lines(plan) if line.startswith("adapter")]
    assert "33,030,144 parameters; updates send 66.1 MB" in line


def test_merged_weights_are_sent_whole(folder):  # noqa: F811
    plan = plan_of(folder, counted(), *MERGED)
    assert "weight buckets" in names(plan, "weight_update")
    assert plan.adapter is not None
    assert (plan.adapter.sent_bytes, plan.adapter.seconds) == (2 * BASE, None)
    assert plan_of(folder, counted(adapters=False), *FSDP).adapter is None
