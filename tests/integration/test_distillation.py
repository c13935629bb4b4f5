"""On-policy distillation: the teacher's log-probs, held by the trainer or served by an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample, Status
from slime.rollout.on_policy_distillation import reward_func
from slime.rollout.train_data import samples_to_batch, split_batch
from slime.utils.http import run
from tests import naive_rl
from tests.args import make_args
from tests.engines import engine_server
from tests.fsdp import Case, whole_weights
from tests.megatron import DIST_OPT, SP
from tests.peft_runs import hf_names, peft_case, peft_model
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny import make_byte_tokenizer, make_tiny_checkpoint


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("s") / "student", weight_scale=3.0))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another family and width; only the vocabulary is the same."""
    path = tmp_path_factory.mktemp("t") / "teacher"
    return str(make_tiny_checkpoint(path, "llama", seed=3, weight_scale=3.0, hidden_size=96))


@pytest.fixture(scope="module")
def rollouts(student: str) -> list[list[Sample]]:
    made = [naive_rl.make_samples(student, rollout_id) for rollout_id in range(2)]
    return [[replace(s, teacher_log_probs=None) for s in samples] for samples in made]


def taught(teacher: str, samples: list[Sample], temperature: float = 1.0) -> list[Sample]:
    """The same samples with what the teacher thinks of them, by plain Hugging Face."""
    net = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager")
    with torch.no_grad():
        columns = [naive_rl.log_probs_and_entropy(net, s, temperature)[0] for s in samples]
    return [
        replace(s, teacher_log_probs=column.tolist())
        for s, column in zip(samples, columns, strict=True)
    ]


def args_of(student: str, teacher: str, **more: Any) -> Any:
    flags = {
        "hf_checkpoint": student,
        "use_opd": True,
        "opd_type": "megatron",
        "opd_kl_coef": 0.7,
        "opd_teacher_load": teacher,
        "rollout_max_response_len": naive_rl.MAX_RESPONSE_LEN,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 1,
        "global_batch_size": 4,
        "lr": 3e-3,
        "lr_decay_style": "constant",
        "adam_eps": 1e-4,
        "micro_batch_size": 3,
    }
    return make_args(**{**flags, **more})


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_a_teacher_in_the_trainer_it_learns_what_the_naive_loop_does(
    ranks, student, teacher, rollouts
):
    args = args_of(student, teacher, rollout_temperature=0.8)
    expected = naive_rl.learn(args, student, [taught(teacher, s, 0.8) for s in rollouts])
    outcome = run_fsdp_ranks(_train, ranks, ranks, args, rollouts)[0]
    for number, metrics in enumerate(outcome["metrics"]):
        assert metrics["train/loss"] == pytest.approx(expected.losses[number], rel=2e-4, abs=2e-6)
        assert metrics["train/grad_norm"] == pytest.approx(expected.grad_norms[number], rel=2e-4)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(outcome["weights"][name], weight, rtol=1e-4, atol=1e-5)
    assert outcome["metrics"][0]["train/opd_kl"] != 0
    assert "lack the teacher's log-probs" in outcome["without_teacher"]


def _train(rank: int, world_size: int, args: Any, rollouts: list[list[Sample]]) -> dict[str, Any]:
    actor = FSDPTrainRayActor(args, rank, world_size)
    actor.init(args, "actor", with_opd_teacher=True)
    metrics = []
    for rollout_id, samples in enumerate(rollouts):
        parts = split_batch(args, samples_to_batch(args, samples), dp_size=world_size, cp_size=1)
        metrics.append(actor.train(rollout_id, parts[rank]).metrics)
    result = {"metrics": metrics, "weights": whole_weights(actor), "without_teacher": "trained"}
    alone = FSDPTrainRayActor(args, rank, world_size)
    alone.init(args, "actor")
    parts = split_batch(args, samples_to_batch(args, rollouts[0]), dp_size=world_size, cp_size=1)
    try:
        alone.train(0, parts[rank])
    except UserError as error:
        result["without_teacher"] = str(error)
    return result


# ---- adapters


@pytest.fixture(scope="module")
def elder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher of the student's architecture, as Megatron needs it."""
    path = tmp_path_factory.mktemp("t") / "elder"
    return str(make_tiny_checkpoint(path, seed=3, weight_scale=3.0))


