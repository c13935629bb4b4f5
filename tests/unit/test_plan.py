"""The planner's arithmetic, on counts that are written out here; nothing is built."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime.algorithms.gated_delta import DeltaHeads
from slime.backends.model_size import ModelCount, RankModel, WholeModel
from slime.cli.plan import host_memory as host_module
from slime.cli.plan.activations import layer_cost
from slime.cli.plan.command import main
from slime.cli.plan.model_shape import config_from_flags, shape_of, write_config
from slime.cli.plan.plan import Machine, find_advice, plan_from_count, plan_json
from slime.cli.plan.rank_layout import Sizes, cluster_layout, stage_ranks
from slime.cli.plan.render import render_page, summary_lines
from slime.cli.plan.request import PlanOptions, planned_args, split_options
from slime.config.flags.parser import read_command_line
from slime.core.errors import ConfigError
from slime.engine.arguments import EngineArgs
from slime.engine.kv_cache import StateShape, count_states
from tests.tiny import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def model_args(name):
    script = f'source "{ROOT}/scripts/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.check_output(["bash", "-c", script], text=True).split()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    return str(tmp_path)


def argv(folder, *more):
    return [
        *("--hf-checkpoint", folder, "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "8"),
        *("--num-rollout", "10", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8"),
        *("--rollout-max-response-len", "1024", "--rollout-max-prompt-len", "1024"),
        *("--prompt-data", "x.jsonl", "--rm-type", "math", "--colocate"),
        *more,
    ]


def count(parameters, *, ranks=1, step=8, dense=36):
    sizes = {parameters: 1}
    rank = {
        "parameters": parameters,
        "expert_parameters": 0,
        "trained_parameters": parameters,
        "weight_sizes": {2 * parameters: 1},
        "weight_storages": [2 * parameters],
        "gradient_storages": [4 * parameters],
        "master_sizes": sizes,
        "moment_sizes": sizes,
        "dense_layers": dense,
        "moe_layers": 0,
    }
    last = ranks - 1
    return ModelCount(
        whole=WholeModel(
            total=4_000_000_000,
            by_part={"attention": 4_000_000_000},
            layer=100_000_000,
            buffers=0,
            largest_tensor=10,
        ),
        ranks=[
            RankModel(rank=i * step, has_embedding=i == 0, has_head=i == last, **rank)
            for i in range(ranks)
        ],
        attention_repeats_keys=False,
        long_sample=4096,
        torch_version="2",
    )


def plan_of(folder, counted, *more, gib=80.0, host=None):
    with planned_args(argv(folder, *more), PlanOptions()) as args:
        return plan_from_count(
            args, counted, Machine(gpu_bytes=gib * GIB, source="test", host_bytes=host)
        )


def phase(plan, name):
    return next(phase for phase in plan.phases if phase.name == name)


def item(items, name):
    return next(item.nbytes for item in items if item.name == name)


# ---- layout


def test_world_is_tp_pp_cp_dp_and_experts_lie_inside():
    sizes = Sizes(world=64, tp=8, pp=4, cp=2, ep=16, etp=1)
    assert sizes.dp == 1  # 8 x 4 x 2 = 64: expert parallelism is not a factor
    assert sizes.expert_dp == 1
    assert stage_ranks(sizes) == [0, 16, 32, 48]


def test_groups_partition_the_ranks(folder):
    flags = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    with planned_args(argv(folder, *flags), PlanOptions()) as args:
        layout = cluster_layout(args)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for axis in ("tp", "dp", "pp", "cp", "ep"):
        assert sorted(r for group in layout.groups(axis) for r in group) == list(range(8))


# ---- the command line


def test_options_of_the_plan_are_taken_out():
    options, rest = split_options(
        ["--gpu-memory", "141", "--json", "--lr", "1e-6", "--gpus=16", "--dry-run"]
    )
    assert options == PlanOptions(gpu_memory=141, as_json=True, gpus=16)
    assert rest == ["--lr", "1e-6"]


def test_more_gpus_than_there_are_is_one_sentence(folder):
    flags = argv(folder, "--rollout-num-gpus", "8")
    flags.remove("--colocate")
    wanted = r"8 GPUs for training \+ 8 for rollout = 16, and there are 8: add --colocate"
    with pytest.raises(ConfigError, match=wanted), planned_args(flags, PlanOptions(gpus=8)):
        pass


def test_without_a_shape_there_is_no_plan():
    wanted = "give --hf-checkpoint with a folder that has a config.json"
    with (
        pytest.raises(ConfigError, match=wanted),
        planned_args(["--hf-checkpoint", "/nowhere"], PlanOptions()),
    ):
        pass


def test_model_args_alone_are_enough():
    with planned_args(model_args("qwen3-4B"), PlanOptions()) as args:
        config = json.loads(Path(args.hf_checkpoint, "config.json").read_text())
    assert {name: config[name] for name in QWEN3_4B if name != "max_position_embeddings"} == {
        name: value for name, value in QWEN3_4B.items() if name != "max_position_embeddings"
    }
    assert args.precision == "bf16"
    assert args.rollout_engine == "sglang"


@pytest.mark.parametrize(
    ("script", "model_type"),
    [
        ("glm4.5-355B-A32B", "glm4_moe"),
        ("deepseek-v3", "deepseek_v3"),
        ("kimi-k2", "deepseek_v3"),
        ("gpt-oss-20B", "gpt_oss"),
        ("qwen1.5-moe-A2.7B", "qwen2_moe"),
        ("qwen3-30B-A3B", "qwen3_moe"),
        ("qwen2.5-7B", "qwen2"),
        ("glm4-9B", "glm4"),
        ("llama3.1-8B", "llama"),
        ("qwen3-next-80B-A3B", "qwen3_next"),
        ("qwen3.5-9B", "qwen3_5_text"),
    ],
)
def test_the_family_follows_from_the_parts(script, model_type):
    config = config_from_flags(read_command_line(model_args(script)))
    assert config is not None
    assert config["model_type"] == model_type


# ---- memory


def test_a_layer_keeps_what_the_docstring_lists(folder):
    """Qwen3-4B, one rank: the sum of the table in activations.py, by hand."""
    shape = shape_of(QWEN3_4B)
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm")
    with planned_args(argv(folder, *flags), PlanOptions()) as args:
        cost = layer_cost(args, shape, Sizes(world=1), repeats_keys=True)
    h, q, kv, f = 2560, 4096, 1024, 9728
    by_hand = 2 * h + (q + 2 * kv) + q + q + 2 * q + q + 2 * f
    log_sums = 32 * 2
    assert cost.dense.total == by_hand + log_sums


def test_long_samples_keep_their_outputs_twice_but_no_repeated_keys(folder):
    def kept(**options: bool) -> float:
        with planned_args(argv(folder), PlanOptions()) as args:
            return layer_cost(args, shape_of(QWEN3_4B), Sizes(world=1), **options).dense.total

    q, kv = 4096, 1024
    short, repeating = kept(repeats_keys=False), kept(repeats_keys=True)
    assert kept(repeats_keys=False, long_samples=True) == short + q
    assert repeating > short + q - 2 * kv
    assert kept(repeats_keys=True, long_samples=True) == max(repeating, short + q)


def test_a_hybrid_layer_keeps_the_average_of_both_kinds(tmp_path):
    """Qwen3.5-9B, one rank: the tables in activations.py, by hand."""
    config = config_from_flags(read_command_line(model_args("qwen3.5-9B")))
    assert config is not None
    folder = str(write_config(config, tmp_path / "m"))
    with planned_args(argv(folder), PlanOptions()) as args:
        cost = layer_cost(args, shape_of(config), Sizes(world=1), repeats_keys=True)
    h, q, kv, f, v, m = 4096, 16 * 256, 4 * 256, 12288, 32 * 128, 2 * 16 * 128 + 32 * 128
    attention = (q + 2 * kv) + q + q + 2 * q + q + 16 * 2 + 4 * q
    delta_net = (m + v) + m + 3 * v
    assert cost.dense.total == 4 * h + attention / 4 + delta_net * 3 / 4 + 2 * f
    assert cost.backward == 10 * m + 2 * h  # bf16


def test_resident_bytes_of_a_rank(folder):
    plan = plan_of(folder, count(10**9))
    items = phase(plan, "training").items
    assert item(items, "parameters") == 2e9
    assert item(items, "gradients") == 4e9
    assert item(items, "fp32 master weights") == 4e9
    assert item(items, "Adam's moments") == 8e9


def test_expert_ranks_of_fsdp_gather_only_the_experts_they_compute(folder):
    """36 MoE layers of 100M weights, 80M of them experts: two layers are gathered at a time."""
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = {**QWEN3_4B, **experts, "model_type": "qwen3_moe"}
    Path(folder, "config.json").write_text(json.dumps(config))
    counted = count(10**9, dense=0)
    counted = replace(
        counted,
        whole=replace(counted.whole, by_part={"experts": 36 * 80_000_000}),
        ranks=[replace(rank, moe_layers=36) for rank in counted.ranks],
    )
    for ep, layer in ((1, 100_000_000), (8, 30_000_000)):
        flags = ("--train-backend", "fsdp", "--expert-model-parallel-size", str(ep))
        plan = plan_of(folder, counted, *flags)
        assert plan.layout.sizes.ep == ep
        gathered = item(phase(plan, "training").items, "gathered parameters")
        assert gathered == 2 * layer * (2 if plan.args.precision == "bf16" else 4)


def test_gradients_are_there_for_the_steps_only_where_engines_take_turns(folder):
    turns, apart = (
        plan_of(folder, count(10**9)),
        plan_of(folder, count(10**9), "--no-offload-train"),
    )
    for plan, held in ((turns, {"training"}), (apart, {p.name for p in apart.phases})):
        found = {p.name for p in plan.phases if any(i.name == "gradients" for i in p.items)}
        assert found == held
    for name in ("log_probs", "weight_update"):
        assert phase(apart, name).total - phase(turns, name).total == 4e9
        assert phase(apart, name).without_offload == phase(turns, name).without_offload
    asleep = [i for i in turns.host.items if i.name.startswith("sleeping")]
    # Eight ranks, weights and 12 bytes of optimizer, in blocks of the next power of two.
    assert sum(i.nbytes for i in asleep) == 8 * (2**31 + 3 * 2**32)


def test_cpu_adam_moves_sixteen_bytes_per_parameter(folder):
    flags = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    plan = plan_of(folder, count(2**28), *flags)
    names = {item.name for item in phase(plan, "training").items}
    assert not names & {"fp32 master weights", "Adam's moments"}
    adam = [i.nbytes for i in plan.host.items if i.name.startswith("CPU Adam")]
    assert sum(adam) == 8 * 2**28 * (4 + 8 + 4)  # eight ranks; a power of two is not rounded up


def test_a_critic_takes_as_much_again_unless_they_take_turns(folder):
    flags = ("--advantage-estimator", "ppo", "--no-offload-train")
    alone, both = plan_of(folder, count(10**8), flags[2]), plan_of(folder, count(10**8), *flags)
    extra = phase(both, "log_probs").total - phase(alone, "log_probs").total
    assert extra == (2 + 4 + 4 + 8) * 10**8
    turns = plan_of(folder, count(10**8), *flags[:2])
    assert (
        phase(turns, "log_probs").total == phase(plan_of(folder, count(10**8)), "log_probs").total
    )


def test_pinned_memory_is_rounded_up_to_powers_of_two():
    assert host_module._pinned([1, 3, 4, 5, 0]) == 1 + 4 + 4 + 8


def test_offload_is_the_difference(folder):
    plan = plan_of(folder, count(10**9))
    training = phase(plan, "training")
    engine = sum(
        i.nbytes
        for i in phase(plan, "rollout").items
        if i.name in ("engine weights", "KV cache", "engine activations", "CUDA graphs")
    )
    assert training.without_offload - training.total == engine


def test_the_first_stage_holds_micro_batches_of_all_stages(folder):
    flags = ("--pipeline-model-parallel-size", "4")
    one = plan_of(folder, count(10**8, ranks=4, step=2, dense=9), *flags)
    kept = item(phase(one, "training").items, "activations")
    assert phase(one, "training").rank == 0
    alone = plan_of(folder, count(10**8, dense=9))
    assert kept == 4 * item(phase(alone, "training").items, "activations")


def test_kv_cache_by_hand(folder):
    flags = ("--sglang-mem-fraction-static", "0.5", "--rollout-num-gpus-per-engine", "2")
    plan = plan_of(folder, count(10**8), *flags)
    per_token = 36 * 2 * (8 // 2) * 128 * 2
    overhead = 0.5 * GIB + 2 * int(0.2 * GIB)
    room = (80 * GIB - overhead) * 0.5 - 4_000_000_000 * 2 / 2
    assert plan.cache is not None
    assert plan.cache.bytes_per_token == per_token
    assert plan.cache.tokens == int(room // per_token)
    assert plan.cache.requests_at_full_length == plan.cache.tokens // 2048


def test_recurrent_states_by_hand(tmp_path):
    """Qwen3-Next: three of four layers have a state per request, and only the fourth a KV cache."""
    config = {
        **QWEN3_4B,
        **{"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--rollout-engine", "slime", "--sglang-mem-fraction-static", "0.5")
    plan = plan_of(str(tmp_path), count(10**8), *flags, "--train-backend", "fsdp")
    assert plan.cache is not None
    assert plan.cache.bytes_per_token == 12 * 2 * 8 * 128 * 2
    each = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
    heads = DeltaHeads(num_key=16, num_value=32, key_dim=128, value_dim=128)
    shape = StateShape(layers=tuple(range(36)), heads=heads, window=3)
    assert shape.nbytes(torch.bfloat16) == each
    free = 80 * GIB * 0.5 - 4_000_000_000 * 2 - 0.5 * GIB
    running, saved = count_states(EngineArgs(model_path="m"), free, each)
    states = item(phase(plan, "rollout").items, "recurrent states")
    assert states == each * (running + 1 + saved)
    assert plan.cache.tokens == int((free - states) // plan.cache.bytes_per_token)
    assert plan.cache.requests_at_full_length == min(plan.cache.tokens // 2048, running)


# ---- verdict


def test_a_plan_fits_or_does_not(folder):
    assert plan_of(folder, count(10**8), gib=80).verdict == "fits"
    needed = plan_of(folder, count(10**9), gib=200).fullest.total / GIB
    assert plan_of(folder, count(4 * 10**9), gib=24).verdict == "does not fit"
    assert needed > 0


def test_too_little_host_memory_does_not_fit(folder):
    plan = plan_of(folder, count(10**8), host=2 * GIB)
    assert plan.verdict == "does not fit"
    assert "host memory" in plan.reason


def test_advice_is_what_the_same_plan_says_with_the_flag(folder):
    flags = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "65536")
    plan = plan_of(folder, count(10**9), *flags, gib=80)
    assert plan.verdict == "does not fit"
    best = find_advice(plan, Machine(gpu_bytes=80 * GIB, source="test"))[0]
    assert best.flags.startswith("--recompute-granularity full")
    assert best.fits
    again = plan_of(folder, count(10**9), *flags, *best.flags.split(), gib=80)
    assert again.verdict != "does not fit"
    assert plan.fullest.total - again.fullest.total == best.saves


# ---- output


def test_json_has_its_keys(folder):
    found = json.loads(json.dumps(plan_json(plan_of(folder, count(10**8)))))
    wanted = {"total_parameters", "per_rank", "memory", "verdict", "host_memory", "kv_cache"}
    assert wanted <= set(found)
    assert found["total_parameters"] == 4_000_000_000
    assert {one["phase"] for one in found["memory"]} == {
        "training",
        "log_probs",
        "rollout",
        "weight_update",
    }
    for one in found["memory"]:
        assert one["total_bytes"] == sum(part["bytes"] for part in one["items"])


def test_page_shows_every_gpu_and_asks_for_nothing(folder):
    page = render_page(plan_of(folder, count(10**8)))
    for rank in range(8):
        assert f"rank {rank}<" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "weight update" in page


# ---- groups of --sglang-config


def test_groups_of_engines_have_their_own_memory_and_models(folder, tmp_path):
    """Two GPUs more than the trainer has: a frozen judge of half the layers, alone on them."""
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps({**QWEN3_4B, "num_hidden_layers": 18}))
    group = {"worker_type": "regular", "num_gpus": 4, "num_gpus_per_engine": 2}
    narrow = {**group, "overrides": {"mem_fraction_static": 0.5}}
    pair = {**group, "num_gpus": 2}
    models = [
        {"name": "policy", "server_groups": [group, narrow]},
        {"name": "judge", "model_path": str(judge), "server_groups": [pair]},
    ]
    file = tmp_path / "engines.yaml"
    file.write_text(json.dumps({"sglang": models}))
    small = WholeModel(
        total=10**9, by_part={"attention": 10**9}, layer=1, buffers=0, largest_tensor=10
    )
    counted = replace(count(500_000_000), served={str(judge): small})
    flags = ("--sglang-config", str(file), "--rollout-num-gpus", "10")
    plan = plan_of(folder, counted, *flags)
    assert [(e.model, e.gpus) for e in plan.layout.engines] == [
        *(("policy", [gpu, gpu + 1]) for gpu in range(0, 8, 2)),
        ("judge", [8, 9]),
    ]
    names = [p.name for p in plan.phases]
    assert names[-2:] == ["rollout of policy", "rollout of judge"]
    assert [phase(plan, name).where for name in names[-2:]] == ["shared", "engine"]
    assert item(phase(plan, "rollout of judge").items, "engine weights") == 2 * 10**9 // 2
    full, half = (
        item(phase(plan, name).items, "KV cache") for name in ("rollout", "rollout of policy")
    )
    assert half < full
    lines = "\n".join(summary_lines(plan))
    assert "policy: 4 x 2 GPUs" in lines and "judge (frozen): 1 x 2 GPUs" in lines
    assert plan_json(plan)["engines"][-1]["model"] == "judge"


@pytest.mark.parametrize("offload", [True, False])
def test_a_frozen_engine_on_a_gpu_of_the_trainer_counts_there(folder, tmp_path, offload):
    """The judge is larger than the policy: while training it stays if nothing is offloaded, its weights during updates."""
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps(QWEN3_4B))
    group = {"worker_type": "regular", "num_gpus": 4, "num_gpus_per_engine": 2}
    wide = {**group, "overrides": {"mem_fraction_static": 0.9}}
    models = [
        {"name": "policy", "server_groups": [group]},
        {"name": "judge", "model_path": str(judge), "server_groups": [wide]},
    ]
    file = tmp_path / "engines.yaml"
    file.write_text(json.dumps({"sglang": models}))
    own = count(500_000_000)
    large = replace(own.whole, total=10**10, by_part={"attention": 10**10})
    flags = ["--sglang-config", str(file), "--rollout-num-gpus", "8"]
    if not offload:
        flags += ["--no-offload-rollout"]
    plan = plan_of(folder, replace(own, served={str(judge): large}), *flags)
    weights = 2 * 10**10 // 2  # bf16 on two GPUs
    assert item(phase(plan, "weight_update").items, "engine weights") == weights
    training = [one for one in phase(plan, "training").items if one.name == "engine weights"]
    assert [one.nbytes for one in training] == ([] if offload else [weights])


def test_data_that_nobody_named_is_not_missed(tmp_path, capsys):
    model = make_tiny_checkpoint(tmp_path / "model")
    main(["--train-backend", "fsdp", "--hf-checkpoint", str(model)])
    assert "prompts.jsonl" not in capsys.readouterr().out
    main(["--train-backend", "fsdp", "--hf-checkpoint", str(model), "--prompt-data", "own.jsonl"])
    assert "own.jsonl does not exist" in capsys.readouterr().out
