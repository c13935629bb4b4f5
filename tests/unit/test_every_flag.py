"""Every flag of every family is honoured, harmless for a reason that is written down, or refused.

honoured  slime's own: read outside the flags' own package. Megatron's: the value reaches a field that
          megatron-core reads, or slime reads it, or it must agree with config.json. SGLang's and the
          router's: the value is on the server's command line.
harmless  in a table with the reason.
refused   a ConfigError that names the option, at any value but the default.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slime.config.arguments import Args, parse_args
from slime.config.checks import megatron_support
from slime.config.checks.engine_checks import _ROUTER_OWNED
from slime.config.flags.engine_options import (
    _REPLACED,
    HARMLESS,
    HONOURED,
    OWNED,
    embedded_support,
    sglang_argv,
)
from slime.config.flags.registry import all_flags, own_flags
from slime.config.flags.spec import Flag
from slime.core.errors import ConfigError
from slime.engine.arguments import parse_engine_args
from tests.args import make_args, make_argv
from tests.flag_values import other_value, words

ROOT = Path(__file__).parents[2]
FAMILY = {
    family: [flag for flag in all_flags().values() if flag.family == family]
    for family in ("slime", "megatron", "sglang", "router")
}
REFUSED = megatron_support.REFUSED
NEEDS_TE = megatron_support.NEEDS_TE
MEGATRON_HARMLESS = megatron_support.HARMLESS


def by_name(flag: Flag) -> str:
    return flag.name


# ---- slime's own

# Flags whose name no `args.<name>` shows, with the code that reads them.
_READ_BY_NAME = {
    "config": "slime/config/arguments.py: parse_args",
    "dry_run": "slime/cli/plan/command.py: is_dry_run",
    "eval_temperature": "slime/config/derive.py: _eval_datasets",
    "eval_top_p": "slime/config/derive.py: _eval_datasets",
    "eval_top_k": "slime/config/derive.py: _eval_datasets",
    "eval_max_response_len": "slime/config/derive.py: _eval_datasets",
    "eval_input_key": "slime/config/derive.py: _eval_datasets",
    "eval_label_key": "slime/config/derive.py: _eval_datasets",
    "eval_max_context_len": "slime/config/derive.py: _eval_datasets",
    "eval_max_prompt_len": "slime/config/derive.py: _eval_datasets",
    "eval_min_new_tokens": "slime/config/derive.py: _eval_datasets",
    "eval_tool_key": "slime/config/derive.py: _eval_datasets",
    "custom_config_path": "slime/config/arguments.py: resolve",
    "critic_lr": "slime/config/role_config.py: apply_role_config",
    "megatron_config_path": "slime/config/role_config.py: apply_role_config",
}
_REFUSED_OTHERWISE = {
    "rollout_buffer_url": "docs/customization.md: a rollout function of the user's reads it",
    "distributed_backend": "slime/config/checks/layout_checks.py: the device's own is the only choice",
}


@pytest.mark.parametrize("flag", own_flags().values(), ids=by_name)
def test_a_flag_of_slime_is_read_by_the_code(flag):
    if flag.ignored:  # harmless, for a reason that is written down and printed
        return
    where = {**_READ_BY_NAME, **_REFUSED_OTHERWISE}.get(flag.name)
    if where is not None:
        path, _, what = where.partition(": ")
        assert what.split(":")[0] and flag.name.split("_")[-1] in (ROOT / path).read_text()
        return
    assert reads_of_args()[flag.name], f"nothing reads args.{flag.name}"


@cache
def reads_of_args() -> dict[str, set[str]]:
    """Name -> files with `args.name`, a hook loaded by its flag's name, or `draft["name"]` in derive.py."""
    found: dict[str, set[str]] = defaultdict(set)
    folders = ("slime/config/flags", "slime/config/checks", "slime/cli/plan", "slime/runlog/report")
    files = list((ROOT / "slime").rglob("*.py"))
    kept = [path for path in files if not str(path.relative_to(ROOT)).startswith(folders)] + [
        ROOT / "slime/config/derive.py"
    ]
    for path in [*kept, ROOT / "train.py", ROOT / "train_async.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = _name_read(node)
            if name is not None:
                found[name].add(str(path.relative_to(ROOT)))
    return found


def _name_read(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        base = getattr(node.value, "id", getattr(node.value, "attr", ""))
        return node.attr if base.endswith("args") else None
    if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "draft":
        return getattr(node.slice, "value", None)
    is_hook = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_hook and node.value.endswith("_path") else None


# ---- Megatron's


@pytest.mark.parametrize("flag", FAMILY["megatron"], ids=by_name)
def test_a_flag_of_megatron_is_honoured_harmless_or_refused(flag):
    assert sum(flag.name in table for table in (REFUSED, MEGATRON_HARMLESS, NEEDS_TE)) <= 1
    if flag.name in REFUSED or flag.name in NEEDS_TE:
        assert flag.option in refusal_of(flag)
    elif flag.name in MEGATRON_HARMLESS:
        assert MEGATRON_HARMLESS[flag.name]
    elif flag.name not in reads_of_args():
        assert_reaches_megatron(flag)


@pytest.mark.parametrize("flag", FAMILY["megatron"], ids=by_name)
def test_megatrons_default_can_be_typed(flag):
    """It asks for nothing; but an attention dropout of 0.1 and TransformerEngine are not what slime does."""
    if flag.default is None or flag.name not in {**REFUSED, **dict.fromkeys(NEEDS_TE)}:
        return
    value = megatron_support.WITHOUT_EFFECT.get(flag.name, flag.default)
    assert megatron_support.asks_for_something(flag.name, value) is False


def test_the_tables_speak_of_flags_that_exist():
    names = {*REFUSED, *MEGATRON_HARMLESS, *NEEDS_TE, *megatron_support.WITHOUT_EFFECT}
    assert names <= {flag.name for flag in FAMILY["megatron"]}
    assert {name for name, reason in HARMLESS.items() if not reason.strip()} == set()


def refusal_of(flag: Flag) -> str:
    with pytest.raises(ConfigError) as error:
        parse_args([*make_argv(train_backend="megatron"), *words(flag, other_value(flag))])
    return str(error.value)


def assert_reaches_megatron(flag: Flag) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from transformers import Qwen3MoeConfig

    from slime.backends.megatron_utils.architecture import architecture
    from slime.backends.megatron_utils.model_config import check_flags, config_fields, flag_fields

    model = architecture(Qwen3MoeConfig(num_hidden_layers=2, tie_word_embeddings=True))
    for value in (flag.default or False, other_value(flag)):
        args = with_flag(flag, value)
        try:
            check_flags(model, args)
        except (
            ConfigError
        ) as error:  # it says something of the model, and config.json another thing
            assert flag.option in str(error)
            return
    configs = {
        "TransformerConfig": config_fields(model, args),
        "OptimizerConfig": flag_fields(args, OptimizerConfig),
        "DistributedDataParallelConfig": flag_fields(args, DistributedDataParallelConfig),
    }
    targets = [target.split(".") for target in flag.sets]
    arrived = [configs[owner][field] for owner, field in targets if field in configs[owner]]
    assert arrived and all(plain(one) == plain(value) for one in arrived), (value, arrived)
    assert any(readers()[field] for _, field in targets) or flag.name in _READ_BY_THE_CONFIG


# Fields that only the __post_init__ of a configuration class reads, into others.
_READ_BY_THE_CONFIG = {"moe_enable_deepep"}


def with_flag(flag: Flag, value: Any) -> Args:
    args = make_args(train_backend="megatron").replace(**{flag.name: value})
    args._origins[flag.name] = "command line"
    return args


def plain(value: Any) -> Any:
    """One load-balancing type is given to Megatron as such, several as a list."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@cache
def readers() -> dict[str, set[str]]:
    """Field of a configuration -> files of megatron-core that read it and that a run of slime's uses."""
    import megatron.core

    root = Path(megatron.core.__file__).parent
    found: dict[str, set[str]] = defaultdict(set)
    for path in root.rglob("*.py"):
        name = str(path.relative_to(root))
        if name.startswith(_NOT_USED) or name.endswith("_config.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found[node.attr].add(name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                found[getattr(node.args[1], "value", "")].add(name)
    return found


_NOT_USED = (
    "extensions/", "ssm/", "inference", "distributed/fsdp", "models/bert", "models/T5",
    "models/mamba", "models/multimodal", "models/retro", "models/mimo", "models/vision",
    "models/gpt/experimental", "models/gpt/heterogeneous", "export/", "post_training",
    "dist_checkpointing", "tokenizers", "datasets", "full_cuda_graph", "resharding",
    "transformer/cuda_graphs", "transformer/dot_product_attention", "transformer/torch_norm",
    "transformer/heterogeneous", "transformer/experimental_attention_variant", "fp8_utils",
    "fp4_utils", "fusions/fused_layer_norm", "transformer/multi_token_prediction",
)  # fmt: skip


# ---- SGLang's and its router's


@pytest.mark.parametrize("flag", FAMILY["sglang"], ids=by_name)
def test_a_flag_of_sglang_is_on_its_command_line(flag):
    name = flag.name.removeprefix("sglang_")
    if name in OWNED:
        assert OWNED[name]
        return
    for version in flag.versions:
        argv = sglang_argv({name: other_value(flag)}, version)
        spelled = {"--" + option.removeprefix("--sglang-") for option in flag.options}
        off = {"--no-" + option[2:] for option in spelled}
        replaced = version != "0.5.16" and name in {*_REPLACED, "enable_dp_attention"}
        assert replaced or argv[0] in spelled | off, argv


@pytest.mark.parametrize("flag", FAMILY["sglang"], ids=by_name)
def test_a_flag_of_sglang_is_honoured_by_the_embedded_engine_or_refused(flag):
    name = flag.name.removeprefix("sglang_")
    support = embedded_support(name)
    if support == "refused" and other_value(flag) != flag.default:
        with pytest.raises(ConfigError) as error:
            parse_args([*make_argv(), *words(flag, other_value(flag))])
        assert flag.option in str(error.value) or "--sglang" in str(error.value)
    elif support == "honoured" and name not in ("tp_size", "skip_tokenizer_init"):
        assert_on_the_engines_command_line(flag, name)


_ENGINE_VALUES = {
    "speculative_algorithm": "NGRAM", "load_format": "dummy", "dtype": "bfloat16", "device": "cpu",
    "mem_fraction_static": 0.5, "context_length": 64, "max_total_tokens": 64, "log_level": "debug", "speculative_num_draft_tokens": 6,
}  # fmt: skip


def assert_on_the_engines_command_line(flag: Flag, name: str) -> None:
    from slime.ray.engine_actor import engine_command

    value = _ENGINE_VALUES.get(name, other_value(flag))
    args = make_args(**{flag.name: value})
    command = engine_command(args, index=0, host="127.0.0.1", port_file=Path("port"))
    parsed = parse_engine_args(command[3:])
    found = getattr(parsed, name)
    assert (list(found) if isinstance(found, tuple) else found) == value


def test_the_embedded_engine_has_a_reason_for_what_it_does_without():
    assert not set(HARMLESS) & HONOURED


@pytest.mark.parametrize("flag", FAMILY["router"], ids=by_name)
def test_a_flag_of_the_router_is_on_its_command_line(flag):
    if flag.name in _ROUTER_OWNED:
        assert _ROUTER_OWNED[flag.name]
        return
    from slime.serving.router import router_argv

    value = other_value(flag)
    args = make_args().replace(**{flag.name: value})
    argv = router_argv(args, python="python", host="h", port=1, metrics_port=2)
    option = "--" + flag.name.removeprefix("router_").replace("_", "-")
    assert option in argv
    if flag.kind != "bool":
        first = value[0] if flag.many else value
        text = json.dumps(first) if flag.kind == "json" else str(first)
        assert text in argv[argv.index(option) :]
