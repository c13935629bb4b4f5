"""What the plan counts against what real ranks hold, byte for byte; totals against published figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.model_size import CountRequest, ModelCount, count_models
from slime.cli.plan.model_shape import config_from_flags, write_config
from slime.cli.plan.rank_layout import cluster_layout
from slime.config.arguments import Args
from slime.config.flags.parser import read_command_line
from slime.core.errors import UserError
from slime.weights.fp8 import Fp8Format, convert_to_fp8
from tests.fsdp import Case, make_rows
from tests.megatron import DIST_OPT, EP, ETP1, PP, SP, megatron_args, my_rows, start_actor
from tests.parity.test_model_scripts import model_args
from tests.rank_pool import run_megatron_ranks
from tests.ranks import run_ranks
from tests.tiny import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ADAPTED = {"lora_rank": 4, "lora_target_modules": ["q_proj", "experts"]}
LAYOUTS = {
    "TP2": ("dense", (SP,)),
    "PP2": ("dense", (PP,)),
    "EP2": ("moe", (EP, ETP1)),
    "TP2 EP2": ("moe", (SP, EP, ETP1)),
    "DP2 distributed optimizer": ("dense", (DIST_OPT,)),
    "EP2 distributed optimizer": ("moe", (EP, ETP1, DIST_OPT)),
    "EP2 with adapters": ("moe", (EP, ADAPTED)),
    "TP2 EP2 with shared adapters": (
        "moe",
        (SP, EP, ETP1, DIST_OPT, ADAPTED, {"lora_experts_shared_outer": True}),
    ),
}
# As their makers give them, to the last weight; without layers that predict further tokens.
PUBLISHED = {
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-7B": 7_615_616_512,
    "qwen3-0.6B": 596_049_920,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "llama2-7B": 6_738_415_616,
    "llama3-8B": 8_030_261_248,
    "llama3.1-8B": 8_030_261_248,
    "llama3.2-3B": 3_212_749_824,
    "glm4-9B": 9_400_279_040,
    "gpt-oss-20B": 20_914_757_184,
    "gpt-oss-120B": 116_829_156_672,
}


def dense(layers, hidden, ffn, heads, groups, dim, vocab, *, bias=0, norms=2):
    """Weights of a dense model with an output layer of its own, from the table of its sizes."""
    width = (heads + 2 * groups) * dim
    attention = hidden * width + bias * width + heads * dim * hidden
    return 2 * vocab * hidden + hidden + layers * (attention + 3 * hidden * ffn + norms * hidden)


def glm_moe(layers, first, hidden, ffn, expert, experts, heads, groups, vocab, *, qk_norm):
    width = (heads + 2 * groups) * 128
    attention = hidden * width + width + heads * 128 * hidden + 256 * qk_norm + 2 * hidden
    sparse = 3 * hidden * expert * (experts + 1) + experts * hidden
    mlps = first * 3 * hidden * ffn + (layers - first) * sparse
    return 2 * vocab * hidden + hidden + layers * attention + mlps


def deepseek_v3(layers, first, hidden, ffn, expert, experts, heads, vocab, *, q_lora, nope, value):
    kv_lora, rope = 512, 64
    queries = hidden * q_lora + q_lora + q_lora * heads * (nope + rope)
    keys = hidden * (kv_lora + rope) + kv_lora + kv_lora * heads * (nope + value)
    attention = queries + keys + heads * value * hidden + 2 * hidden
    sparse = 3 * hidden * expert * (experts + 1) + experts * hidden
    mlps = first * 3 * hidden * ffn + (layers - first) * sparse
    return 2 * vocab * hidden + hidden + layers * attention + mlps


def qwen2_moe(layers, hidden, expert, experts, shared, heads, groups):
    width = (heads + 2 * groups) * 128
    attention = hidden * width + width + heads * 128 * hidden + 2 * hidden
    sparse = 3 * hidden * (expert * experts + shared) + experts * hidden + hidden
    return 2 * 151936 * hidden + hidden + layers * (attention + sparse)


def hybrid(layers, hidden, groups, vocab, mlp):
    """Of 16 heads of 256; three of four layers are gated delta nets with 16 key, 32 value heads of 128."""
    heads, keys, values = 16 * 256, 16 * 128, 32 * 128
    attention = 2 * hidden * heads + 2 * hidden * groups * 256 + heads * hidden + 2 * 256
    linear = hidden * (2 * keys + 2 * values + 2 * 32) + values * hidden
    linear += 4 * (2 * keys + values) + 2 * 32 + 128  # convolution, A and dt, the norm
    mixers = layers // 4 * (attention + 3 * linear)
    return 2 * vocab * hidden + hidden + mixers + layers * (mlp + 2 * hidden)


def shared_moe(hidden, expert, experts):
    return 3 * hidden * expert * (experts + 1) + experts * hidden + hidden


# Published under rounded names only: counted from the tables of their sizes.
BY_HAND = {
    "glm4-32B": dense(61, 6144, 23040, 48, 2, 128, 151552, norms=4),
    "mimo-7B": dense(36, 4096, 11008, 32, 8, 128, 151680, bias=1),
    "glm4.5-355B-A32B": glm_moe(92, 3, 5120, 12288, 1536, 160, 96, 8, 151552, qk_norm=1),
    "glm4.5-106B-A12B": glm_moe(46, 1, 4096, 10944, 1408, 128, 96, 8, 151552, qk_norm=0),
    "deepseek-v3": deepseek_v3(
        61, 3, 7168, 18432, 2048, 256, 128, 129280, q_lora=1536, nope=128, value=128
    ),
    "kimi-k2": deepseek_v3(
        61, 1, 7168, 18432, 2048, 384, 64, 163840, q_lora=1536, nope=128, value=128
    ),
    "glm4.7-30B-A3B": deepseek_v3(
        47, 1, 2048, 10240, 1536, 64, 20, 154880, q_lora=768, nope=192, value=256
    ),
    "qwen1.5-moe-A2.7B": qwen2_moe(24, 2048, 1408, 60, 5632, 16, 16),
    "qwen2-57B-A14B": qwen2_moe(28, 3584, 2560, 64, 20480, 28, 4),
    "qwen3-next-80B-A3B": hybrid(48, 2048, 2, 151936, shared_moe(2048, 512, 512)),
    "qwen3.5-9B": hybrid(32, 4096, 4, 248320, 3 * 4096 * 12288),
    "qwen3.5-35B-A3B": hybrid(40, 2048, 2, 248320, shared_moe(2048, 512, 256)),
}


def counts(requests: list[CountRequest]) -> list[ModelCount]:
    found = []
    for answer in count_models(requests):
        assert isinstance(answer, ModelCount), answer
        found.append(answer)
    return found


def test_a_count_that_takes_too_long_is_reported_in_one_sentence(tmp_path):
    case = Case(model=str(make_tiny_checkpoint(tmp_path / "m")))
    request = CountRequest(args=case.args(), ranks=[0], world_size=1)
    with pytest.raises(UserError, match=r"took more than 0\.01 s: run it again"):
        count_models([request], timeout_s=0.01)


def storage_bytes(tensors) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def held_by_megatron(rank: int, many: list[Args]) -> list[dict[str, int]]:
    return [_held(start_actor(args, rank, args.actor_num_gpus_per_node)) for args in many]


def _held(actor) -> dict[str, int]:
    """Sizes of real tensors after a real step."""
    actor.train(0, my_rows(actor, 0))
    params = [p for chunk in actor.chunks for p in chunk.parameters()]
    buffers = [b for chunk in actor.chunks for b in chunk.buffers()]
    own = {p.untyped_storage().data_ptr() for p in params}
    masters, moments = [], []
    for part in actor.optimizer.inner.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        for group in inner.param_groups:
            masters += [p for p in group["params"] if p.untyped_storage().data_ptr() not in own]
        for state in inner.state.values():
            moments += [state["exp_avg"], state["exp_avg_sq"]]
    wrapped = [buffer for chunk in actor.model for buffer in chunk.buffers]
    wrapped += [buffer for chunk in actor.model for buffer in chunk.expert_parallel_buffers]
    return {
        "parameters": sum(p.numel() for p in params),
        "weights": storage_bytes([*params, *buffers]),
        "gradients": storage_bytes(buffer.grad_data for buffer in wrapped),
        "masters": storage_bytes(masters),
        "moments": storage_bytes(moments),
    }


def test_megatron_ranks_hold_what_the_plan_says(tmp_path):
    models = {
        "dense": str(make_tiny_checkpoint(tmp_path / "dense", tie_word_embeddings=False)),
        "moe": str(make_tiny_checkpoint(tmp_path / "moe", "qwen3_moe")),
    }
    many = [megatron_args(Case(model=models[m]), 2, *flags) for m, flags in LAYOUTS.values()]
    counted = counts([CountRequest(args=a, ranks=[0, 1], world_size=2) for a in many])
    held = run_megatron_ranks(held_by_megatron, 2, many)
    for number, name in enumerate(LAYOUTS):
        for rank in range(2):
            plan = counted[number].ranks[rank]
            assert {
                "parameters": plan.parameters,
                "weights": plan.weight_bytes,
                "gradients": plan.gradient_bytes,
                "masters": plan.master_bytes,
                "moments": plan.moment_bytes,
            } == held[rank][number], (name, rank)


def held_by_fsdp(rank: int, args: Args, world_size: int) -> dict[str, int]:
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
    from slime.rollout.train_data import split_batch

    actor = FSDPTrainRayActor(args, rank, world_size)
    actor.init(args)
    batch = split_batch(args, make_rows(0), dp_size=world_size, cp_size=1)[rank]
    batch.old_log_probs = actor.log_probs(batch, "actor")
    actor.advantages(0, batch)
    actor.forward_backward(next(actor.steps(batch)))
    params = actor.model.params.values()
    local = [param.to_local() for param in params]
    gradients = [param.grad.to_local() for param in params if param.grad is not None]
    actor.optimizer.step()
    moments = [
        state[name]
        for part in actor.optimizer._parts
        for state in part.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return {
        "parameters": sum(t.numel() for t in local),
        "weights": sum(t.nbytes for t in local),
        "gradients": sum(t.nbytes for t in gradients),
        "moments": sum(t.nbytes for t in moments),
    }


LORA = {"lora_rank": 4, "bf16": True, "lora_target_modules": ["q_proj", "down_proj"]}


@pytest.mark.parametrize(("world_size", "flags"), [(1, {}), (2, {}), (1, LORA), (2, LORA)])
def test_fsdp_ranks_hold_what_the_plan_says(tmp_path, world_size, flags):
    model = str(make_tiny_checkpoint(tmp_path / "m"))
    layout = {"actor_num_gpus_per_node": world_size, "rollout_num_gpus": 1}
    args = Case(model=model).args(**layout, **flags)
    ranks = list(range(world_size))
    [counted] = counts([CountRequest(args=args, ranks=ranks, world_size=world_size)])
    held = run_ranks(held_by_fsdp, world_size, args, world_size)
    for rank in ranks:
        plan = counted.ranks[rank]
        moments = sum(size * number for size, number in plan.moment_sizes.items())
        assert {
            "parameters": plan.parameters,
            "weights": sum(size * number for size, number in plan.weight_sizes.items()),
            "gradients": 4 * moments,
            "moments": plan.moment_bytes,
        } == held[rank]


def held_in_fp8(rank: int, args: Args, world_size: int) -> int:
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor

    actor = FSDPTrainRayActor(args, rank, world_size)
    actor.init(args)
    local = [param.to_local() for param in actor.model.params.values()]
    return sum(tensor.nbytes for tensor in [*local, *actor.model.module.hf.buffers()])


@pytest.mark.parametrize("only_config", [False, True], ids=["files", "config.json"])
def test_a_base_in_fp8_takes_what_the_plan_says(tmp_path, only_config):
    """A byte per element of every matrix and four per block, also where only config.json is known."""
    plain = make_tiny_checkpoint(tmp_path / "m", "qwen3_moe", moe_intermediate_size=144)
    convert_to_fp8(plain, tmp_path / "fp8", Fp8Format(strategy="block"))
    layout = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
    wide, fp8 = (Case(model=str(tmp_path / n)).args(**layout, **LORA) for n in ("m", "fp8"))
    held = run_ranks(held_in_fp8, 2, fp8, 2)
    files = load_file(tmp_path / "fp8" / "model.safetensors")
    if only_config:
        for path in (tmp_path / "fp8").glob("*.safetensors*"):
            path.unlink()
    requests = [CountRequest(args=args, ranks=[0, 1], world_size=2) for args in (wide, fp8)]
    of_wide, counted = counts(requests)
    assert [rank.weight_bytes for rank in counted.ranks] == held
    matrices = [t for t in files.values() if t.dtype == torch.float8_e4m3fn]
    elements = sum(matrix.numel() for matrix in matrices)
    assert sum(rank.fp8_parameters for rank in counted.ranks) == elements
    scales = sum(t.nbytes for n, t in files.items() if n.endswith("_scale_inv"))
    for before, after in zip(of_wide.ranks, counted.ranks, strict=True):
        assert before.parameters == after.parameters
        assert before.expert_parameters == after.expert_parameters
        assert before.weight_bytes - after.weight_bytes == after.fp8_parameters - scales


def test_totals_are_the_published_ones(tmp_path):
    names = [*PUBLISHED, *BY_HAND]
    assert set(names) <= {path.stem for path in (ROOT / "scripts" / "models").glob("*.sh")}
    requests = []
    for name in names:
        config = config_from_flags(read_command_line(model_args(name)))
        assert config is not None, name
        values = {
            "hf_checkpoint": str(write_config(config, tmp_path / name)),
            "train_backend": "fsdp",
        }
        requests.append(CountRequest(args=Args(values, {}), ranks=[], world_size=1))
    found = {n: c.whole.total for n, c in zip(names, counts(requests), strict=True)}
    assert found == {**PUBLISHED, **BY_HAND}


_GROUPS = """
import json, sys
from slime.backends.megatron_utils.cpu import install_cpu_adapter
install_cpu_adapter()
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state as state
found = []
for rank in range(16):
    dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
    state.initialize_model_parallel(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2,
        expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    groups = {
        "tp": state.get_tensor_model_parallel_group(), "pp": state.get_pipeline_model_parallel_group(),
        "cp": state.get_context_parallel_group(), "dp": state.get_data_parallel_group(),
        "ep": state.get_expert_model_parallel_group()}
    found.append({n: dist.get_process_group_ranks(g) for n, g in groups.items()})
    state.destroy_model_parallel()
    dist.destroy_process_group()
print("GROUPS " + json.dumps(found))
"""


def test_groups_are_megatrons(tmp_path):
    model = str(make_tiny_checkpoint(tmp_path / "moe", "qwen3_moe", num_experts=8))
    flags = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    }
    layout = cluster_layout(megatron_args(Case(model=model), 16, flags))
    output = subprocess.check_output([sys.executable, "-W", "ignore", "-c", _GROUPS], text=True)
    answer = next(line for line in output.splitlines() if line.startswith("GROUPS "))
    for rank, groups in enumerate(json.loads(answer.removeprefix("GROUPS "))):
        for axis, ranks in groups.items():
            mine = next(group for group in layout.groups(axis) if rank in group)
            assert mine == ranks, (rank, axis)
