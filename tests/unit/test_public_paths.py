"""Paths, classes and signatures that users' scripts and hooks rely on; read from the syntax trees."""

import ast
from pathlib import Path

import pytest

from slime.cli import COMMANDS, CONVERSIONS

ROOT = Path(__file__).resolve().parents[2]

SAMPLE_FIELDS = [
    "group_index",
    "index",
    "rollout_id",
    "prompt",
    "tokens",
    "response",
    "response_length",
    "label",
    "reward",
    "loss_mask",
    "weight_versions",
    "rollout_log_probs",
    "rollout_routed_experts",
    "teacher_log_probs",
    "remove_sample",
    "status",
    "metadata",
    "train_metadata",
    "session_id",
    "generate_function_path",
    "custom_rm_path",
    "multimodal_inputs",
]

# dotted name -> the leading positional parameters a caller may rely on
FUNCTIONS = {
    "slime.rollout.sglang_rollout.generate_rollout": "args rollout_id data_source evaluation",
    "slime.rollout.sft_rollout.generate_rollout": "args rollout_id data_source evaluation",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "args samples",
    "slime.rollout.filter_hub.buffer_filters.pop_first": "args rollout_id buffer num_samples",
    "slime.utils.arguments.parse_args": "argv",
    "slime.utils.tokenizer.load_tokenizer": "path",
    "slime.utils.data.encode_prompt": "tokenizer text",
    "slime.utils.engine_keys.key_headers": "url",
    "slime.cli.main": "",
}
COROUTINES = {
    "slime.rollout.sglang_rollout.generate": "args sample sampling_params",
    "slime.rollout.rm_hub.async_rm": "args sample",
    "slime.rollout.rm_hub.batched_async_rm": "args samples",
    "slime.utils.http.post": "url payload",
    "slime.quickstart_task.reward": "args sample",
    "slime.rollout.openai_endpoint.record_agent": "args sample sampling_params",
}
METHODS = {
    "slime.backends.base.TrainRayActor": "init train async_train save save_model update_weights",
    "slime.backends.fsdp_utils.actor.FSDPTrainRayActor": (
        "init train async_train save save_model update_weights"
    ),
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": (
        "get_samples add_samples save load __len__"
    ),
    "slime.rollout.base_types.RolloutFnTrainOutput": "samples metrics",
    "slime.rollout.base_types.RolloutFnEvalOutput": "data metrics",
    "slime.rollout.base_types.DynamicFilterOutput": "keep reason",
    "slime.utils.errors.UserError": "exit_status",
    "slime.utils.types.Sample": "append_response_tokens Status",
    "slime.utils.types.Status": "PENDING COMPLETED TRUNCATED ABORTED FAILED",
}
FILES = [
    "train.py",
    "LICENSE",
    "README.md",
    "tools/convert_hf_to_torch_dist.py",
    "tools/convert_torch_dist_to_hf.py",
    "scripts/models/glm4.5-355B-A32B.sh",
]


def module_file(module):
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def find(dotted):
    """(module, syntax node) of a top-level function or class, through `from slime... import name`."""
    module, name = dotted.rsplit(".", 1)
    assert module_file(module).exists(), f"{dotted}: there is no {module_file(module)}"
    tree = ast.parse(module_file(module).read_text())
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name == name:
                return module, node
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slime"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(f"{node.module}.{alias.name}")
    raise AssertionError(f"{module_file(module)} defines no {name}")


def members(dotted):
    """Names defined in the body of a class or of the classes of ours that it derives from."""
    module, node = find(dotted)
    names = set()
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(item.name)
        elif isinstance(item, ast.AnnAssign):
            names.add(item.target.id)
        elif isinstance(item, ast.Assign):
            names.update(target.id for target in item.targets)
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id not in (
            "ABC",
            "Protocol",
            "str",
            "Enum",
            "Exception",
        ):
            names |= members(f"{module}.{base.id}")
    return names


def positional(node):
    return [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]


@pytest.mark.parametrize(("dotted", "parameters"), FUNCTIONS.items())
def test_function(dotted, parameters):
    _, node = find(dotted)
    assert isinstance(node, ast.FunctionDef)
    wanted = parameters.split()
    assert positional(node)[: len(wanted)] == wanted


@pytest.mark.parametrize("path", [*COMMANDS.values(), *CONVERSIONS.values()])
def test_every_command_has_its_function(path):
    _, node = find(path.replace(":", "."))
    assert positional(node)[0] == "argv"


@pytest.mark.parametrize(("dotted", "parameters"), COROUTINES.items())
def test_coroutine(dotted, parameters):
    _, node = find(dotted)
    assert isinstance(node, ast.AsyncFunctionDef)
    wanted = parameters.split()
    assert positional(node)[: len(wanted)] == wanted


@pytest.mark.parametrize(("dotted", "names"), METHODS.items())
def test_members(dotted, names):
    assert not set(names.split()) - members(dotted)


def test_sample_fields():
    assert not set(SAMPLE_FIELDS) - members("slime.utils.types.Sample")


def test_trainer_init_takes_what_callers_give():
    _, actor = find("slime.backends.base.TrainRayActor")
    (init,) = [item for item in actor.body if getattr(item, "name", None) == "init"]
    assert positional(init)[1:5] == ["args", "role", "with_ref", "with_opd_teacher"]


@pytest.mark.parametrize("file", FILES)
def test_file(file):
    assert (ROOT / file).exists()
