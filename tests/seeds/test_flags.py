"""Flags, arrays of flags and commands of train.py resolve as the documents write them."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from slime.config.arguments import Args, resolve
from slime.config.flags.draft import Draft
from slime.config.flags.parser import read_command_line
from slime.config.flags.registry import all_flags, options
from tests.parity.model_facts import MODELS
from tests.seeds.documents import ROOT, Quote, flags, quote, quotes

GLM = "glm4.5-355B-A32B"
# The smallest run the short snippets are typed on top of.
BASE = {
    "--hf-checkpoint": ["qwen3-4B"],
    "--prompt-data": ["prompts.jsonl"],
    "--num-rollout": ["10"],
    "--rollout-batch-size": ["32"],
    "--n-samples-per-prompt": ["8"],
    "--rollout-max-response-len": ["1024"],
    "--rm-type": ["math"],
    "--rollout-engine": ["sglang"],
    "--actor-num-gpus-per-node": ["8"],
    "--colocate": [],
}
# What a snippet needs besides, as Megatron and SGLang demand it.
NEEDS = {
    "distributed:275": ["--optimizer-cpu-offload"],
    "backends:244": ["--pipeline-model-parallel-size", "2"],
    "backends:247": ["--hf-checkpoint", "moe"],
    "backends:251": ["--hf-checkpoint", "qwen3-30B-A3B"],
}
_SHOW = """
show() { while [[ $1 != */train.py && $1 != train.py ]]; do shift; done; shift; printf '%s\\0' "$@"; }
ray() { show "$@"; }
python() { show "$@"; }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Model folders with the published configs, and one prompt."""
    base = tmp_path_factory.mktemp("models")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    configs = {
        "qwen3-4B": MODELS["qwen3-4B"]().to_dict(),
        "qwen3-30B-A3B": MODELS["qwen3-30B-A3B"]().to_dict(),
        "moe": {**MODELS["qwen3-30B-A3B"]().to_dict(), "num_experts_per_tok": 6},
        "GLM-4.5-355B-A32B": MODELS[GLM]().to_dict(),
        "GLM-4.5-355B-A32B-FP8": {**MODELS[GLM]().to_dict(), "quantization_config": fp8},
    }
    for name, config in configs.items():
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(config))
    (base / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return base


def bash(script: str, **variables: object) -> list[str]:
    """Return the words that a script prints, each ended by NUL."""
    assigned = "".join(f"{name}={value}\n" for name, value in variables.items())
    command = ["bash", "-euc", assigned + script]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [word for word in output.split("\0") if word and word != "..."]


def array_name(q: Quote) -> str | None:
    found = re.match(r"(\w+)=\(", q.text)
    return found[1] if found else None


def words(q: Quote, **variables: object) -> list[str]:
    """Return the flags as bash hands them to train.py; arrays that stand elsewhere are empty."""
    text = re.sub(r"[ \t]+#.*", "", q.text)
    if name := array_name(q):
        text = text.split("\nray")[0]
        return bash(f'{text}\nprintf "%s\\0" "${{{name}[@]}}"', **variables)
    if text.startswith("python"):  # one comment stands where a line is continued
        text = text.replace("\\", " ").replace("\n", " ")
    arrays = "".join(f"{name}=()\n" for name in set(re.findall(r"\$\{(\w+)\[@\]\}", text)))
    return bash(f"{_SHOW}{arrays}{text}", MASTER_ADDR="10.0.0.1", **variables)


def resolved(argv: list[str], gpus: int = 8) -> Args:
    """Resolve flags for a cluster of machines with 8 GPUs each."""
    given = read_command_line(argv)
    draft = Draft(
        given, dict.fromkeys(given, "command line"), gpus=gpus, offline=True, cluster=True
    )
    return resolve(draft)


def on_base(argv: list[str], folder: Path) -> list[str]:
    base = {name: values for name, values in BASE.items() if name not in argv}
    if "--rollout-num-gpus" in argv or "--rollout-external" in argv:
        base.pop("--colocate")
    argv = [str(folder / word) if (folder / word).exists() else word for word in argv]
    for name in ("--hf-checkpoint", "--prompt-data"):
        if name in base:
            base[name] = [str(folder / base[name][0])]
    return [*argv, *(word for name, values in base.items() for word in (name, *values))]


@pytest.mark.parametrize("flag", flags())
def test_flag_is_known(flag):
    assert flag in options()


@pytest.mark.parametrize("q", quotes("flag"), ids=lambda q: q.place)
def test_described_flag_has_the_type_and_default(q, folder):
    option, *lines = q.text.splitlines()
    flag = all_flags()[options()[option].name]
    default = next((re.fullmatch(r'default:"(.*)"', li) for li in lines if "default" in li), None)
    if not lines:
        return
    assert flag.kind == lines[0]
    if default is not None:
        value = default[1] if flag.kind == "str" else ast.literal_eval(default[1])
        backend = (
            "fsdp" if option in ("--fsdp-cpu-offload", "--gradient-checkpointing") else "megatron"
        )
        algorithm = ["--sglang-speculative-algorithm", "NGRAM"] if "speculative" in option else []
        args = resolved(on_base(["--train-backend", backend, *algorithm], folder))
        # None: the default of the package itself, which is the same.
        assert getattr(args, flag.name) in (value, None)


SHORT = [q for q in quotes("train") if q.document != "glm45"]


@pytest.mark.parametrize("q", SHORT, ids=lambda q: q.place)
def test_snippet_resolves(q, folder):
    argv = words(q, WANDB_KEY="secret")
    args = resolved(on_base([*argv, *NEEDS.get(q.place, [])], folder))
    for name, value in read_command_line(argv).items():
        found = getattr(args, name)
        assert found == (value.rstrip("/") if isinstance(value, str) else value)


def glm_arrays(folder: Path, *chosen: str) -> list[str]:
    """Return the flags of the GLM-4.5 document's arrays, with the model script's."""
    model = f'source scripts/models/{GLM}.sh; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    arrays = [q for q in quotes("train") if q.document == "glm45"]
    names = {array_name(q): q for q in arrays}
    names |= {array_name(quote(place)): quote(place) for place in chosen}
    return bash(model) + [w for q in names.values() for w in words(q, BASE_DIR=folder)]


@pytest.mark.parametrize(
    ("chosen", "checkpoint", "dp"),
    [(("glm45:93", "glm45:166"), "", 4), (("glm45:128", "glm45:120"), "-FP8", 32)],
    ids=["bf16", "fp8"],
)
def test_glm45_job_resolves_on_64_gpus(chosen, checkpoint, dp, folder):
    argv = glm_arrays(folder, *chosen)
    cluster = ["--actor-num-nodes", "8", "--actor-num-gpus-per-node", "8", "--colocate"]
    args = resolved([*argv, *cluster, "--rollout-engine", "sglang"])
    assert args.hf_checkpoint == f"{folder}/GLM-4.5-355B-A32B{checkpoint}/"
    sizes = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
    )
    assert sizes == (8, 4, 2, 16)  # 8 x 4 x 2 = 64 GPUs, as the document counts
    assert args.sglang_dp_size == dp and args.rollout_num_gpus_per_engine == 32
    assert args.load == args.save == f"{folder}/GLM-4.5-355B-A32B_slime"
    if checkpoint:
        assert args.sglang_cuda_graph_bs == [1, 2, 4, 8, *range(16, 129, 8)]


def test_glm45_job_without_a_reference_model(folder):
    argv = glm_arrays(folder, "glm45:93", "glm45:166")
    argv.remove("--use-kl-loss")
    cluster = ["--actor-num-nodes", "8", "--actor-num-gpus-per-node", "8", "--colocate"]
    assert not resolved([*argv, *cluster, "--rollout-engine", "sglang"]).use_kl_loss


def test_filters_of_the_documents_load():
    given = read_command_line(words(quote("distributed:280")))
    for name, text in given.items():
        if name.endswith("_path"):
            module, _, function = text.rpartition(".")
            assert callable(getattr(importlib.import_module(module), function))
