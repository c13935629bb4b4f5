"""Flags of critic, distillation, reference and attention: what is refused, warned about and derived."""

import pytest

from slime.algorithms.estimators import RECIPES
from slime.core.errors import ConfigError
from slime.ray.placement_group import plan_layout
from tests.args import make_args

OPD = {"use_opd": True, "opd_type": "sglang", "rm_url": "http://teacher:30000"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"value_clip": 0}, ["--value-clip", "above 0"]),
        ({"num_critic_only_steps": -1}, ["--num-critic-only-steps", "at least 0"]),
        ({"critic_lr": 1e-7, "min_lr": 1e-6, "lr": 1e-5}, ["--min-lr", "--critic-lr"]),
        ({"critic_save": "/c", "advantage_estimator": "ppo"}, ["--critic-save", "--save"]),
        ({"critic_load": "/no/critic"}, ["--critic-load", "/no/critic"]),
        ({"ref_update_interval": 0}, ["--ref-update-interval", "at least 1"]),
        ({"attn_implementation": "sdpaa"}, ["--attn-implementation", "sdpa"]),
        ({"use_opd": True}, ["--opd-type"]),
        ({**OPD, "rm_url": None}, ["--rm-url"]),
        ({**OPD, "rm_type": "remote_rm"}, ["remote_rm", "--rm-url"]),
        ({**OPD, "group_rm": True}, ["--group-rm"]),
        ({**OPD, "loss_type": "sft_loss"}, ["--loss-type policy_loss"]),
        (
            {"use_tis": True, "use_rollout_logprobs": True},
            ["--use-tis", "--use-rollout-logprobs", "twice"],
        ),
        ({**OPD, "opd_kl_coef": -1}, ["--opd-kl-coef", "at least 0"]),
        ({"use_opd": True, "opd_type": "megatron"}, ["--opd-teacher-load"]),
        (
            {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "/no/teacher"},
            ["--opd-teacher-load", "/no/teacher"],
        ),
    ],
    ids=lambda value: None,
)
def test_refused(overrides, words):
    with pytest.raises(ConfigError) as error:
        make_args(**overrides)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "name", ["value_clip", "critic_lr", "num_critic_only_steps", "opd_kl_coef", "opd_type"]
)
def test_flags_of_a_model_that_is_not_there_are_warned_about(name):
    value = {"opd_type": "sglang", "num_critic_only_steps": 2}.get(name, 0.3)
    (warning,) = make_args(**{name: value}).warnings
    assert warning.startswith("--" + name.replace("_", "-")) and "no effect" in warning


def test_distillation_scores_samples_itself_unless_told_how():
    ours = "slime.rollout.on_policy_distillation.reward_func"
    assert make_args(**OPD).custom_rm_path == ours
    assert make_args(**OPD, custom_rm_path="tests.e2e.rewards.dense").custom_rm_path != ours
    assert make_args().custom_rm_path is None


@pytest.mark.parametrize(("estimator", "recipe"), RECIPES.items())
def test_a_critic_is_trained_where_the_recipe_takes_its_values(estimator, recipe):
    assert make_args(advantage_estimator=estimator).needs_critic == recipe.critic


def test_only_ppo_has_a_critic():
    assert make_args(advantage_estimator="ppo").needs_critic
    assert not make_args().needs_critic
    assert not make_args(advantage_estimator="ppo", loss_type="sft_loss").needs_critic
    args = make_args(advantage_estimator="ppo", actor_num_gpus_per_node=2)
    layout = plan_layout(args, with_critic=True)
    assert layout.with_critic and layout.trainer == [0, 1]
    assert not plan_layout(args, with_trainer=False, with_critic=True).with_critic


def test_one_response_per_prompt_has_nothing_to_be_compared_with():
    (warning,) = make_args(n_samples_per_prompt=1).warnings
    assert "grpo" in warning and "--n-samples-per-prompt 1" in warning
    for flags in (
        {"advantage_estimator": "ppo"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"disable_rewards_normalization": True},
        {"custom_generate_function_path": "agents.several_samples"},
        OPD,
    ):
        assert make_args(n_samples_per_prompt=1, **flags).warnings == ()
