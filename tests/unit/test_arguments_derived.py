"""Values that follow from others."""

import json
import time
from pathlib import Path

import pytest

from slime.config.arguments import Args, resolve
from slime.config.flags.draft import Draft
from slime.config.flags.parser import read_command_line
from slime.config.installed import visible_gpus
from tests.args import make_args, make_argv


def on_machine(gpus: int, *, cluster: bool = False, **overrides: object) -> Args:
    """The arguments as a machine with that many GPUs, perhaps of a cluster, resolves them."""
    given = read_command_line(make_argv(**overrides))
    origins = dict.fromkeys(given, "command line")
    return resolve(Draft(given, origins, gpus=gpus, cluster=cluster))


def test_batches():
    shape = {"rollout_batch_size": 6, "n_samples_per_prompt": 4}
    for given, expected in (
        ({}, (24, 1)),
        ({"global_batch_size": 8}, (8, 3)),
        ({"num_steps_per_rollout": 4}, (6, 4)),
        ({"num_steps_per_rollout": 2, "global_batch_size": 12}, (12, 2)),
    ):
        args = make_args(**shape, **given, num_rollout=5)
        assert (args.global_batch_size, args.num_steps_per_rollout) == expected
        assert args.lr_decay_iters == 5 * expected[1]
    assert make_args(**shape).over_sampling_batch_size == 6


def test_rollouts_of_epochs(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1"}\n' * 7 + "\n")
    for spec, prompts in (
        (f"{data}", 7),
        (f"{data}@[1:5]", 4),
        (f"{data}@[:-1]", 6),
        (f"{data}:weight=2", 14),
    ):
        args = make_args(num_epoch=3, prompt_data=[spec], rollout_batch_size=2)
        assert args.num_rollout == 3 * (prompts // 2), spec
    both = make_args(num_epoch=1, prompt_data=[str(data), f"{data}@[0:2]"], rollout_batch_size=3)
    assert both.num_rollout == 9 // 3


def test_a_machine_without_a_gpu():
    args = on_machine(0)
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus, args.colocate) == (1, 1, False)
    assert (args.distributed_backend, args.precision) == ("gloo", "fp32")
    assert args.update_weight_transport == "distributed"
    assert not args.offload_train and not args.offload_rollout
    assert on_machine(0, bf16=True).precision == "bf16"


def test_a_machine_with_gpus():
    args = on_machine(4)
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus, args.colocate) == (4, 4, True)
    assert (args.distributed_backend, args.precision) == ("nccl", "bf16")
    assert args.update_weight_transport == "tensor"
    assert args.num_gpus_per_node == 4
    assert on_machine(4, fp32=True).precision == "fp32"
    apart = on_machine(4, actor_num_gpus_per_node=3, rollout_num_gpus=1)
    assert not apart.colocate and apart.update_weight_transport == "distributed"


def test_several_nodes_keep_eight_gpus_each():
    args = on_machine(1, cluster=True, actor_num_nodes=2)
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus) == (8, 16)


def test_colocation_offloads_and_reports_a_differing_number():
    args = make_args(colocate=True, actor_num_gpus_per_node=2)
    assert (args.rollout_num_gpus, args.offload_train, args.offload_rollout) == (2, True, True)
    assert args.warnings == ()
    args = make_args(colocate=True, actor_num_gpus_per_node=2, rollout_num_gpus=3)
    assert args.rollout_num_gpus == 2
    assert "--rollout-num-gpus 3" in args.warnings[0] and "2 training GPUs" in args.warnings[0]
    assert make_args(colocate=True, rollout_num_gpus=1).warnings == ()


def test_offload_is_both():
    args = make_args(offload=True)
    assert args.offload_train and args.offload_rollout
    args = make_args(offload=True, offload_train=False)
    assert not args.offload_train and args.offload_rollout


def test_the_engines_tensor_parallel_size_has_two_names():
    assert make_args(sglang_tp_size=1).rollout_num_gpus_per_engine == 1
    given = read_command_line(make_argv(sglang_tp_size=4, rollout_engine="sglang"))
    draft = Draft(given, dict.fromkeys(given, "command line"), gpus=0)
    from slime.config.derive import derive

    derive(draft)
    assert draft["rollout_num_gpus_per_engine"] == 4
    assert draft["rollout_num_gpus"] == 4


def test_no_engine_where_nothing_is_generated(tmp_path):
    sft = "slime.rollout.sft_rollout.generate_rollout"
    args = make_args(rollout_function_path=sft, loss_type="sft_loss", rm_type=None)
    assert args.rollout_num_gpus == 0
    data = ["a", str(Path(__file__))]
    args = make_args(rollout_function_path=sft, eval_prompt_data=data, eval_interval=1)
    assert args.rollout_num_gpus == 1
    (tmp_path / "0.pt").write_text("")
    args = make_args(load_debug_rollout_data=tmp_path / "{rollout_id}.pt")
    assert args.debug_train_only and args.rollout_num_gpus == 0


