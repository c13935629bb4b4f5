"""What TransformerEngine changes in a plan, on counts that are written out here."""

from __future__ import annotations

import pytest

from slime.cli.plan.activations import layer_cost
from slime.cli.plan.model_shape import shape_of
from slime.cli.plan.plan import plan_json
from slime.cli.plan.rank_layout import Sizes
from slime.cli.plan.render import summary_lines
from slime.cli.plan.request import PlanOptions, planned_args
from tests.unit.test_plan import (  # noqa: F401  (folder is a fixture)
    QWEN3_4B,
    argv,
    count,
    folder,
    item,
    phase,
    plan_of,
)

P = 1_000_000_000
MEGATRON = ("--train-backend", "megatron", "--bf16")
TE = (*MEGATRON, "--transformer-impl", "transformer_engine")
FP8 = (*TE, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
COPIES = "FP8 copies of weights"
TABLE = 151936 * 2560  # the embedding, which is also the head and stays in bf16


def training(folder: str, *flags: str):  # noqa: F811
    return phase(plan_of(folder, count(P), *flags), "training")


def test_fp8_copies_of_linear_layers_are_in_the_plan(folder):  # noqa: F811
    assert item(training(folder, *FP8).items, COPIES) == 2 * (P - TABLE)
    for flags in (MEGATRON, TE):
        assert COPIES not in {i.name for i in training(folder, *flags).items}


def test_masters_of_the_precision_aware_optimizer_share_half_with_the_weights(folder):  # noqa: F811
    items = training(folder, *TE, "--use-precision-aware-optimizer").items
    assert item(items, "fp32 master weights") == 2 * P
    assert item(items, "Adam's moments") == 8 * P
    halves = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16")
    assert item(training(folder, *TE, *halves).items, "Adam's moments") == 6 * P
    assert item(training(folder, *TE).items, "fp32 master weights") == 4 * P


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (MEGATRON, ["slime: norms", "TransformerEngine is not used"]),
        (TE, ["TransformerEngine: linear layers, norms;", "slime: packed attention"]),
        ((*TE, "--attention-backend", "fused"), ["fused attention (cuDNN)", "slime: log-probs"]),
        (FP8, ["linear layers in FP8 (hybrid, tensorwise)"]),
    ],
)
def test_the_plan_says_whose_layers_there_are(folder, flags, words):  # noqa: F811
    plan = plan_of(folder, count(P), *flags)
    (line,) = [line for line in summary_lines(plan) if line.startswith("layers ")]
    assert all(word in line for word in words), line
    assert line.endswith(plan_json(plan)["layers"])


def test_fsdp_has_no_layers_of_megatron(folder):  # noqa: F811
    plan = plan_of(folder, count(P), "--train-backend", "fsdp")
    assert plan_json(plan)["layers"] is None
    assert not [line for line in summary_lines(plan) if line.startswith("layers ")]


def kept(folder: str, *flags: str) -> float:  # noqa: F811
    with planned_args(argv(folder, *flags), PlanOptions()) as args:
        sizes = Sizes(world=8, tp=1, pp=1, cp=1, ep=1, etp=1)
        return layer_cost(args, shape_of(QWEN3_4B), sizes, repeats_keys=False).dense.total


def test_fp8_keeps_inputs_of_linear_layers_in_one_byte(folder):  # noqa: F811
    """Norms' outputs (2 H) halve; attention's output (q) and silu(gate) * up (F) come on top."""
    hidden, q, ffn = 2560, 32 * 128, 9728
    assert kept(folder, *FP8) == kept(folder, *TE) - 2 * hidden / 2 + q / 2 + ffn / 2


def test_norms_fused_into_linear_layers_are_not_computed_again(folder):  # noqa: F811
    again = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm")
    assert kept(folder, *TE, *again) == kept(folder, *TE)
    assert kept(folder, *MEGATRON, *again) == kept(folder, *MEGATRON) - 2 * 2560
