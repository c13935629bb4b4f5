"""scripts/models: MODEL_ARGS say what the model's config says, and all of it."""

import math
import subprocess
from pathlib import Path

import pytest

from slime.backends.megatron_utils.architecture import architecture, layer_pattern
from slime.backends.megatron_utils.model_config import check_flags, model_flags
from slime.config.arguments import Args
from slime.config.flags.parser import read_command_line
from slime.config.flags.registry import all_flags
from slime.core.errors import ConfigError
from tests.parity.model_facts import MODELS

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "models"
# Follow from config.json alone: Megatron has no flag for them, or another one implies them.
IMPLIED = {"use_rotary_position_embeddings", "gated_linear_unit"}


def model_args(name):
    script = f'source "{FOLDER / name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.check_output(["bash", "-c", script], text=True).split()


def parsed(argv):
    given = read_command_line(argv)
    return Args(given, dict.fromkeys(given, "command line"))


def value(args, name, num_layers):
    given = getattr(args, name)
    if name == "moe_layer_freq":
        return layer_pattern(given or 1, num_layers)
    if name == "linear_attention_freq":  # every N-th layer has full attention
        return [int((layer + 1) % given[0] > 0) for layer in range(num_layers)]
    if given is None and name == "num_query_groups":
        return args.num_attention_heads  # as Megatron does
    return all_flags()[name].default if given is None else given


def same(one, other):
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return one == other or (not one and not other)


def test_every_script_is_checked():
    assert {path.stem for path in FOLDER.glob("*.sh")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_script_agrees_with_the_config(name):
    check_flags(architecture(MODELS[name]()), parsed(model_args(name)))


@pytest.mark.parametrize("name", MODELS)
def test_script_leaves_nothing_out(name):
    model = architecture(MODELS[name]())
    args = parsed(model_args(name))
    wanted = {k: v for k, v in model_flags(model).items() if k not in IMPLIED}
    # What the model does not have needs no word.
    wanted = {k: v for k, v in wanted.items() if v is not None or getattr(args, k) is not None}
    found = {k: value(args, k, model.fields["num_layers"]) for k in wanted}
    assert {k: (v, found[k]) for k, v in wanted.items() if not same(v, found[k])} == {}


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_number_is_noticed(name):
    argv = model_args(name)
    where = argv.index("--hidden-size") + 1
    changed = [*argv[:where], "64", *argv[where + 1 :]]
    with pytest.raises(ConfigError, match="--hidden-size 64 disagrees"):
        check_flags(architecture(MODELS[name]()), parsed(changed))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--num-experts 8",
            "--num-experts 8 disagrees with config.json of --hf-checkpoint, where it is absent",
        ),
        ("--multi-latent-attention", "--multi-latent-attention True disagrees"),
        ("--add-qkv-bias", "--add-qkv-bias True disagrees"),
        ("--rotary-percent 0.5", "--rotary-percent 0.5 disagrees"),
        ("--use-rope-scaling", "--use-rope-scaling True disagrees"),
        ("--norm-epsilon 1e-5", "--norm-epsilon 1e-05 disagrees"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p True disagrees"),
        ("--attention-output-gate", "--attention-output-gate True disagrees"),
        ("--linear-attention-freq 4", "disagrees with config.json of --hf-checkpoint, where it is"),
        ("--linear-num-key-heads 16", "where it is absent"),
        ("--experimental-attention-variant gated_delta_net", "gated_delta_net disagrees"),
    ],
)
def test_flags_of_another_model_are_noticed(flags, sentence):
    with pytest.raises(ConfigError) as error:
        check_flags(architecture(MODELS["qwen3-4B"]()), parsed(flags.split()))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--linear-attention-freq 2",
        "--linear-attention-freq 0",
        "--linear-attention-freq 1 1 0 1",
        "--linear-num-value-heads 16",
        "--linear-conv-kernel-dim 3",
        "--experimental-attention-variant dsa",
        "--rotary-percent 0.5",
    ],
)
def test_flags_of_other_delta_nets_are_noticed(flags):
    with pytest.raises(ConfigError) as error:
        check_flags(architecture(MODELS["qwen3.5-9B"]()), parsed(flags.split()))
    assert flags.split()[0] in str(error.value) and "disagrees" in str(error.value)


def test_a_pattern_of_layers_may_be_written_out():
    pattern = "1 1 1 0 " * 8
    flags = ["--linear-attention-freq", *pattern.split()]
    check_flags(architecture(MODELS["qwen3.5-9B"]()), parsed(flags))


def test_scripts_define_nothing_else():
    for path in FOLDER.glob("*.sh"):
        first, second, *rest = path.read_text().splitlines()
        assert first.startswith("# ")
        if second.startswith("source "):  # another script, with at most some flags on top
            assert [line.split("(")[0] for line in rest] in ([], ["MODEL_ARGS+="])
        else:
            assert second == "MODEL_ARGS=(" and rest[-1] == ")"


def test_moonlights_flags_that_say_it_has_no_groups_and_no_yarn():
    """One group of experts is no grouping; factors of YaRN mean nothing to plain RoPE."""
    words = "--moe-router-num-groups 1 --moe-router-group-topk 1 --mscale-all-dim 1.0 --mscale 1.0"
    flags = [*model_args("moonlight"), *words.split()]
    check_flags(architecture(MODELS["moonlight"]()), parsed(flags))
    with pytest.raises(ConfigError, match="--moe-router-num-groups 8 disagrees"):
        check_flags(architecture(MODELS["moonlight"]()), parsed(["--moe-router-num-groups", "8"]))
    with pytest.raises(ConfigError, match="--moe-router-num-groups 1 disagrees"):
        check_flags(architecture(MODELS["deepseek-v3"]()), parsed(["--moe-router-num-groups", "1"]))
    with pytest.raises(ConfigError, match=r"--mscale-all-dim 0.5 disagrees"):
        check_flags(architecture(MODELS["deepseek-v3"]()), parsed(["--mscale-all-dim", "0.5"]))