def test_response_length_is_what_the_context_leaves(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    base = {"hf_checkpoint": tmp_path, "rollout_max_response_len": None}
    assert make_args(**base).rollout_max_response_len == 99
    assert make_args(**base, rollout_max_prompt_len=30).rollout_max_response_len == 70
    assert make_args(**base, rollout_max_context_len=50).rollout_max_response_len == 49
    assert make_args(**base).eval_max_response_len == 99


def test_a_response_without_a_limit_ends_with_the_context(tmp_path):
    """A prompt of 20 tokens leaves 80 of 100: engines refuse a request for more."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    base = {"hf_checkpoint": tmp_path, "rollout_max_response_len": None}
    assert make_args(**base).rollout_max_context_len == 100
    assert make_args(**base, rollout_max_context_len=50).rollout_max_context_len == 50
    assert make_args(hf_checkpoint=tmp_path).rollout_max_context_len is None
    sft = "slime.rollout.sft_rollout.generate_rollout"  # rows are not cut
    assert make_args(**base, rollout_function_path=sft).rollout_max_context_len is None


def test_evaluation_falls_back_to_the_rollout():
    args = make_args(rollout_temperature=0.7, rollout_top_p=0.9, rollout_top_k=5, label_key="l")
    shown = (args.eval_temperature, args.eval_top_p, args.eval_top_k, args.eval_label_key)
    assert shown == (0.7, 0.9, 5, "l")
    assert args.eval_function_path == args.rollout_function_path
    assert make_args(reward_key="score").eval_reward_key == "score"
    assert make_args(rollout_temperature=0.7, eval_temperature=0).eval_temperature == 0


def test_run_folder():
    before = time.time()
    name = Path(make_args(run_dir=None).run_dir)
    assert name.is_absolute() and name.parent == Path.cwd() / "runs"
    model, day, clock = name.name.rsplit("-", 2)
    assert model == "model"
    stamp = time.mktime(time.strptime(f"{day}-{clock}", "%Y%m%d-%H%M%S"))
    assert int(before) <= stamp <= time.time()
    assert make_args(run_dir="here").run_dir == str(Path.cwd() / "here")


def test_other_rules():
    args = make_args(eps_clip=0.3, sglang_enable_deterministic_inference=True)
    assert args.eps_clip_high == 0.3 and args.deterministic is True
    assert make_args(eps_clip_high=0.28).eps_clip_high == 0.28
    assert make_args().deterministic is False
    args = make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=64)
    assert args.log_probs_max_tokens_per_gpu == 64
    assert args.micro_batch_size == 1
    assert args.update_weight_disk_dir == str(Path(args.run_dir) / "weights")
    assert make_args(rollout_engine=None).rollout_engine == "slime"


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ({}, 4096),
        ({"max_tokens_per_gpu": 64}, 64),
        ({"use_dynamic_batch_size": True}, 4096),
        ({"log_probs_max_tokens_per_gpu": 8192}, 4096),
        ({"micro_batch_size": 1}, None),
        ({"micro_batch_size": 2, "max_tokens_per_gpu": 64}, None),
        ({"micro_batch_size": 2, "use_dynamic_batch_size": True}, 4096),
        ({"qkv_format": "bshd", "attn_implementation": "sdpa"}, None),
    ],
)
def test_micro_batches_are_filled_by_tokens_unless_their_size_is_given(given, budget):
    args = make_args(**given)
    assert args.use_dynamic_batch_size == (budget is not None)
    if budget is not None:
        assert args.max_tokens_per_gpu == budget
        assert args.log_probs_max_tokens_per_gpu == max(
            budget, given.get("log_probs_max_tokens_per_gpu", 0)
        )


def test_fully_asynchronous_runs_keep_as_many_groups_as_staleness_allows():
    path = "slime.rollout.fully_async_rollout.generate_rollout"
    for name in (path, f"{path}_fully_async"):
        given = {"rollout_function_path": name, "train_async": True, "rollout_batch_size": 2}
        for staleness, groups in ((None, 4), (0, 2), (1, 4), (3, 8)):
            args = make_args(**given, max_weight_staleness=staleness)
            assert args.over_sampling_batch_size == groups
        assert make_args(**given, over_sampling_batch_size=5).over_sampling_batch_size == 5
    assert make_args(max_weight_staleness=3, rollout_batch_size=2).over_sampling_batch_size == 2


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("0,2", 2), ("-1", 0), ("1,-1,2", 1), ("0,1,2,3,4,5", 4), ("GPU-abc", 1)],
)
def test_visible_gpus(visible, count):
    assert visible_gpus(present=4, visible=visible) == count
