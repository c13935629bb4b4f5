"""Suggestions and the guide's scaling table: each of its rows fits, and nothing larger is proposed."""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest

from slime.cli import main
from slime.cli.plan.plan import Machine, Plan, find_advice, make_plan, make_plans
from slime.cli.plan.request import PlanOptions, planned_args
from slime.cli.plan.suggest import find_suggestions, suggest_lora
from slime.core.errors import UserError
from tests.parity.test_model_scripts import model_args

GIB = 2**30
H100 = Machine(gpu_bytes=80 * GIB, source="test")
# model of the row, GPUs, TP, PP, EP; from "Scaling Guidelines" of the guide
TABLE = [
    ("llama3.1-8B", 8, 2, 1, 1),
    ("glm4-32B", 16, 4, 2, 1),
    ("gpt-oss-120B", 32, 8, 4, 8),
    ("glm4.5-355B-A32B", 64, 8, 4, 16),
]
SAVING = [
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1", "--optimizer-cpu-offload", "--use-precision-aware-optimizer"),
]


def cluster(gpus):
    return [
        *("--actor-num-nodes", str(gpus // 8), "--actor-num-gpus-per-node", "8", "--colocate"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"),
        *(
            "--sglang-mem-fraction-static",
            "0.7",
            "--rollout-num-gpus-per-engine",
            str(min(gpus, 32)),
        ),
    ]


def row(name, gpus, tp, pp, ep):
    layout = [
        *("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)),
        *(("--sequence-parallel",) if tp > 1 else ()),
    ]
    if name == "glm4-32B":  # 61 layers
        layout += ["--decoder-last-pipeline-num-layers", "30"]
    if ep > 1:
        layout += ["--expert-model-parallel-size", str(ep), "--expert-tensor-parallel-size", "1"]
    return [*model_args(name), *cluster(gpus), *layout, *SAVING]


def test_every_row_of_the_table_fits():
    with ExitStack() as stack:
        many = [stack.enter_context(planned_args(row(*one), PlanOptions())) for one in TABLE]
        plans = make_plans(many, H100)
    for one, plan in zip(TABLE, plans, strict=True):
        assert not isinstance(plan, UserError), (one, plan)
        assert plan.verdict == "fits", (one, plan.reason)
        assert plan.layout.sizes.world == one[1]


@pytest.mark.parametrize(("name", "gpus", "tp", "pp"), [("llama3.1-8B", 8, 2, 1)])
def test_the_first_suggestion_spreads_the_model_no_further_than_the_table(name, gpus, tp, pp):
    argv = [*model_args(name), *cluster(gpus)]
    with planned_args(argv, PlanOptions(gpus=gpus, suggest=True)) as args:
        found = find_suggestions(args, H100, [])
        best = found[0].plan
        assert best.layout.sizes.tp * best.layout.sizes.pp <= tp * pp
        assert (tp, pp) in {(s.plan.layout.sizes.tp, s.plan.layout.sizes.pp) for s in found}
        assert all(isinstance(s.plan, Plan) and s.plan.verdict == "fits" for s in found)


@pytest.mark.long
def test_layers_that_no_pipeline_divides_are_fewer_in_its_last_stage():
    argv = [*model_args("glm4-32B"), *cluster(16)]
    with planned_args(argv, PlanOptions(gpus=16, suggest=True)) as args:
        found = find_suggestions(args, H100, [])
    (one,) = [s for s in found if (s.plan.layout.sizes.tp, s.plan.layout.sizes.pp) == (4, 2)]
    assert "--decoder-last-pipeline-num-layers 30" in one.flags
    words = " ".join(one.flags).split()
    with planned_args([*argv, *words], PlanOptions()) as args:  # what is proposed can be typed
        (plan,) = make_plans([args], H100)
    assert not isinstance(plan, UserError) and plan.verdict == "fits"


def test_nothing_is_suggested_where_nothing_fits():
    argv = [*model_args("glm4.5-355B-A32B"), *cluster(8)]
    with planned_args(argv, PlanOptions(gpus=8, suggest=True)) as args:
        assert find_suggestions(args, H100, []) == []
        assert suggest_lora(args, H100, []) == []


def test_a_model_that_cannot_be_built_is_not_said_not_to_fit(tmp_path, capsys):
    """The model is tiny, so every layout would fit; building it fails in the child that counts it."""
    fields = {"head_dim": 17, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields, **sizes}))
    words = ["--gpus", "2", "--gpu-memory", "80", "--train-backend", "megatron"]
    assert main(["plan", "--suggest", "--hf-checkpoint", str(tmp_path), *words]) != 0
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    assert "could not be planned. The first: the model cannot be built" in text
    assert "`head_dim`=17" in text and "nothing fits" not in text


def one_gpu(*more: str) -> list[str]:
    """A rollout of few tokens on one GPU, which trainer and engine share."""
    return [
        *("--actor-num-gpus-per-node", "1", "--colocate", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "8192", "--sglang-mem-fraction-static", "0.7", *more),
    ]


def test_lora_is_suggested_where_full_training_does_not_fit():
    """8B parameters on 48 GiB: 6 bytes each (Adam on the host) are 45 GiB; what is proposed can be typed."""
    small = Machine(gpu_bytes=48 * GIB, source="test")
    argv = [*model_args("llama3.1-8B"), *one_gpu()]
    with planned_args(argv, PlanOptions(gpus=1, suggest=True)) as args:
        assert find_suggestions(args, small, []) == []
        (found,) = suggest_lora(args, small, [])
        flags = ["--train-backend fsdp", "--gradient-checkpointing", "--lora-rank 16"]
        assert found.flags[:4] == [*flags, "--lora-alpha 32"]
        assert "--lora-merge-for-rollout" not in found.flags
        common = ["--hf-checkpoint", args.hf_checkpoint, *one_gpu()]
        with planned_args([*common, *" ".join(found.flags).split()], PlanOptions()) as same:
            plan = make_plan(same, small)
        # Adam on the host does not fit either if the machine has little memory: LoRA is the advice.
        narrow = replace(small, host_bytes=64 * GIB)
        with planned_args([*common, "--train-backend", "fsdp"], PlanOptions()) as full:
            advice = find_advice(make_plan(full, narrow), narrow)
    assert plan.verdict == "fits"
    assert plan.fullest.total == found.plan.fullest.total
    assert plan.count.adapters is not None
    h, q, kv, f = 4096, 4096, 1024, 14336
    layer = 2 * (h + q) + 2 * (h + kv) + 3 * (h + f)
    assert plan.count.adapters.widths == 32 * layer
    assert plan.count.ranks[0].trained_parameters == 16 * 32 * layer
    assert advice[0].fits and advice[0].flags == " ".join(found.flags[1:4])


def test_experts_are_left_out_of_suggested_adapters():
    argv = [*model_args("qwen3-30B-A3B"), *one_gpu()]
    with planned_args(argv, PlanOptions(gpus=1, suggest=True)) as args:
        (found,) = suggest_lora(args, Machine(gpu_bytes=140 * GIB, source="test"), [])
    assert "--lora-target-modules q_proj k_proj v_proj o_proj" in found.flags
    assert found.plan.count.adapters is not None
    h, q, kv = 2048, 4096, 512
    assert found.plan.count.adapters.widths == 48 * (2 * (h + q) + 2 * (h + kv))
