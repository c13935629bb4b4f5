"""Rules on the declarations of flags: warnings without effect, bounds, names that exist."""

from dataclasses import dataclass

import pytest

from slime.config.flags.draft import Draft, check_values
from slime.config.flags.registry import all_flags
from slime.core.errors import ConfigError
from tests.args import make_args

SFT = {
    "rollout_function_path": "slime.rollout.sft_rollout.generate_rollout",
    "loss_type": "sft_loss",
}


@dataclass
class Case:
    flags: dict
    option: str  # the flag without effect


CASES = [
    Case({"muon_momentum": 0.9}, "--muon-momentum"),
    Case({"sgd_momentum": 0.5}, "--sgd-momentum"),
    Case({"optimizer": "sgd", "adam_eps": 1e-6}, "--adam-eps"),
    Case({"gamma": 0.9}, "--gamma"),
    Case({"lambd": 0.9, "advantage_estimator": "reinforce_plus_plus"}, "--lambd"),
    Case(
        {"disable_grpo_std_normalization": True, "advantage_estimator": "rloo"},
        "--disable-grpo-std-normalization",
    ),
    Case({"eps_clip_c": 3.0, "advantage_estimator": "cispo"}, "--eps-clip-c"),
    Case({"kl_loss_type": "k3"}, "--kl-loss-type"),
    Case({"use_unbiased_kl": True}, "--use-unbiased-kl"),
    Case({"mask_offpolicy_in_partial_rollout": True}, "--mask-offpolicy-in-partial-rollout"),
    Case({"group_rm": True}, "--group-rm"),
    Case({"apply_chat_template_kwargs": {"a": 1}}, "--apply-chat-template-kwargs"),
    Case({**SFT, "partial_rollout": True}, "--partial-rollout"),
    Case({**SFT, "use_kl_loss": True}, "--use-kl-loss"),
    Case({"eval_temperature": 0.5}, "--eval-temperature"),
    Case({"save_total_limit": 3}, "--save-total-limit"),
    Case({"debug_rollout_only": True, "profile_target": ["train_actor"]}, "--profile-target"),
    Case(
        {"custom_reward_post_process_path": "x.y", "overlong_buffer_len": 4},
        "--overlong-buffer-len",
    ),
    Case(
        {"custom_advantage_function_path": "x.y", "normalize_advantages": True},
        "--normalize-advantages",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.option)
def test_a_flag_without_effect_is_warned_about(case):
    (warning,) = make_args(**case.flags).warnings
    assert warning.startswith(f"{case.option} has no effect with"), warning


@pytest.mark.parametrize(
    "flags",
    [
        {"gamma": 0.9, "lambd": 0.9, "advantage_estimator": "ppo"},
        {"gamma": 0.9, "advantage_estimator": "reinforce_plus_plus"},
        {"use_kl_loss": True, "kl_loss_type": "k3", "use_unbiased_kl": True},
        {"kl_coef": 0.1, "kl_loss_type": "k3", "ref_update_interval": 2},
        {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
        {**SFT, "apply_chat_template_kwargs": {"a": 1}},
        {
            "mask_offpolicy_in_partial_rollout": True,
            "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout",
        },
    ],
    ids=lambda flags: " ".join(flags),
)
def test_no_warning_about_flags_with_an_effect(flags):
    assert make_args(**flags).warnings == ()


def test_the_rules_name_flags_that_exist():
    rules = [
        c for flag in all_flags().values() for c in (flag.needs, *flag.unless) if c is not None
    ]
    names = {name for rule in rules for name in rule.names}
    names |= {flag.excludes for flag in all_flags().values() if flag.excludes}
    assert names and not names - set(all_flags())


BOUNDED = [flag for flag in all_flags().values() if flag.bounds]


@pytest.mark.parametrize("flag", BOUNDED, ids=lambda flag: flag.name)
def test_a_value_out_of_bounds_is_refused(flag):
    low, high = flag.above if flag.min is None else flag.min - 1, flag.max and flag.max + 1
    for value in [low] if high is None else [low, high]:
        with pytest.raises(ConfigError, match=f"^{flag.option} must be {flag.bounds}, not"):
            check_values(Draft({flag.name: value}, {flag.name: "command line"}, gpus=0))


def test_a_draft_has_no_value_for_a_name_that_is_no_flag():
    draft = Draft({"lr": 1.0}, {"lr": "command line"}, gpus=0)
    assert draft["lr"] == 1.0 and draft["sglang_tp_size"] is None
    for read in (draft.__getitem__, draft.given, lambda name: draft.derive(name, 1)):
        with pytest.raises(KeyError, match=r"kl_loss_coeff.*did you mean kl_loss_coef\?"):
            read("kl_loss_coeff")
