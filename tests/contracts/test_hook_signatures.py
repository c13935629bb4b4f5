"""Every hook is checked when a run starts: good and minimal ones pass, wrong ones are named."""

from __future__ import annotations

import inspect

import pytest

from slime.config.flags.registry import own_flags
from slime.core.errors import ConfigError
from slime.rollout.hooks import HOOKS, check_hooks
from tests.args import make_args
from tests.contracts import good, minimal, wrong

ARGS = make_args()  # once: hooks are swapped in, whatever combination a command line would allow


def args_with(name, path, **more):
    return ARGS.replace(**{name: path}, **more)


def test_every_flag_that_names_code_has_a_protocol():
    files = {
        "allowed_local_media_path", "custom_config_path", "lora_adapter_path", "megatron_config_path",
    }  # fmt: skip
    flags = {name for name in own_flags() if name.endswith("_path")} - files
    assert flags == set(HOOKS)
    for module in (good, minimal, wrong):
        assert set(HOOKS) <= set(vars(module))


@pytest.mark.parametrize("module", [good, minimal], ids=["good", "minimal"])
@pytest.mark.parametrize("name", HOOKS)
def test_right_hooks_pass(name, module):
    check_hooks(args_with(name, f"{module.__name__}.{name}"))


@pytest.mark.parametrize("name", HOOKS)
def test_wrong_hooks_name_the_flag_and_the_expected_signature(name):
    path = f"tests.contracts.wrong.{name}"
    with pytest.raises(ConfigError) as caught:
        check_hooks(args_with(name, path))
    text = str(caught.value)
    assert text.startswith(f"--{name.replace('_', '-')} {path}")
    if name == "data_source_path":
        assert "def add_samples(self, samples)" in text
        return
    for parameter in list(inspect.signature(HOOKS[name].__call__).parameters)[1:]:
        assert parameter in text
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("module", [good, minimal])
def test_group_rewards_have_their_own_signature(module):
    check_hooks(
        args_with("custom_rm_path", f"{module.__name__}.custom_group_rm_path", group_rm=True)
    )
    with pytest.raises(ConfigError, match=r"expected: def custom_group_rm_path\(args, samples\)"):
        path = "tests.contracts.wrong.custom_group_rm_path"
        check_hooks(args_with("custom_rm_path", path, group_rm=True))


@pytest.mark.parametrize("name", HOOKS)
def test_paths_that_lead_nowhere_name_the_flag(name):
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} tests.nowhere.fn: "):
        check_hooks(args_with(name, "tests.nowhere.fn"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rm_type": "maths"}, "--rm-type maths: choose one of"),
        ({"rm_type": "boxed_math"}, "write --rm-type math"),
        ({"rm_type": "remote_rm"}, "--rm-url"),
        ({"rm_type": "dapo"}, "add --reward-key score"),
    ],
)
def test_reward_settings(changes, text):
    with pytest.raises(ConfigError, match=text):
        check_hooks(ARGS.replace(**changes))