@pytest.fixture(scope="module")
def adapter(student: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    config = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"}
    return peft_case(student, tmp_path_factory.mktemp("adapter"), config, {})


@pytest.mark.parametrize(
    "backend, layout", [("fsdp", {}), ("megatron", {}), ("megatron", {**SP, **DIST_OPT})]
)
def test_adapters_learn_from_a_teacher_what_pefts_do(
    backend, layout, student, elder, adapter, rollouts
):
    """The teacher has no adapters, and its weights do not stay in the trained model."""
    flags = {**adapter.flags, "train_backend": backend, "actor_num_gpus_per_node": 2, **layout}
    args = args_of(student, elder, **flags)
    peft = peft_model(adapter, trainable=True)
    expected = naive_rl.learn(args, student, [taught(elder, s) for s in rollouts], actor=peft)
    run_ranks = run_fsdp_ranks if backend == "fsdp" else run_megatron_ranks
    for found in run_ranks(_train_adapters, 2, args, rollouts):
        for number, metrics in enumerate(found["metrics"]):
            known = expected.losses[number], expected.grad_norms[number]
            assert metrics["train/loss"] == pytest.approx(known[0], rel=2e-4, abs=2e-6)
            assert metrics["train/grad_norm"] == pytest.approx(known[1], rel=2e-4)
        assert metrics["train/opd_kl"] != 0
        theirs = hf_names(expected.weights)
        assert found["adapters"].keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(found["adapters"][name], value, rtol=1e-4, atol=1e-5)


def _train_adapters(rank: int, args: Any, rollouts: list[list[Sample]]) -> dict[str, Any]:
    if args.train_backend == "megatron":
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor as Trainer
    else:
        from slime.backends.fsdp_utils.actor import FSDPTrainRayActor as Trainer
    actor: Any = Trainer(args, rank, 2)
    actor.init(args, "actor", with_opd_teacher=True)
    here, metrics = actor.parallel, []
    for rollout_id, samples in enumerate(rollouts):
        parts = split_batch(args, samples_to_batch(args, samples), dp_size=here.dp_size, cp_size=1)
        metrics.append(actor.train(rollout_id, parts[here.dp_rank]).metrics)
    adapters = {n: t.clone() for n, t in actor.whole_adapters(torch.float32)}
    return {"metrics": metrics, "adapters": adapters}


def test_a_teacher_of_another_vocabulary_is_refused(student, tmp_path):
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=328)
    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.save_pretrained(other)
    message = run_fsdp_ranks(_start_with, 1, args_of(student, str(other)))[0]
    assert "another vocabulary" in message and "'<|new|>' has id 320 there and None here" in message


def _start_with(rank: int, args: Any) -> str:
    try:
        FSDPTrainRayActor(args, rank, 1).init(args, "actor", with_opd_teacher=True)
    except ConfigError as error:
        return str(error)
    return "started"


def test_a_served_teacher_says_what_hugging_face_says(student, teacher, rollouts):
    expected = taught(teacher, rollouts[0])
    with engine_server(teacher) as server:
        for url in (server.url, f"{server.url}/generate"):
            args = args_of(
                student, teacher, opd_type="sglang", opd_teacher_load=None, rm_url=url, rm_type=None
            )
            assert args.custom_rm_path == "slime.rollout.on_policy_distillation.reward_func"
            for sample, known in zip(rollouts[0], expected, strict=True):
                asked = replace(sample)
                assert run(reward_func(args, asked)) == 0.0
                assert asked.teacher_log_probs == pytest.approx(known.teacher_log_probs, abs=1e-4)
        rewarded = args.replace(rm_type="f1")
        one = replace(rollouts[0][0], response="a b", label="a b")
        assert run(reward_func(rewarded, one)) == 1.0


def test_a_prompt_that_fills_the_context_has_no_tokens_to_ask_a_teacher_for(student):
    args = args_of(
        student, "", opd_type="sglang", opd_teacher_load=None, rm_url="http://127.0.0.1:9"
    )
    sample = Sample(prompt="p", tokens=[1, 2, 3], status=Status.TRUNCATED)
    assert run(reward_func(args, sample)) == 0.0 and sample.teacher_log_probs is None
