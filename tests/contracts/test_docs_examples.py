"""The examples of docs/customization.md fit the flags they stand under, and the main ones run."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from slime.core.types import Status
from slime.rollout.context import RolloutContext
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import EnginePool
from slime.rollout.hooks import HOOKS, check_hooks
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import samples_to_batch
from tests.args import make_args
from tests.fake_engine import FakeEngine, Reply
from tests.prompts import flat, rollout_args
from tests.ranks import run_ranks

DOCUMENT = Path(__file__).parents[2] / "docs" / "customization.md"
MODULE = "docs_customization_examples"

# Which example goes with which flag.
EXAMPLES = {
    "reward": "custom_rm_path",
    "shortest_right_answer": "custom_rm_path",
    "with_calculator": "custom_generate_function_path",
    "not_too_easy": "dynamic_sampling_filter_path",
    "halve_long_answers": "rollout_sample_hook_path",
    "drop_truncated": "rollout_sample_filter_path",
    "count_prompts_never_solved": "rollout_all_samples_process_path",
    "longest_first": "buffer_filter_path",
    "Additions": "data_source_path",
    "one_after_the_other": "rollout_function_path",
    "centred": "custom_reward_post_process_path",
    "rows": "custom_convert_samples_to_train_data_path",
    "reward_on_the_last_token": "custom_advantage_function_path",
    "clip_advantages": "rollout_data_postprocess_path",
    "cross_entropy": "custom_loss_function_path",
    "truncated_ratio": "custom_tis_function_path",
    "sum_over_a_fixed_length": "custom_pg_loss_reducer_function_path",
    "log_longest": "custom_rollout_log_function_path",
    "print_rewards": "custom_eval_rollout_log_function_path",
    "recorded_agent": "custom_generate_function_path",
    "allow_tf32": "custom_megatron_init_path",
    "count_parameters": "custom_megatron_before_log_prob_hook_path",
    "rest_after_rollout_100": "custom_megatron_before_train_step_hook_path",
    "plain_gpt": "custom_model_provider_path",
}


@pytest.fixture(scope="module", autouse=True)
def module():
    made = types.ModuleType(MODULE)
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(block, str(DOCUMENT), "exec"), made.__dict__)
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def test_every_flag_is_in_the_table_and_every_example_is_known(module):
    text = DOCUMENT.read_text()
    for name in HOOKS:
        assert f"`--{name.replace('_', '-')}`" in text
    defined = set(re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
    assert defined - {"fill", "agent", "run_tests", "shared_client"} == set(EXAMPLES)
    assert set(EXAMPLES.values()) == set(HOOKS) - {"eval_function_path"}  # the rollout's does both


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_have_the_right_signature(example):
    group_rm = example == "shortest_right_answer"
    check_hooks(
        make_args().replace(**{EXAMPLES[example]: f"{MODULE}.{example}"}, group_rm=group_rm)
    )


def rollout(tmp_path, script, source=None, **flags):
    paths = {name: f"{MODULE}.{value}" for name, value in flags.items() if name.endswith("_path")}
    rest = {name: value for name, value in flags.items() if not name.endswith("_path")}
    args = rollout_args(tmp_path, rollout_max_response_len=64, **rest, **paths)
    with FakeEngine(script) as engine, RolloutContext(pool=EnginePool([engine.url])).active():
        return generate_rollout(
            args, 0, source(args) if source else RolloutDataSourceWithBuffer(args)
        )


def in_turns(text):
    """Of the requests with one prompt, which come in any order with others, each second has turn 1."""
    asked = Counter()

    def script(request):
        asked[request.prompt] += 1
        return Reply(text=text(request.prompt, asked[request.prompt] % 2))

    return script


def test_reward_filters_and_buffer(tmp_path, capsys):
    output = rollout(
        tmp_path,
        in_turns(lambda prompt, turn: f"it is {int(prompt[0]) + turn}"),
        rm_type=None,
        custom_rm_path="reward",
        dynamic_sampling_filter_path="not_too_easy",
        rollout_sample_hook_path="halve_long_answers",
        rollout_sample_filter_path="drop_truncated",
        rollout_all_samples_process_path="count_prompts_never_solved",
        buffer_filter_path="longest_first",
    )
    assert {s.reward for s in flat(output)} == {0.0, 1.0}
    assert "of 2 prompts unsolved; 10 prompts in all" in capsys.readouterr().out


def test_group_reward(tmp_path):
    output = rollout(
        tmp_path,
        in_turns(lambda prompt, turn: "1234567890" + "!" * turn),
        rm_type=None,
        custom_rm_path="shortest_right_answer",
        group_rm=True,
        reward_key="score",
    )
    assert all(sorted(s.reward["score"] for s in group) == [0.0, 1.0] for group in output.samples)


def test_calculator(tmp_path):
    def script(request):
        asked = "=" in request.prompt.split("<calc>")[-1] and "<calc>" in request.prompt
        return Reply(text="so it is done" if asked else "<calc>20+22</calc>")

    output = rollout(tmp_path, script, custom_generate_function_path="with_calculator")
    for sample in flat(output):
        assert sample.status == Status.COMPLETED
        assert sample.response == "<calc>20+22</calc> = 42\nso it is done"
        assert 0 in sample.loss_mask and sample.loss_mask[-1] == 1


def test_data_source_of_the_example(tmp_path, module):
    output = rollout(tmp_path, lambda request: Reply(), source=module.Additions)
    assert [s.index for s in flat(output)] == [0, 1, 2, 3]
    args = rollout_args(tmp_path).replace(save=str(tmp_path), load=str(tmp_path))
    source = module.Additions(args)
    source.get_samples(3)
    source.save(0)
    resumed = module.Additions(args)
    resumed.load(0)
    assert resumed.get_samples(1) == source.get_samples(1)


def test_rollout_function_of_the_example(tmp_path, module):
    args = rollout_args(tmp_path)
    with FakeEngine() as engine, RolloutContext(pool=EnginePool([engine.url])).active():
        output = module.one_after_the_other(args, 0, RolloutDataSourceWithBuffer(args))
    assert {(s.response, s.status) for s in flat(output)} == {("ok", Status.COMPLETED)}
    assert all(s.reward in (0.0, 1.0) for s in flat(output))


def test_recorded_agent(tmp_path):
    pytest.importorskip("openai")
    output = rollout(
        tmp_path,
        lambda request: Reply(text="hello"),
        custom_generate_function_path="recorded_agent",
    )
    for sample in flat(output):
        assert sample.metadata["agent_result"] == "hello"
        assert sample.loss_mask == [1] * len("hello$")


def test_evaluation_of_the_rollout_function(tmp_path, module, capsys):
    args = rollout_args(tmp_path)
    output = module.one_after_the_other(args, 0, None, evaluation=True)
    module.print_rewards(3, args, output.data, {})
    assert capsys.readouterr().out == "3 none 0.0\n"


def test_rewards_rows_and_log(tmp_path, module):
    samples = flat(rollout(tmp_path, lambda request: Reply(text="a" * (1 + request.number))))
    for sample in samples:
        sample.reward = float(sample.index)
    args = rollout_args(tmp_path)
    raw, rewards = module.centred(args, samples)
    assert raw == [0, 1, 2, 3] and rewards == [-1.5, -0.5, 0.5, 1.5]
    metrics = {}
    module.log_longest(0, args, samples, metrics, 1.0)
    assert metrics == {"rollout/longest": max(s.response_length for s in samples)}
    batch = samples_to_batch(
        args.replace(custom_convert_samples_to_train_data_path=f"{MODULE}.rows"), samples
    )
    assert batch.rewards.tolist() == [0, 1, 2, 3]
    assert [row.tolist() for row in batch.tokens] == [s.tokens for s in samples]
    module.reward_on_the_last_token(args, batch)
    expected = [[0.0] * (s.response_length - 1) + [s.reward] for s in samples]
    assert [row.tolist() for row in batch.advantages] == expected
    batch.advantages = [row * 4 for row in batch.advantages]
    module.clip_advantages(args, 0, batch)
    assert max(row.max() for row in batch.advantages) == 5


def test_losses(module):
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 9), torch.tensor([1, 2, 3, 4])
    batch = types.SimpleNamespace(labels=labels, loss_mask=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    loss, log = module.cross_entropy(None, batch, logits, torch.sum)
    picked = logits.softmax(-1)[torch.arange(4), labels].log()
    assert loss.item() == pytest.approx(-(picked * batch.loss_mask).sum().item(), rel=1e-5)
    assert log["cross_entropy"] == loss

    args = make_args(use_tis=True, tis_clip=2.0)
    ours, masks, metrics = module.truncated_ratio(
        args=args, pg_loss=torch.ones(3),
        train_log_probs=[torch.tensor([0.0, 0.0]), torch.tensor([0.0])],
        rollout_log_probs=[torch.tensor([-1.0, 1.0]), torch.tensor([0.0])],
        loss_masks=[torch.ones(2), torch.ones(1)], total_lengths=[3, 2], response_lengths=[2, 1],
    )  # fmt: skip
    assert ours.tolist() == pytest.approx([2.0, math.exp(-1), 1.0])
    assert len(masks) == 2 and metrics["tis_weight"].tolist() == ours.tolist()

    reduce = module.sum_over_a_fixed_length(
        [3, 2], [2, 1], [torch.tensor([1, 0]), torch.ones(1)], True
    )
    assert reduce(torch.tensor([512.0, 7.0, 512.0])).item() == 1.0


def test_megatron_hooks(module, capsys):
    chunks = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)]
    module.count_parameters(None, chunks, "ref_")
    assert capsys.readouterr().out == "ref_log_probs: 14 parameters on this rank\n"
    optimizer = torch.optim.AdamW(chunks[0].parameters(), weight_decay=0.1)
    module.rest_after_rollout_100(None, 99, 0, chunks, optimizer, None)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    module.rest_after_rollout_100(None, 100, 0, chunks, optimizer, None)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    before = torch.backends.cuda.matmul.allow_tf32
    module.allow_tf32(None)
    assert torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before


def test_model_provider():
    pytest.importorskip("megatron.core")
    text = DOCUMENT.read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "plain_gpt" in b)
    assert run_ranks(build_plain_gpt, 1, block) == [(1, 5, 320)]


def build_plain_gpt(rank, block):
    """In a process of its own: what the provider builds runs."""
    from slime.backends.megatron_utils.cpu import install_cpu_adapter

    install_cpu_adapter()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    space: dict = {}
    exec(block, space)
    model = space["plain_gpt"](pre_process=True, post_process=True)
    ids = torch.arange(5)[None]
    mask = torch.ones(1, 1, 5, 5).triu(1).bool()
    return tuple(model(ids, ids, mask).shape)


def test_the_sandbox_of_the_document_runs_a_program(module):
    assert asyncio.run(module.run_tests(b"print(6 * 7)")) == "42\n"
